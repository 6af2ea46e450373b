"""`kvtierctl bench checksum`: what verifying costs when blocks are read as fast as the disk gives them.

Blocks of 512 KiB and 2 MiB are read through the store, whole batches at a time, so that all I/O threads are busy. Each
thread's time in reads and in checksums is taken by wrapping the two functions; the share is that of checksums in both.
Once from the disk (O_DIRECT where the file system has it), which the goal is about; once from the page cache, as no
disk could be faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import namespace, random_keys
from kvtierd.config.schema import Nvme
from kvtierd.core.checksum import block_sum, layer_sums
from kvtierd.core.clock import SystemClock
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.storage import Extent, ReadItem, SegmentStore, WriteItem, reader
from kvtierd.storage.buffers import page_buffer
from kvtierd.storage.io_posix import PosixFile

SHAPES = {
    "512 KiB": Geometry(block_size=32, layers=16, kv_heads=2, k_dim=128, v_dim=128),
    "2 MiB": Geometry(block_size=64, layers=32, kv_heads=2, k_dim=128, v_dim=128),
}
BATCH_BYTES = 64 * MIB
SUMS = "sums_of_blocks"
"""What the reader verifies with."""


class Stopwatch:
    """Time spent in wrapped functions, over all threads, in nanoseconds by name."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}
        self._guard = threading.Lock()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **options: Any) -> Any:
            begin_ns = time.perf_counter_ns()
            try:
                return function(*args, **options)
            finally:
                passed = time.perf_counter_ns() - begin_ns
                with self._guard:
                    self.spent_ns[name] = self.spent_ns.get(name, 0) + passed

        return timed


@contextlib.contextmanager
def watched() -> Iterator[Stopwatch]:
    """Time the checksums of what is read, and the reads of segment files."""
    watch = Stopwatch()
    sums, read = getattr(reader, SUMS), PosixFile.read
    setattr(reader, SUMS, watch.wrap("checksum", sums))
    setattr(PosixFile, "read", watch.wrap("read", read))  # noqa: B010 - a method is no attribute to type checkers
    try:
        yield watch
    finally:
        setattr(reader, SUMS, sums)
        setattr(PosixFile, "read", read)  # noqa: B010


async def read_rate(
    directory: Path, shape: Geometry, count: int, mode: Literal["auto", "buffered"]
) -> dict[str, float]:
    """Store blocks, read them all twice, and time the second turn: bytes a second and the share of checksums."""
    size = shape.slot_bytes
    settings = Nvme(directory=str(directory), capacity=2 * count * size + 64 * MIB, segment_bytes=64 * MIB, mode=mode)
    space = namespace(shape)
    digest = space.digest()
    data = page_buffer(size)
    data[:] = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    sums = layer_sums(data, shape)
    names = [key.tobytes() for key in random_keys(count, seed=1)]
    store = SegmentStore(settings, clock=SystemClock())
    await store.open()
    try:
        store.register(digest, space)
        places = await store.write([WriteItem(digest, name, shape, data, sums, at) for at, name in enumerate(names)])
        await store.flush()
        total = block_sum(sums)
        per_batch = max(1, BATCH_BYTES // size)
        outs = [page_buffer(size) for _ in range(per_batch)]
        found = [np.zeros(shape.layers, np.uint64) for _ in range(per_batch)]
        seconds = 0.0
        with watched() as watch:
            for turn in range(2):
                watch.spent_ns.clear()
                begin = time.perf_counter()
                for at in range(0, count, per_batch):
                    items = [
                        ReadItem(digest, name, shape, _placed(place), total, out, into)
                        for name, place, out, into in zip(
                            names[at : at + per_batch], places[at : at + per_batch], outs, found, strict=False
                        )
                    ]
                    if any(await store.read(items)):
                        raise BenchError(f"a block could not be read in turn {turn}")
                seconds = time.perf_counter() - begin
    finally:
        await store.close()
    share = watch.spent_ns["checksum"] / (watch.spent_ns["checksum"] + watch.spent_ns["read"])
    return {"rate": count * size / seconds, "share": 100 * share, "direct": float(store.mode == "o_direct")}


def _placed(place: object) -> Extent:
    if not isinstance(place, Extent):
        raise BenchError(f"a block could not be stored: {place}")
    return place


def rows(options: Options) -> Iterator[Row]:
    """Both sizes, from the disk and from the page cache."""
    amount = (1024 if not options.quick else 256) * MIB
    for name, shape in SHAPES.items():
        for mode, source, goal in (("auto", "the disk", "<= 15"), ("buffered", "the page cache", "")):
            with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder:
                wanted: Literal["auto", "buffered"] = "buffered" if mode == "buffered" else "auto"
                found = asyncio.run(read_rate(Path(folder) / "store", shape, amount // shape.slot_bytes, wanted))
            place = source if mode == "buffered" or found["direct"] else "a file system without O_DIRECT"
            yield make_row("checksum", f"{name}: time in checksums, reading {place}", found["share"], "%", goal=goal)
            yield make_row("checksum", f"{name}: read and verified from {place}", found["rate"] / MIB, "MiB/s")
