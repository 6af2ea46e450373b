"""Offload to nvme behind the client's back: bounded, in commit order, never in anybody's way.

A committed block is queued with its host slot held, so that it is not evicted before it is written. When more than
the allowed bytes wait, new blocks are deferred: they are in host only, may be evicted, and are queued as soon as there
is room if they are still there. A slow disk costs copies on disk, never a stall. Clients that copy out
of host memory are left most of the time, unless somebody waits for the writes or much of the tier is not on disk.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging

import numpy as np
import numpy.typing as npt

from kvtierd.core.clock import Clock
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.keys import KEY_BYTES
from kvtierd.core.stored_form import Codec
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.storage.interface import BlockStore, DegradedError, Extent, Extents, WriteItem
from kvtierd.tiers.blocks import OFFLOADING, RETURNED, Rows
from kvtierd.tiers.compress import Compressor, Encoded
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.disk_quota import DiskQuota
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.write_patience import Patience

_log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""Bytes handed to the store at once: long sequential writes, and short enough that reads come between."""

DEFERRED_MAX = 4096
"""Batches that wait for room in the queue; beyond it the oldest are given up, and stay in host only."""

BATCHES_INFLIGHT = 3
"""One being written, one being checked, one being planned."""


@dataclasses.dataclass(slots=True, eq=False)
class _Batch:
    entry: NamespaceEntry
    cls: SlotClass
    rows: Rows
    slots: Slots
    number: int

    @property
    def size_bytes(self) -> int:
        return int(self.rows.size) * self.entry.geometry.slot_bytes


class WriteBehind:
    """The queue towards the store. Everything runs on the loop; the store moves bytes in its own threads."""

    def __init__(self, copies: Copies, store: BlockStore, limit_bytes: int, clock: Clock, patience: Patience) -> None:
        self._copies = copies
        self.patience = patience
        self._clock = clock
        self.compressor: Compressor | None = None
        """Makes cold blocks smaller before they are written."""
        self.quota: DiskQuota | None = None
        """Of tenants, where one has any."""
        self.failed_ns = -(1 << 62)
        """When the disk last refused a block."""
        self._store = store
        self._limit_bytes = limit_bytes
        self._queue: collections.deque[_Batch] = collections.deque()
        self._deferred: collections.deque[_Batch] = collections.deque()
        self.waiting_bytes = 0
        self._next_number = 1
        self._unfinished: set[int] = set()
        self._wake = asyncio.Event()
        self._moved = asyncio.Condition()
        self.running: asyncio.Task[None] | None = None
        """Ends only by `close`, or by a bug."""
        self._inflight: set[asyncio.Task[None]] = set()
        self._burial = asyncio.Lock()
        self._burying: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write."""
        self.running = asyncio.create_task(self._run(), name="write-behind")

    def add(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots) -> None:
        """Queue blocks that are in host and not on disk, in prefix order; those over the limit are deferred."""
        self._copies.blocks.mark_as(rows, OFFLOADING)
        if self.quota is not None:
            self.quota.changed(rows, 1)
        block = entry.geometry.slot_bytes
        step = max(1, min(BATCH_BYTES, self._limit_bytes // 4) // block)
        for begin in range(0, rows.size, step):
            batch = _Batch(entry, cls, rows[begin : begin + step], slots[begin : begin + step], self._next_number)
            self._next_number += 1
            self._unfinished.add(batch.number)
            # Until the batch is finished or given up its rows must not become other blocks'.
            self._copies.blocks.begin_move(batch.rows)
            if not self._deferred and self._fits(batch):
                self._enqueue(batch)
            else:
                self._defer(batch)

    def _fits(self, batch: _Batch) -> bool:
        """A queue that is empty takes any batch, or a block larger than the limit would wait for ever."""
        return not self.waiting_bytes or self.waiting_bytes + batch.size_bytes <= self._limit_bytes

    def _enqueue(self, batch: _Batch) -> None:
        self._copies.host.pool.hold(batch.slots)
        self._queue.append(batch)
        self.waiting_bytes += batch.size_bytes
        self._wake.set()

    def _defer(self, batch: _Batch) -> None:
        self._copies.counters["offload_deferred_blocks"] += batch.rows.size
        self._deferred.append(batch)
        while len(self._deferred) > DEFERRED_MAX:
            oldest = self._deferred.popleft()
            self._give_up(oldest, oldest.rows.size)

    def _give_up(self, batch: _Batch, dropped: int) -> None:
        self._copies.counters["offload_dropped_blocks"] += dropped
        self._end_move(batch.rows)
        self._unfinished.discard(batch.number)

    def _readmit(self) -> None:
        """Queue deferred blocks that fit now and are still in host and nowhere on disk."""
        table = self._copies.blocks.table
        while self._deferred and self._fits(self._deferred[0]):
            batch = self._deferred.popleft()
            slots = table.host_slot[batch.rows]
            kept = (slots >= 0) & (table.segment[batch.rows] < 0) & self._copies.blocks.live(batch.rows)
            gone = batch.rows[~kept]
            if not kept.any():
                self._give_up(batch, gone.size)
                continue
            self._copies.counters["offload_dropped_blocks"] += gone.size
            self._end_move(gone)
            self._enqueue(_Batch(batch.entry, batch.cls, batch.rows[kept], slots[kept], batch.number))

    @property
    def backlog_bytes(self) -> int:
        """Bytes of blocks that are not on disk yet: what `flush` has to write. At most the host tier."""
        return self.waiting_bytes + sum(batch.size_bytes for batch in self._deferred)

    async def flush(self) -> None:
        """Return when everything queued before the call is on stable storage, deletes included. Raises StorageError."""
        last = self._next_number
        with self.patience.somebody_waits():
            async with self._moved:
                await self._moved.wait_for(lambda: not self._unfinished or min(self._unfinished) >= last)
        await self._bury()
        await self._store.flush()

    async def close(self) -> None:
        """Stop: what is still queued stays in host only."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, *self._inflight, return_exceptions=True)
        if self._burying is not None:
            await asyncio.wait([self._burying])
        while self._queue:
            await self._finish(self._queue.popleft(), [])
        while self._deferred:
            batch = self._deferred.popleft()
            self._give_up(batch, batch.rows.size)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._copies.dead_extents and not self._burial.locked():
                # Beside the writes: tombstones say by number what they strike out, in whatever order they come.
                self._burying = asyncio.create_task(self._bury())
                self._burying.add_done_callback(self._ended)
            while self._queue:
                await self.patience.leave_time(lambda: self.backlog_bytes, self._inflight)
                task = asyncio.create_task(self._write(self._merge_small(self._queue.popleft())))
                self._inflight.add(task)
                task.add_done_callback(self._ended)
                while len(self._inflight) >= BATCHES_INFLIGHT:
                    await asyncio.wait(self._inflight, return_when=asyncio.FIRST_COMPLETED)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._inflight.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The batch was finished as not written; the bug must not be lost with the task.
            _log.error("a write to nvme ended with a bug", exc_info=error)

    def _merge_small(self, batch: _Batch) -> _Batch:
        """Join following batches of the same namespace, so that single stores become long writes."""
        room = BATCH_BYTES // batch.entry.geometry.slot_bytes - batch.rows.size
        parts = [batch]
        while self._queue and self._queue[0].entry is batch.entry and self._queue[0].rows.size <= room:
            parts.append(self._queue.popleft())
            room -= parts[-1].rows.size
        if len(parts) == 1:
            return batch
        self._unfinished.difference_update(part.number for part in parts[1:])
        rows = np.concatenate([part.rows for part in parts])
        slots = np.concatenate([part.slots for part in parts])
        return _Batch(batch.entry, batch.cls, rows, slots, batch.number)

    async def _write(self, batch: _Batch) -> None:
        copies, entry = self._copies, batch.entry
        compressor, encoded = self.compressor, None
        if compressor is not None:
            encoded = await compressor.before_offload(entry, batch.cls, batch.rows, batch.slots)
        alive = copies.blocks.live(batch.rows)
        if encoded is not None:
            alive &= ~encoded.withheld
        chosen = np.flatnonzero(alive)
        items = self._items(batch, chosen)
        if compressor is not None and encoded is not None:
            items = [compressor.item(encoded, i, item) for i, item in zip(chosen.tolist(), items, strict=True)]
        outcome: list[Extent | StorageError] = []
        try:
            with self.patience.batch():
                outcome = await self._store.write(items)
        except StorageError as error:
            outcome = [error] * len(items)
        finally:
            done: list[Extent | StorageError | None] = [None] * batch.rows.size
            for i, result in zip(chosen.tolist(), outcome, strict=False):
                done[i] = result
            await self._finish(batch, done, encoded)

    def _items(self, batch: _Batch, chosen: npt.NDArray[np.intp]) -> list[WriteItem]:
        """These blocks of a batch as they lie in host."""
        copies, entry, rows, slots = self._copies, batch.entry, batch.rows[chosen], batch.slots[chosen]
        keys = copies.blocks.table.key[rows].tobytes()
        views, sums = copies.host.views(batch.cls, slots), copies.host.sums_of(batch.cls, slots)
        return [
            WriteItem(entry.stored_digest, keys[at : at + KEY_BYTES], entry.geometry, view, own, row)
            for at, view, own, row in zip(range(0, len(keys), KEY_BYTES), views, sums, rows.tolist(), strict=True)
        ]

    async def _finish(
        self, batch: _Batch, outcome: list[Extent | StorageError | None], encoded: Encoded | None = None
    ) -> None:
        """Take note of what was written, end the holds, and wake whoever waits for it."""
        copies, entry = self._copies, batch.entry
        self._written(batch, outcome, encoded)
        corrupt: list[int] = []
        for row, result in zip(batch.rows.tolist(), outcome, strict=False):
            if isinstance(result, CorruptionError):
                _log.error("host tier: %s; the block is dropped", result, extra=copies.log_fields(row, "host"))
                copies.counters["host_corrupt_blocks"] += 1
                corrupt.append(row)
            elif isinstance(result, StorageError):
                fields = copies.log_fields(row, "nvme")
                level = logging.DEBUG if isinstance(result, DegradedError) else logging.WARNING
                _log.log(level, "nvme write: %s; the block stays in host only", result, extra=fields)
                copies.counters["offload_failed_blocks"] += 1
                self.failed_ns = self._clock.now_ns()
        copies.written(batch.rows)
        rows = np.array(corrupt, np.int32)
        rows = rows[copies.blocks.live(rows)]
        if rows.size:
            copies.forget(entry, rows)
        self._end_move(batch.rows)
        if encoded is not None:
            copies.host.release(encoded.cls, encoded.slots[encoded.slots >= 0])
        copies.host.release(batch.cls, batch.slots)
        self.waiting_bytes -= batch.size_bytes
        self._unfinished.discard(batch.number)
        self._readmit()
        async with self._moved:
            self._moved.notify_all()

    def _written(self, batch: _Batch, outcome: list[Extent | StorageError | None], encoded: Encoded | None) -> None:
        """These blocks of a batch lie on disk."""
        found = [(i, result) for i, result in enumerate(outcome) if isinstance(result, Extent)]
        if not found:
            return
        places = np.array([i for i, _ in found], np.intp)
        rows, extents = batch.rows[places], Extents.of([extent for _, extent in found])
        codecs, totals = np.zeros(rows.size, np.uint8), np.zeros(rows.size, np.uint64)
        if encoded is not None:
            codecs, totals = encoded.forms(places)
        copies, counters = self._copies, self._copies.counters
        counters["offloaded_blocks"] += rows.size
        counters["offloaded_bytes"] += int(extents.length.sum())
        counters["offloaded_again_bytes"] += int(extents.length[copies.blocks.marked(rows, RETURNED)].sum())
        wanted = copies.blocks.live(rows)
        if not batch.entry.allow_loss:
            wanted &= codecs == Codec.RAW
        if wanted.all():
            copies.shapes.forms.stored(rows, codecs, totals)
            copies.add_nvme(rows, extents)
            return
        kept = np.flatnonzero(wanted)
        copies.shapes.forms.stored(rows[kept], codecs[kept], totals[kept])
        copies.add_nvme(rows[kept], extents.take(kept))
        # Deleted, or loss forbidden, while it was being written: what reached the disk must not come back.
        for i in np.flatnonzero(~wanted).tolist():
            key = copies.blocks.table.key[rows[i]].tobytes()
            copies.dead_extents.append((batch.entry.stored_digest, key, extents[i]))
        self._wake.set()

    def _end_move(self, rows: Rows) -> None:
        self._copies.blocks.unmark_as(rows, OFFLOADING)
        if self.quota is not None:
            self.quota.changed(rows, -1)
        self._copies.blocks.end_move(rows)

    async def _bury(self) -> None:
        """Write tombstones of forgotten extents; of all that are there, when it returns."""
        dead = self._copies.dead_extents
        async with self._burial:
            while dead:
                batch, dead[:] = dead[:256], dead[256:]
                try:
                    await self._store.delete(batch)
                except StorageError as error:
                    _log.warning("nvme delete: %s; will be tried again", error)
                    dead.extend(batch)
                    return

    def kick(self) -> None:
        """Forgotten extents wait for their tombstones."""
        self._wake.set()
