"""`kvtierctl bench recovery`: a start on 100,000 blocks, until the page table has them.

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
from collections.abc import Iterator
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


def rows(options: Options) -> Iterator[Row]:
    """Fill and crash; then start after the crash, after a clean end, and without an index, in each round."""
    killed, clean, scanned = [], [], []
    for number in range(options.rounds(3, 1)):
        with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder:
            directory = Path(folder) / "store"
            fill_and_crash(directory, BLOCKS, seed=number)
            killed.append(asyncio.run(_start(directory)))
            clean.append(asyncio.run(_start(directory)))
            for path in [*directory.glob("checkpoint-*"), *directory.glob("journal-*")]:
                path.unlink()
            scanned.append(asyncio.run(_start(directory)))
    count = f"{BLOCKS:,} blocks"
    yield make_row("recovery", f"{count}, clean checkpoint", statistics.median(clean), "s", goal="<= 0.5")
    yield make_row("recovery", f"{count}, after kill -9", statistics.median(killed), "s", goal="<= 1")
    yield make_row("recovery", f"{count}, full scan of headers", statistics.median(scanned), "s")


async def _start(directory: Path) -> float:
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
    if found != BLOCKS:
        raise BenchError(f"{found} of {BLOCKS} blocks were found")
    return seconds
