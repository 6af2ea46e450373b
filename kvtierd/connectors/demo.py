"""`kvtierctl demo` and its bench: one prompt's KV served from every tier, before and after a restart of the daemon.

    cold → save → gpu → host → nvme → restart → nvme → host → gpu

Each answer is compared with the cold one, token by token, and each tier is shown only if it really served.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtierd.bench.rows import BenchError, Row
from kvtierd.connectors.demo_rig import PROMPT_TOKENS, DemoRig, Generation, Progress
from kvtierd.connectors.demo_table import Line, bench_row
from kvtierd.core.units import format_bytes
from kvtierd.protocol.messages import Tier

BEFORE_RESTART: tuple[Tier, ...] = ("gpu", "host", "nvme")
AFTER_RESTART: tuple[Tier, ...] = ("nvme", "host", "gpu")
BENCH_ROUNDS, BENCH_ROUNDS_QUICK = 3, 1


def run_demo(progress: Progress, directory: Path | None = None, prompt_tokens: int = PROMPT_TOKENS) -> Iterator[Line]:
    """Run the demonstration; lines come as they are measured. Raises ModelUnavailableError where a package is missing.

    `progress` gets a line a step; `directory` is where the temporary folder lies.
    """
    with DemoRig(progress, directory, prompt_tokens) as rig:
        progress(f"cold prefill of {rig.input_ids.shape[1]:,} tokens")
        cold = rig.cold()
        yield _line(cold, cold)
        stored = rig.save()
        progress(f"stored {stored.stored} blocks, {format_bytes(stored.payload_bytes)}; flushing")
        for tier in BEFORE_RESTART:
            rig.place(tier)
            progress(f"serving from {tier}")
            yield _line(rig.served(), cold, tier)
        progress("restarting the daemon")
        rig.restart()
        for tier in AFTER_RESTART:
            rig.place(tier)
            progress(f"serving from {tier}, after the restart")
            yield _line(rig.served(), cold, tier, restarted=True)


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"demo: {line}\n")


def bench_rows(
    *, quick: bool, directory: Path | None = None, progress: Progress = _to_stderr, prompt_tokens: int = 0
) -> Iterator[Row]:
    """Time to first token from host, and from nvme after a restart, over the cold prefill: medians of rounds.

    `prompt_tokens` is 0 for the demo's own length, or half of it with `quick`.

    Every round measures all three in turn, so that a machine that drifts drifts for all. Raises BenchError when the
    daemon does not take the prompt, ModelUnavailableError where a package is missing.
    """
    rounds = BENCH_ROUNDS_QUICK if quick else BENCH_ROUNDS
    prompt_tokens = prompt_tokens or (PROMPT_TOKENS // 2 if quick else PROMPT_TOKENS)
    cold: list[Generation] = []
    lines: dict[str, list[Line]] = {"host": [], "nvme": []}
    with DemoRig(progress, directory, prompt_tokens) as rig:
        for turn in range(rounds):
            progress(f"round {turn + 1} of {rounds}")
            cold.append(rig.cold())
            stored = rig.save()
            if stored.refused:
                raise BenchError(f"the daemon refused {stored.refused} blocks of the prompt")
            rig.place("host")
            lines["host"].append(_line(rig.served(), cold[0], "host"))
            rig.client.flush()
            rig.restart()
            lines["nvme"].append(_line(rig.served(), cold[0], "nvme", restarted=True))
    cold_s = statistics.median(generation.first_token_s for generation in cold)
    for seen in lines.values():
        yield bench_row(_median(seen, cold_s))


def _line(served: Generation, cold: Generation, tier: str = "", *, restarted: bool = False) -> Line:
    restored = served.restored
    return Line(
        tier=tier,
        restarted=restarted,
        first_token_s=served.first_token_s,
        cold_s=cold.first_token_s,
        tokens_found=restored.tokens if restored else 0,
        payload_bytes=restored.payload_bytes if restored else 0,
        sources=restored.sources if restored else {},
        equal=served.tokens == cold.tokens,
    )


def _median(lines: list[Line], cold_s: float) -> Line:
    """The line of several rounds: the median time; wrong, or served elsewhere, if any round was."""
    worst = next((line for line in lines if not line.ok), lines[0])
    return Line(
        tier=worst.tier,
        restarted=worst.restarted,
        first_token_s=statistics.median(line.first_token_s for line in lines),
        cold_s=cold_s,
        tokens_found=worst.tokens_found,
        payload_bytes=worst.payload_bytes,
        sources=worst.sources,
        equal=worst.equal,
    )
