"""What a run has found, as rows (value beside its reference), as lines for people, and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvtierd.bench.rows import Row, as_table, make_row
from kvtierd.core.units import MIB, format_bytes
from kvtierd.stress.rig import Found

BENCH = "stress"
GB = 1e9


def rows(found: Found) -> list[Row]:
    """A row for each figure that the run came to; goals are those of the project for a quiet machine."""
    return [*_tiers(found.figures), *_hits(found), *_steps(found), *_sizes(found)]


def _row(metric: str, value: float, unit: str, reference: float = 0.0, name: str = "", goal: str = "") -> Row:
    if reference > 0:
        return make_row(BENCH, metric, value, unit, reference=reference, reference_name=name, goal=goal)
    return make_row(BENCH, metric, value, unit, goal=goal if not name else "")


def _tiers(f: Mapping[str, float]) -> Iterator[Row]:
    if "ingest" in f:
        bounds = {"copies": f["copy"], "plain writes": f["disk_write"] * f.get("fp8_ratio", 1.0),
                  "the generator alone": f["generator"]}  # fmt: skip
        name = min(bounds, key=lambda bound: bounds[bound])
        yield _row("ingest, until all is durable", f["ingest_durable"] / GB, "GB/s", bounds[name] / GB, name, ">= 0.8")
        yield _row("nvme: written", f["nvme_write"] / GB, "GB/s", f["disk_write"] / GB, "plain writes")
    if "verify" in f:
        yield _row("verify, every byte of every block", f["verify"] / GB, "GB/s", f["generator"] / GB,
                   "the generator alone")  # fmt: skip
        yield _row("nvme: read for it", f.get("nvme_read", 0.0) / GB, "GB/s", f.get("disk_read_blocks", 0.0) / GB,
                   "plain reads")  # fmt: skip
    if "host_read" in f:
        yield _row("host: hits copied out", f["host_read"] / GB, "GB/s", f["copy"] / GB, "copies")
    if "gpu_in" in f:
        yield _row("gpu: copied in", f["gpu_in"] / GB, "GB/s", f["copy"] / GB, "copies")


def _hits(found: Found) -> Iterator[Row]:
    if "lookups" in found.figures:
        yield _row("lookups of 32 keys, all clients", found.figures["lookups"], "1/s")
    if (mixed := found.counts.get("mixed")) and mixed.get("asked"):
        yield _row("mixed load: blocks asked for that were hits", mixed.get("hit", 0) / mixed["asked"], "")


def _steps(found: Found) -> Iterator[Row]:
    f = found.figures
    if "step" not in f:
        return
    context = _context(found.options.token_count)
    bound, name = max(
        (f.get("disk_alone", 0.0), "plain reads of the same bytes"), (f["compute_alone"], "the kernel alone")
    )
    yield _row(f"decode step over {context}", f["step"] * 1e3, "ms", bound * 1e3, name, "<= 1.15")
    for part, what in (("disk", "reads from nvme under way"), ("copy", "copies into reach under way"),
                       ("compute", "the kernel at work"), ("overlap", "more than one of these at once")):  # fmt: skip
        yield _row(f"  of it, {what}", f[f"step_{part}"] * 1e3, "ms")
    yield _row("  plain reads of the same bytes", f.get("disk_alone", 0.0) * 1e3, "ms")
    yield _row("  the kernel alone over all tokens", f["compute_alone"] * 1e3, "ms")
    for tier in ("gpu", "host", "nvme"):
        yield _row(f"  of its KV, from {tier}", f[f"step_{tier}_bytes"] / MIB, "MiB")
    if "growth" in f:
        yield make_row(BENCH, "step time a token / that over an eighth of the context", f["growth"], "", goal="<= 1.1")
    yield make_row(BENCH, "attention, largest relative error against float64", f["attend_error"], "", goal="<= 0.0001")


def _sizes(found: Found) -> Iterator[Row]:
    f = found.figures
    if "memory_peak" in f:
        yield _row("memory (PSS) of daemon and clients, at most", f["memory_peak"] / MIB, "MiB",
                   f["memory_budget"] / MIB, "budgets + 200 MiB + 100 MiB a client", "<= 1.0")  # fmt: skip
    if "write_amplification" in f and not found.options.fp8:
        yield make_row(BENCH, "bytes written to disk / bytes stored", f["write_amplification"], "", goal="<= 1.05")
    if "fp8_ratio" in f:
        yield make_row(BENCH, "FP8: bytes before / after", f["fp8_ratio"], "", goal=">= 1.9")
        yield _row("FP8: mean relative L2 error of a head's K or V", f["fp8_error_mean"], "")
        yield _row("FP8: largest error / largest magnitude of the head", f["fp8_error_max"], "")
        yield _row("FP8: largest relative error of a head's output", f["attend_lossy_error"], "")


def as_text(found: Found) -> str:
    """The table, what was checked, what was found, the verdict."""
    lines = [as_table(rows(found)), "", *_checked(found)]
    lines += [f"FOUND  {finding}" for finding in found.findings]
    if found.ended_at:
        lines.append(f"it could not go on after phase {found.ended_at}")
    lines += found.counts.get("daemon_log", [])
    lines.append(f"verdict: {'pass' if found.passed else 'FAIL'} ({_what(found)})")
    return "\n".join(lines)


def _checked(found: Found) -> Iterator[str]:
    for phase, counts in found.counts.items():
        if isinstance(counts, dict) and "missing" in counts:
            yield (
                f"{phase}: {counts['blocks']:,} blocks compared byte for byte, {counts['wrong']} wrong, "
                f"{counts['missing']} lost, {counts['lossy']:,} through FP8"
            )
        elif isinstance(counts, dict):
            yield f"{phase}: " + ", ".join(f"{name} {_short(value)}" for name, value in counts.items())
    if count := found.counts.get("attends_checked"):
        yield f"decode: {count} answers of Attend compared with float64"


def _short(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _what(found: Found) -> str:
    o = found.options
    return (
        f"{_context(o.token_count)}, {o.geometry}, {o.kv.layers} layers, {format_bytes(o.context_bytes)} of KV, "
        f"gpu {format_bytes(o.gpu)}, host {format_bytes(o.host)}, {o.clients} clients, seed {o.seed}"
        f"{', FP8' if o.fp8 else ''}{', chaos' if o.chaos else ''}"
    )


def _context(tokens: int) -> str:
    return f"{tokens:,} tokens"


def as_json(found: Found, command: str) -> str:
    """One object: verdict, findings, rows, every figure (bytes a second, seconds, bytes) and count, and the machine."""
    return json.dumps(
        {
            "verdict": "pass" if found.passed else "fail",
            "command": command,
            "machine": f"{platform.node()} {platform.machine()} {platform.release()}",
            "what": _what(found),
            "tokens": found.options.token_count,
            "context_bytes": found.options.context_bytes,
            "findings": found.findings,
            "ended_at": found.ended_at,
            "rows": [msgspec.to_builtins(row) for row in rows(found)],
            "figures": found.figures,
            "counts": {name: value for name, value in found.counts.items() if name != "daemon_log"},
        }
    )
