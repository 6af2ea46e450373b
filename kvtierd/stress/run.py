"""The stress from start to verdict: a daemon, clients, and phases in which everything that comes back is checked."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from kvtierd.bench.options import thread_count
from kvtierd.core.stored_form import EncodedLayout
from kvtierd.core.units import MIB, PAGE_BYTES, format_bytes
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.client import Client
from kvtierd.stress import ceilings
from kvtierd.stress.chaos import Chaos, Load
from kvtierd.stress.content import Content
from kvtierd.stress.decode import Judged, judge
from kvtierd.stress.options import Options
from kvtierd.stress.processes import Crew, StressError
from kvtierd.stress.watch import Watch

SAMPLE_BLOCKS = 256
GPU_SHARE = 0.75
"""Of the gpu tier that blocks of the context are brought into; its watermark is 0.8."""
GROWTH_STRIDE = 8
"""The shorter context that steps are compared with has every eighth block: an eighth of a million is 128k."""
TIMEOUT_S = 120.0
MIXED_S, QUICK_MIXED_S = 20.0, 5.0
CHAOS_S, QUICK_CHAOS_S = 90.0, 25.0
LOOKUPS_S = 1.0
HOT_ROUNDS = 4


@dataclasses.dataclass(slots=True)
class Found:
    """All that a run has measured and found. Rates are in bytes a second, times in seconds."""

    options: Options
    findings: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    ended_at: str = ""
    """The phase in which it could not go on; "" where it came to its end."""

    @property
    def passed(self) -> bool:
        """The verdict."""
        return not self.findings and not self.ended_at


class Stress:
    """One run."""

    def __init__(
        self, options: Options, folder: Path, out: TextIO, endpoint: str, daemon: EmbeddedDaemon | None
    ) -> None:
        self.options, self._folder, self._out, self._endpoint, self._daemon = options, folder, out, endpoint, daemon
        self._threads = thread_count()
        self.content = Content(options.seed, options.kv, lossy=options.fp8)
        self.found = Found(options)
        self.crew: Crew
        self.watch: Watch
        self._client = Client(endpoint, timeout_s=TIMEOUT_S, transfer_timeout_s=TIMEOUT_S, arena=False, name="stress")
        self._handle = self._client.register(self.content.namespace, allow_loss=options.fp8)
        self._keys = self.content.keys((0, options.blocks))

    def run(self) -> Found:
        """All phases. What cannot go on is a finding too."""
        configs = [self._config(number) for number in range(self.options.clients)]
        with contextlib.ExitStack() as stack:
            stack.callback(self._client.close)
            self.crew = stack.enter_context(Crew(configs, self._folder))
            self.watch = Watch(self._endpoint, lambda: self.crew.pids, len(configs), self._out)
            stack.callback(self.watch.close)
            self.watch.start()
            phase = "start"
            try:
                for phase, work in self._phases():  # noqa: B007 - what it was at is told below
                    work()
            except StressError as error:
                self.found.ended_at = phase
                self.found.findings.append(f"{phase}: {error}")
            self._weigh()
        return self.found

    def _phases(self) -> Iterator[tuple[str, Any]]:
        yield "ceilings", self._ceilings
        yield "ingest", self._ingest
        yield "sample", self._sample
        yield "verify", self._verify
        yield "hot", self._hot
        yield "decode", self._decode
        yield "mixed", self._mixed
        if self.options.chaos:
            yield "chaos", self._chaos

    def _config(self, number: int) -> dict[str, Any]:
        return {
            "endpoint": self._endpoint,
            "number": number,
            "seed": self.options.seed,
            "geometry": msgspec.to_builtins(self.options.kv),
            "lossy": self.options.fp8,
            "heads": self.options.query_heads,
            "blocks": self.options.blocks,
            "timeout_s": 5.0 if self.options.chaos else TIMEOUT_S,
        }

    def _ceilings(self) -> None:
        """Before anything is stored: copies, plain writes, and the generator in all clients at once."""
        self.watch.phase("ceilings", 3)
        figures = self.found.figures
        figures["copy"] = ceilings.copy_rate(self._threads)
        self.watch.at(1)
        probe = min(self.options.context_bytes // 4, 1024 * MIB)
        figures["disk_write"] = ceilings.write_rate(self._folder, probe)
        self.watch.at(2)
        blocks = max(8, min(self.options.blocks, 512 * MIB // self.options.kv.slot_bytes) // self.options.clients)
        done = self.crew.run([{"do": "generate", "blocks": blocks}] * self.options.clients)
        figures["generator"] = sum(each["bytes"] for each in done) / max(each["seconds"] for each in done)

    def _ingest(self) -> None:
        options, blocks = self.options, self.options.blocks
        self.watch.phase("ingest", blocks)
        edges = np.linspace(0, blocks, options.clients + 1).astype(int).tolist()
        stats = self.watch.ask()
        # What each client may still put into the queue when it has looked: two batches, the one it has and the next.
        limit = min(512 * MIB, int(stats["host_capacity_bytes"]) // 2)
        room = max(options.kv.slot_bytes, limit - 2 * options.clients * options.batch * options.kv.slot_bytes)
        commands = [
            {"do": "ingest", "begin": begin, "end": end, "batch": options.batch, "queue_bytes": room,
             "plant": options.plant}
            for begin, end in zip(edges[:-1], edges[1:], strict=True)
        ]  # fmt: skip
        begin_s = time.perf_counter()
        done = self.crew.run(commands, self.watch.advance)
        committed_s = time.perf_counter() - begin_s
        self._client.flush()
        figures, total = self.found.figures, options.context_bytes
        figures["ingest_seconds"] = time.perf_counter() - begin_s
        figures["ingest"] = total / committed_s
        figures["ingest_durable"] = total / figures["ingest_seconds"]
        figures["ingest_waited"] = sum(each["waited_s"] for each in done) / len(done)
        self._check_all_on_disk()
        self._count_writes()

    def _check_all_on_disk(self) -> None:
        hit = self._client.lookup(self._handle, self._keys)
        missing, unwritten = self.options.blocks - hit.count, int(np.count_nonzero((hit.tiers & 4) == 0))
        if missing or unwritten:
            stats = self.watch.ask()
            causes = {
                name: value for name, value in stats.items() if value and name.startswith(("offload_", "host_lost"))
            }
            self.found.findings.append(
                f"after ingest and flush {missing} blocks are missing (behind block {hit.count}) and {unwritten} are "
                f"not on disk: {causes}"
            )

    def _count_writes(self) -> None:
        """Everything written to the device since the daemon began, over the payload stored."""
        stats = self.watch.ask()
        names = ("written_bytes", "header_bytes", "journal_bytes", "checkpoint_bytes")
        written = sum(int(stats[f"nvme_{name}"]) for name in names)
        self.found.figures["written_bytes"] = written
        self.found.figures["nvme_write"] = written / self.found.figures["ingest_seconds"]
        self.found.figures["write_amplification"] = written / self.options.context_bytes
        if self.options.fp8 and stats["compressed_out_bytes"]:
            self.found.figures["fp8_ratio"] = stats["compressed_in_bytes"] / stats["compressed_out_bytes"]
            self.found.figures["fp8_error_mean"] = float(stats["compress_relative_l2_mean"])
            self.found.figures["fp8_error_max"] = float(stats["compress_error_max"])
            self.found.counts["fp8_blocks"] = int(stats["compressed_blocks"])

    def _verify_blocks(self, phase: str, commands: list[dict[str, Any]], total: int) -> Mapping[str, Any]:
        self.watch.phase(phase, total)
        begin_s = time.perf_counter()
        done = self.crew.run(commands, self.watch.advance)
        seconds = time.perf_counter() - begin_s
        merged: dict[str, Any] = {
            name: sum(each[name] for each in done) for name in ("blocks", "lossy", "missing", "wrong")
        }
        merged["seconds"] = seconds
        merged["sources"] = {
            name: sum(each["sources"].get(name, 0) for each in done)
            for name in {n for each in done for n in each["sources"]}
        }
        self.found.findings += [f"{phase}: {finding}" for each in done for finding in each["findings"]]
        self.found.counts[phase] = merged
        return merged

    def _sample(self) -> None:
        rng = random.Random(self.options.seed)
        count = min(SAMPLE_BLOCKS, self.options.blocks)
        chosen = rng.sample(range(self.options.blocks), count)
        parts = [chosen[at :: self.options.clients] for at in range(self.options.clients)]
        batch = min(8, self.options.batch)
        self._verify_blocks(
            "sample", [{"do": "verify", "blocks": part, "batch": batch} for part in parts if part], count
        )

    def _all_blocks(self, phase: str) -> Mapping[str, Any]:
        edges = np.linspace(0, self.options.blocks, self.options.clients + 1).astype(int).tolist()
        commands = [
            {"do": "verify", "begin": begin, "end": end, "batch": self.options.batch}
            for begin, end in zip(edges[:-1], edges[1:], strict=True)
        ]
        return self._verify_blocks(phase, commands, self.options.blocks)

    def _verify(self) -> None:
        figures = self.found.figures
        merged = self._all_blocks("verify")
        figures["verify"] = merged["blocks"] * self.options.kv.slot_bytes / merged["seconds"]
        if self._daemon is not None:
            part = self._disk_part()
            figures["disk_read_blocks"] = ceilings.read_rate(
                self._data_folder(), part * self.options.kv.layers, part * self.options.kv.layers + PAGE_BYTES,
                max(64, 512 * MIB // (part * self.options.kv.layers)),
            )  # fmt: skip
            figures["nvme_read"] = merged["blocks"] * part * self.options.kv.layers / merged["seconds"]

    def _data_folder(self) -> Path:
        return self._folder / "data"

    def _disk_part(self) -> int:
        """Bytes of a layer of a block as it lies on disk."""
        return EncodedLayout(self.options.kv).layer_stride if self.options.fp8 else self.options.kv.layer_stride

    def _hot(self) -> None:
        """Blocks that are in host already, read again and again: what a hit costs; and lookups."""
        self.watch.phase("hot", 2)
        clients = self.options.clients
        room = int(self.watch.ask()["host_capacity_bytes"]) // 2 // self.options.kv.slot_bytes
        each = max(1, min(room, self.options.blocks) // clients)
        first = self.options.blocks - each * clients
        commands = [
            {"do": "hot", "begin": first + n * each, "end": first + (n + 1) * each, "batch": self.options.batch,
             "rounds": HOT_ROUNDS}
            for n in range(clients)
        ]  # fmt: skip
        done = self.crew.run(commands)
        self.found.figures["host_read"] = sum(r["bytes"] for r in done) / max(r["seconds"] for r in done)
        self.watch.at(1)
        done = self.crew.run([{"do": "lookups", "seconds": LOOKUPS_S}] * clients)
        self.found.figures["lookups"] = sum(r["lookups"] / r["seconds"] for r in done)
        if any(r["found"] < r["lookups"] for r in done):
            self.found.findings.append("hot: lookups of stored blocks found nothing")

    def _into_gpu(self) -> None:
        stats = self.watch.ask()
        capacity = int(stats.get("gpu_capacity_bytes", 0))
        wanted = min(int(capacity * GPU_SHARE) // self.options.kv.slot_bytes, self.options.blocks)
        if not wanted:
            return
        rng = np.random.default_rng(self.options.seed)
        chosen = np.sort(rng.permutation(self.options.blocks)[:wanted])
        for at in range(0, wanted, 16):
            part = self._keys[chosen[at : at + 16]]
            self._client.prefetch(self._handle, part, tier="gpu", wait=True)
        after = self.watch.ask()
        moved = int(after["host_to_gpu_moved_bytes"]) - int(stats["host_to_gpu_moved_bytes"])
        busy_ns = int(after["host_to_gpu_moving_ns"]) - int(stats["host_to_gpu_moving_ns"])
        if moved and busy_ns:
            self.found.figures["gpu_in"] = moved / busy_ns * 1e9

    def _decode(self) -> None:
        """Steps over the whole context, and over an eighth of it."""
        options, figures = self.options, self.found.figures
        steps = 2 if options.quick else 3
        layers = list(range(options.kv.layers))
        self.watch.phase("decode", 2 * (steps + 1))
        self._into_gpu()
        for stride, name in ((1, "step"), (GROWTH_STRIDE, "short_step")):
            if options.blocks // stride < 2:
                continue
            command = {
                "do": "decode",
                "stride": stride,
                "layers": layers,
                "steps": steps,
                "warmup": 1,
                "timeout_s": TIMEOUT_S,
            }
            (answers,) = self.crew.run([command], self.watch.advance)
            seconds = [sum(a["seconds"] for a in answers if a["step"] == step) for step in range(steps)]
            figures[name] = float(np.median(seconds))
            if stride == 1:
                self._parts_of(answers, steps)
                self._bound(answers, steps)
            self._judge(answers, stride)
        if "short_step" in figures:
            short = math.ceil(options.blocks / GROWTH_STRIDE)
            figures["growth"] = (figures["step"] / options.blocks) / (figures["short_step"] / short)

    def _parts_of(self, answers: list[Mapping[str, Any]], steps: int) -> None:
        """What the daemon says a step was made of, in seconds; the mean over steps."""
        total: dict[str, float] = {}
        for answer in answers:
            for name, value in answer["parts"].items():
                total[name] = total.get(name, 0) + value / steps
        figures = self.found.figures
        figures["step_inside"] = total.get("attend_ns", 0) / 1e9
        figures["step_disk"] = total.get("attend_disk_ns", 0) / 1e9
        figures["step_copy"] = total.get("attend_copy_ns", 0) / 1e9
        figures["step_compute"] = total.get("attend_compute_ns", 0) / 1e9
        parts = figures["step_disk"] + figures["step_copy"] + figures["step_compute"]
        mean = sum(answer["seconds"] for answer in answers) / steps
        figures["step_overlap"] = max(0.0, parts - mean)
        figures["step_nvme_bytes"] = total.get("attend_nvme_bytes", 0)
        figures["step_host_bytes"] = total.get("attend_host_bytes", 0)
        figures["step_gpu_bytes"] = total.get("attend_gpu_bytes", 0)

    def _bound(self, answers: list[Mapping[str, Any]], steps: int) -> None:
        """The larger of the disk's time for the same bytes and the kernel's for the same tokens."""
        options, figures = self.options, self.found.figures
        lossy = any(answer["lossy"] for answer in answers)
        alone = ceilings.KernelAlone(self.content, options.query_heads, self._threads, lossy=lossy)
        figures["compute_alone"] = alone.seconds(options.blocks) * options.kv.layers
        figures["disk_alone"] = 0.0
        if self._daemon is not None and figures["step_nvme_bytes"]:
            part = EncodedLayout(options.kv).layer_stride if lossy else options.kv.layer_stride
            step = part * options.kv.layers + PAGE_BYTES
            figures["disk_read"] = ceilings.read_rate(self._data_folder(), part, step, max(64, 1024 * MIB // part))
            figures["disk_alone"] = figures["step_nvme_bytes"] / figures["disk_read"]

    def _judge(self, answers: list[Mapping[str, Any]], stride: int) -> None:
        options = self.options
        names = math.ceil(options.blocks / stride)
        self.watch.phase("oracle", names)
        judged: Judged = judge(
            self.content, options.query_heads, stride, options.blocks, answers, self._threads, self.watch.at
        )
        self.found.findings += [f"decode: {finding}" for finding in judged.findings]
        figures, counts = self.found.figures, self.found.counts
        figures["attend_error"] = max(figures.get("attend_error", 0.0), judged.error)
        figures["attend_lossy_error"] = max(figures.get("attend_lossy_error", 0.0), judged.lossy_error)
        counts["attends_checked"] = counts.get("attends_checked", 0) + judged.checked

    def _mixed(self) -> None:
        seconds = QUICK_MIXED_S if self.options.quick else MIXED_S
        self.watch.phase("mixed", 0)
        load = Load(self.crew, lambda _count: None)
        load.run(seconds)
        self._take_load("mixed", load)
        self._check_ledger("ledger", load)

    def _chaos(self) -> None:
        assert self._daemon is not None
        seconds = QUICK_CHAOS_S if self.options.quick else CHAOS_S
        self.watch.phase("chaos", 0)
        load = Load(self.crew, lambda _count: None)
        chaos = Chaos(self.options.seed, load, self._daemon, self.options.clients, self._folder / "faults.json")
        load.run(seconds, chaos.blows())
        self._daemon.kill()
        self._daemon.start()
        self._take_load("chaos", load)
        self._check_ledger("ledger after chaos", load)
        self._all_blocks("verify after chaos")

    def _take_load(self, phase: str, load: Load) -> None:
        tally = load.tally
        self.found.findings += [f"{phase}: {finding}" for finding in tally.findings]
        self.found.counts[phase] = {**tally.counts, **tally.events, "prompts in the ledger": len(load.ledger),
                                    "blocks compared": tally.checked["blocks"], "seconds": tally.seconds}  # fmt: skip

    def _check_ledger(self, phase: str, load: Load) -> None:
        prompts = [list(runs) for runs in load.ledger]
        total = sum(blocks for runs in prompts for _, blocks in runs)
        clients = self.options.clients
        commands = [{"do": "verify_prompts", "prompts": prompts[n::clients], "batch": 16} for n in range(clients)]
        merged = self._verify_blocks(phase, commands, total)
        if merged["blocks"] + merged["missing"] < total:
            self.found.findings.append(f"{phase}: {merged['blocks']} of {total} durable blocks were compared")

    def _weigh(self) -> None:
        figures = self.found.figures
        figures["memory_peak"], figures["memory_budget"] = self.watch.peak_bytes, self.watch.budget_bytes
        self.found.counts["memory_peak_phase"] = self.watch.peak_phase
        if self.watch.peak_bytes > self.watch.budget_bytes:
            self.found.findings.append(
                f"memory: daemon and clients took {format_bytes(self.watch.peak_bytes)} in phase {self.watch.peak_phase}; "
                f"{format_bytes(self.watch.budget_bytes)} are allowed"
            )


def run_stress(options: Options, out: TextIO) -> Found:
    """Run on a daemon of one's own, or on the one at `options.endpoint`. Raises StressError where it cannot begin."""
    base = options.nvme
    if base is not None and not base.is_dir():
        raise StressError(f"--nvme {base} is no folder")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="kvtierd-stress-", dir=base) as name:
        folder = Path(name)
        options.check(folder)
        if options.endpoint:
            return Stress(options, folder, out, options.endpoint, None).run()
        with EmbeddedDaemon(folder, **options.settings(folder)) as daemon:
            found = Stress(options, folder, out, daemon.endpoint, daemon).run()
            if not found.passed:
                found.counts["daemon_log"] = daemon.logs().splitlines()[-30:]
            return found
