"""`kvtierctl bench offloaded`: a decode step of a real model over 8k tokens in the daemon, most of them on disk.

gpu and host together hold an eighth of the context's KV. What bounds a step is measured in the same rounds: the disk,
by plain O_DIRECT reads of as many parts of the same size from the same files, or the kernel alone over contiguous
memory, whichever is slower; and the model's own step, over a short plain cache. Naive offload copies the whole context
from the same tiers into contiguous buffers each step, and then takes torch's attention. The measuring of the model lies
in kvtierd.bench.offloaded_rig, which wants torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtierd.bench.attend import IO_THREADS, RawReads
from kvtierd.bench.options import Options, need_memory, thread_count
from kvtierd.bench.rounds import Measure, alternate, timed
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import daemon_and_client
from kvtierd.core.units import MIB

_NEEDED = ("torch", "transformers", "accelerate", "gguf")
TOKENS = 8192 - 64
BLOCK_SIZE = 64


def rows(options: Options) -> Iterator[Row]:
    """Measure with exact blocks, then with FP8 ones. Raises BenchError where the model's libraries are missing."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise BenchError(f"a real model needs {' and '.join(missing)}: pip install 'kvtierd[demo]'")
    rig = importlib.import_module("kvtierd.bench.offloaded_rig")  # wants torch: only now
    model = rig.Model(TOKENS, BLOCK_SIZE)
    rounds = options.rounds(7, 3)
    yield from _exact(options, rig, model, rounds)
    yield from _fp8(options, rig, model, rounds)


@contextlib.contextmanager
def _offloaded(options: Options, rig: Any, model: Any, *, allow_loss: bool) -> Iterator[tuple[Path, Any]]:
    """A daemon whose gpu and host hold an eighth of the KV, and the model's past in it."""
    budget = model.kv_bytes // 8
    host = budget * 3 // 4 // MIB // 2 * 2 * MIB
    need_memory(4 * model.kv_bytes)
    settings = {
        "gpu__capacity": budget - host,
        "host__capacity": host,
        "host__chunk_bytes": 2 * MIB,
        "nvme__capacity": 4 * model.kv_bytes + 1024 * MIB,
        "nvme__io_threads": IO_THREADS,
        "nvme__scrub_rate": 0,
    }
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory))
        daemon, client = stack.enter_context(daemon_and_client(Path(name), thread_count(), **settings))
        yield daemon.data_dir, stack.enter_context(rig.offloaded(model, client, allow_loss=allow_loss))


def _exact(options: Options, rig: Any, model: Any, rounds: int) -> Iterator[Row]:
    with _offloaded(options, rig, model, allow_loss=False) as (folder, past):
        past.step()
        parts = past.count_parts()
        raw = RawReads(folder, parts.in_nvme, parts.shape)
        layers = int(parts.shape.layers)

        def disk(threads: int) -> float:
            return timed(lambda: raw.run(threads))

        measures: list[Measure] = [
            lambda: timed(past.step),
            lambda: timed(model.step),
            lambda: timed(past.compute) * layers,
            lambda: timed(past.naive),
            *(functools.partial(disk, threads) for threads in (IO_THREADS, IO_THREADS * 3 // 2)),
        ]
        ours, alone, compute, naive, *disks = alternate(measures, rounds)
    bound, name = max((min(disks), "plain reads of the parts in nvme"), (compute, "the kernel alone"))
    tokens = f"{model.tokens / 1000:.1f}k tokens"
    yield make_row(
        "offloaded",
        f"a decode step over {tokens}, {parts.in_nvme * 100 // parts.blocks}% of the blocks in nvme",
        ours * 1e3,
        "ms",
        reference=(bound + alone) * 1e3,
        reference_name=f"{name} + the model's own step",
        goal="<= 1.15",
    )
    yield make_row("offloaded", "the model's own step", alone * 1e3, "ms")
    yield make_row("offloaded", "plain reads of the parts in nvme", min(disks) * 1e3, "ms")
    yield make_row("offloaded", "the kernel alone over all layers", compute * 1e3, "ms")
    yield make_row(
        "offloaded",
        f"tokens a second over {tokens}",
        1 / ours,
        "/s",
        reference=1 / naive,
        reference_name="naive offload from the same tiers",
    )


def _fp8(options: Options, rig: Any, model: Any, rounds: int) -> Iterator[Row]:
    with _offloaded(options, rig, model, allow_loss=True) as (_, past):
        past.step()
        measures: list[Measure] = [lambda: timed(past.step)]
        (ours,) = alternate(measures, rounds)
    with _offloaded(options, rig, model, allow_loss=False) as (_, past):
        (naive,) = alternate([lambda: timed(past.naive)], options.rounds(3, 2))
    yield make_row(
        "offloaded",
        "the same from FP8",
        1 / ours,
        "/s",
        reference=1 / naive,
        reference_name="naive offload of exact blocks",
    )
