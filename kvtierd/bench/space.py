"""`kvtierctl bench space`: what a full store writes to its device for every byte that it is asked to store.

Blocks of 512 KiB are asked for with Zipf-distributed popularity out of eight times as many as fit; what is not there is
stored, until five times the capacity was. Blocks that were asked for again are hot, and move when their segment is
recycled. Counted is everything: blocks, blocks written again, headers, journal, checkpoints; by the store, and by the
kernel for this process. The same requests without moving show what that buys.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import namespace, random_keys
from kvtierd.config.schema import Nvme
from kvtierd.core.checksum import layer_sums
from kvtierd.core.clock import SystemClock
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.storage import Extent, SegmentStore, WriteItem
from kvtierd.storage.buffers import page_buffer
from kvtierd.storage.stats import WRITTEN

BLOCK = Geometry(block_size=128, layers=8, kv_heads=1, k_dim=128, v_dim=128)
"""A block of 512 KiB in 8 layers."""
CAPACITY_TIMES = 5
UNIVERSE_TIMES = 8
ZIPF = 0.9
BATCH = 32
FLUSH_EVERY = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one run wrote and found."""

    asked_bytes: int
    store_bytes: int
    kernel_bytes: int
    rewritten_bytes: int
    hits: float
    disk_share: float


class Reuse:
    """The caller of a store under Zipf-distributed requests: keeps who is where, and how often each was used again."""

    def __init__(self, store: SegmentStore, capacity_bytes: int, *, moves: bool) -> None:
        self._store = store
        self._space = namespace(BLOCK)
        self._digest = self._space.digest()
        universe = UNIVERSE_TIMES * capacity_bytes // BLOCK.slot_bytes
        self._keys = random_keys(universe, seed=1)
        weights = 1 / np.arange(1, universe + 1) ** ZIPF
        self._shares = np.cumsum(weights) / weights.sum()
        self._rng = np.random.default_rng(2)
        self._extents: list[Extent | None] = [None] * universe
        self._uses: npt.NDArray[np.float32] = np.zeros(universe, np.float32)
        self._data = page_buffer(BLOCK.slot_bytes)
        self._data[:] = self._rng.integers(0, 256, BLOCK.slot_bytes, np.uint8)
        self._sums = layer_sums(self._data, BLOCK)
        self.asked = self.found = self.stored = 0
        store.register(self._digest, self._space)
        store.on_reclaim(self._reclaimed)
        if moves:
            store.on_rewrite(lambda tags: self._uses[tags], self._moved)

    def _reclaimed(self, told: list[tuple[int, Extent]]) -> None:
        for tag, extent in told:
            if self._extents[tag] == extent:
                self._extents[tag] = None

    def _moved(self, told: list[tuple[int, Extent, Extent]]) -> list[bool]:
        kept = [self._extents[tag] == old for tag, old, _ in told]
        for (tag, _, new), same in zip(told, kept, strict=True):
            if same:
                self._extents[tag] = new
                self._uses[tag] /= 2  # it must be used again to move again
        return kept

    async def step(self) -> None:
        """A batch of requests; what is missing is stored."""
        wanted = np.searchsorted(self._shares, self._rng.random(BATCH))
        missing: list[int] = []
        for tag in wanted.tolist():
            self.asked += 1
            if self._extents[tag] is not None:
                self.found += 1
                self._uses[tag] += 1
            elif tag not in missing:
                missing.append(tag)
        items = [
            WriteItem(self._digest, self._keys[tag].tobytes(), BLOCK, self._data, self._sums, tag) for tag in missing
        ]
        for tag, place in zip(missing, await self._store.write(items), strict=True):
            if not isinstance(place, Extent):
                raise BenchError(f"a block could not be stored: {place}")
            self._extents[tag], self._uses[tag] = place, 0
            self.stored += 1


async def run(directory: Path, capacity_bytes: int, *, moves: bool) -> Outcome:
    """Store five times the capacity; the store is closed in the end, which counts too."""
    settings = Nvme(directory=str(directory), capacity=capacity_bytes, segment_bytes=capacity_bytes // 24)
    before, most = _kernel_bytes(), 0
    store = SegmentStore(settings, clock=SystemClock())
    await store.open()
    try:
        reuse, turn = Reuse(store, capacity_bytes, moves=moves), 0
        while reuse.stored * BLOCK.slot_bytes < CAPACITY_TIMES * capacity_bytes:
            await reuse.step()
            turn += 1
            if turn % FLUSH_EVERY == 0:
                await store.flush()
                most = max(most, _on_disk(directory))
        await store.flush()
        stats = store.stats()
    finally:
        await store.close()
    return Outcome(
        asked_bytes=reuse.stored * BLOCK.slot_bytes,
        store_bytes=sum(int(stats[name]) for name in WRITTEN),
        kernel_bytes=_kernel_bytes() - before,
        rewritten_bytes=int(stats["rewritten_bytes"]),
        hits=reuse.found / reuse.asked,
        disk_share=most / capacity_bytes,
    )


def rows(options: Options) -> Iterator[Row]:
    """Run with and without moving what is hot."""
    capacity_bytes = (1024 if not options.quick else 384) * MIB
    outcomes = []
    for moves in (True, False):
        with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder:
            outcomes.append(asyncio.run(run(Path(folder) / "store", capacity_bytes, moves=moves)))
    moving, plain = outcomes
    asked = moving.asked_bytes
    yield make_row("space", "write amplification, all causes", moving.store_bytes / asked, "x", goal="<= 1.3")
    if moving.kernel_bytes:
        kernel = moving.kernel_bytes / asked
        yield make_row("space", "write amplification, as the kernel counts", kernel, "x", goal="<= 1.3")
    yield make_row("space", "of it, hot blocks written again", moving.rewritten_bytes / asked, "x")
    yield make_row("space", "most on disk, of the capacity", moving.disk_share, "x", goal="<= 1")
    yield make_row(
        "space",
        "requests found",
        100 * moving.hits,
        "%",
        reference=100 * plain.hits,
        reference_name="the same requests, nothing written again",
    )


def _kernel_bytes() -> int:
    """Bytes that this process caused to be written to a device."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def _on_disk(directory: Path) -> int:
    """Bytes of all files, as allocated."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))
