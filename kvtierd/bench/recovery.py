"""`kvtierctl bench recovery`: a start on 100,000 blocks, and on fewer, until the page table has them.

Three ends of the life before: killed (-9) after a flush, closed cleanly, and without an index, so that every record's
header is read. The blocks are 512 KiB apart in segments of the default size; only their headers are on the disk. What
is timed is the tier manager's start: directory, superblock, segment headers, index or scan, merge, page table. The
page cache is dropped before each.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.sparse_store import SparseIo, drop_caches, fill_and_crash
from kvtierd.bench.sparse_store import settings as nvme_settings
from kvtierd.config.schema import Host, Settings
from kvtierd.core.clock import SystemClock
from kvtierd.core.units import MIB
from kvtierd.storage import SegmentStore
from kvtierd.tiers.manager import TierManager

BLOCKS = 100_000
FEWER = (10_000, 30_000)
"""Smaller stores, once each: how the times grow."""


def rows(options: Options) -> Iterator[Row]:
    """Smaller stores, then the one with goals in several rounds."""
    for blocks in FEWER:
        yield from _rows(blocks, [_ends(blocks, 0, options.directory)])
    ends = [_ends(BLOCKS, number, options.directory) for number in range(options.rounds(3, 1))]
    yield from _rows(BLOCKS, ends, ("<= 0.5", "<= 1", ""))


def _rows(blocks: int, ends: Sequence[tuple[float, ...]], goals: tuple[str, ...] = ("", "", "")) -> Iterator[Row]:
    kinds = ("clean checkpoint", "after kill -9", "full scan of headers")
    for kind, seconds, goal in zip(kinds, zip(*ends, strict=True), goals, strict=True):
        yield make_row("recovery", f"{blocks:,} blocks, {kind}", statistics.median(seconds), "s", goal=goal)


def _ends(blocks: int, seed: int, parent: Path | None) -> tuple[float, float, float]:
    """Fill and crash; seconds of a start after a clean end, after the crash, and without an index."""
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=parent) as folder:
        directory = Path(folder) / "store"
        fill_and_crash(directory, blocks, seed=seed)
        killed = asyncio.run(_start(directory, blocks))
        clean = asyncio.run(_start(directory, blocks))
        for path in [*directory.glob("checkpoint-*"), *directory.glob("journal-*")]:
            path.unlink()
        return clean, killed, asyncio.run(_start(directory, blocks))


async def _start(directory: Path, blocks: int) -> float:
    """Seconds until a manager on this store serves; it is closed cleanly."""
    drop_caches(directory)
    settings = Settings(nvme=nvme_settings(directory), host=Host(capacity=8 * MIB, chunk_bytes=MIB))
    store = SegmentStore(settings.nvme, clock=SystemClock(), io=SparseIo())
    manager = TierManager(settings, store=store, device=None, clock=SystemClock())
    begin = time.perf_counter()
    await manager.start()
    seconds = time.perf_counter() - begin
    found = int(manager.stats()["nvme_blocks"])
    await manager.close()
    if found != blocks:
        raise BenchError(f"{found} of {blocks} blocks were found")
    return seconds
