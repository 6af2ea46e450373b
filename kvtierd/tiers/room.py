"""Making room: free slots, then spare chunks, then victims, then a chunk of a class with more than its share."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

import numpy as np

from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.policy.admission import leading
from kvtierd.policy.watermarks import to_free
from kvtierd.tiers.arena import Chunk
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.demand import Demand
from kvtierd.tiers.pinning import Pinning
from kvtierd.tiers.pressure import Pressure
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)

BACKGROUND_EVICTIONS = 256
"""Most slots that one turn of the watermark frees: keeps a turn under a millisecond."""

REGROW_TICKS = 100
"""How often (5 s) the host tier tries again to get memory that it could not get."""

HYSTERESIS = 0.05
"""A tier over its watermark is emptied this far below it, so that single blocks do not switch eviction on and off."""


class Room:
    """Allocates slots in host and gpu, evicting as needed, and gives the host tier its memory."""

    def __init__(
        self,
        copies: Copies,
        workers: Workers,
        pressure: Pressure,
        demand: Demand,
        *,
        host_mark: float,
        gpu_mark: float,
    ) -> None:
        self.copies = copies
        self.pressure = pressure
        self._demand = demand
        self._workers = workers
        self.marks = {"host": host_mark, "gpu": gpu_mark}
        """Watermarks by tier."""
        self._active: dict[tuple[str, int], bool] = {}
        self._growth: asyncio.Task[None] | None = None
        self._leaving: list[Chunk] = []
        """Chunks whose memory is to be given back before there is any for others."""
        self._moved_at = -1
        self._chunk_added = asyncio.Event()
        self.pinning = Pinning(copies.gpu, workers)
        self.chunk_gone: Callable[[int], None] = lambda _number: None
        """Told when a chunk leaves the arena, so that clients unmap it."""
        self.memory_error = ""
        """Why the host tier has not got all of its memory; empty while all is well."""

    def take_host(self, cls: SlotClass, count: int) -> Slots:
        """Up to `count` host slots, each with one hold. Fewer when everything is held or memory is still coming."""
        host = self.copies.host
        # All are taken together, so that a batch lies side by side as far as it can.
        if short := count - host.make_free(cls, count):
            victims = self.pressure.victims(cls, short)
            if victims.size:
                self._evict_host(cls, victims)
        slots = host.take_free(cls, min(count, cls.free_count))
        if short:
            self.move_slab(cls)
        return slots

    def take_spare(self, cls: SlotClass, rows: Rows) -> Slots:
        """Host slots for the leading ones of these rows that can have one without displacing a hotter block."""
        host = self.copies.host
        slots = host.take_free(cls, rows.size)
        if slots.size < rows.size:
            victims = host.victims(cls, rows.size - slots.size)
            colder = self._demand.heat(host.pool.row[victims]) <= self._demand.heat(rows[slots.size :][: victims.size])
            victims = victims[: leading(colder)]
            if victims.size:
                self._evict_host(cls, victims)
                slots = np.concatenate([slots, host.take_free(cls, victims.size)])
        return slots

    def take_gpu(self, cls: SlotClass, count: int) -> Slots:
        """Up to `count` gpu slots, each with one hold; copies that are only there are not evicted for it."""
        gpu = self.copies.gpu
        assert gpu is not None
        slots = gpu.take_free(cls, count)
        if slots.size < count:
            victims = gpu.victims(cls, count - slots.size)
            rows = self.copies.keep_elsewhere(gpu.pool.row[victims], "gpu")
            if rows.size:
                self.copies.counters["gpu_evicted_blocks"] += rows.size
                self.copies.drop_gpu(cls, rows)
                slots = np.concatenate([slots, gpu.take_free(cls, rows.size)])
        if slots.size < count and (slab := gpu.slab_to_take(cls)) is not None:
            self._empty_gpu_slab(slab)
        return slots

    def grow(self) -> None:
        """Give the host tier its memory, chunk by chunk, in the background."""
        if self._growth is None or self._growth.done():
            self._growth = asyncio.create_task(self._grow(), name="arena-growth")
            self._growth.add_done_callback(lambda _: self._chunk_added.set())

    @property
    def growing(self) -> bool:
        """Whether more memory is on its way."""
        return self._growth is not None and not self._growth.done()

    async def next_chunk(self) -> None:
        """Wait for the next chunk, or the end of the growth."""
        if self.growing:
            self._chunk_added.clear()
            await self._chunk_added.wait()

    def lacks_memory(self, cls: SlotClass, count: int) -> bool:
        """Whether `count` free slots are not there yet and memory is on its way."""
        host = self.copies.host
        return self.growing and host.may_grow(cls) and cls.free_count + len(host.spare) * cls.slots_per_slab < count

    async def memory_for(self, cls: SlotClass, count: int) -> None:
        """Wait until there are `count` free slots, or all memory is there."""
        while self.lacks_memory(cls, count):
            await self.next_chunk()

    async def grown(self) -> None:
        """Wait for the growth under way."""
        if self._growth is not None:
            await asyncio.wait([self._growth])

    async def close(self) -> None:
        """Stop growing."""
        if self._growth is not None:
            self._growth.cancel()
            await asyncio.gather(self._growth, return_exceptions=True)
        while self._leaving:
            self._leaving.pop().close()

    def keep_watermarks(self) -> None:
        """Evict from tiers over their watermark; call it every so often. Only copies that exist elsewhere go."""
        host, gpu = self.copies.host, self.copies.gpu
        self.pressure.tick()
        host.ticks += 1
        if gpu is not None:
            gpu.ticks += 1
        if host.missing and not self.growing and host.ticks % REGROW_TICKS == 0:
            self.grow()  # what failed for want of memory or descriptors may succeed now
        for cls in host.pool.classes:
            for_sure = self._over("host", cls, spare=host.spare_for(cls, len(host.missing)))
            if not for_sure or self.pressure.thrashes(cls):
                continue
            rows = self.copies.keep_elsewhere(host.pool.row[host.victims(cls, for_sure)], "host")
            if rows.size:
                self.copies.counters["host_watermark_blocks"] += rows.size
                self._evict_host(cls, self.copies.blocks.table.host_slot[rows])
        for cls in gpu.pool.classes if gpu is not None else ():
            assert gpu is not None
            count = self._over("gpu", cls, spare=gpu.spare_for(cls))
            if not count:
                continue
            rows = self.copies.keep_elsewhere(gpu.pool.row[gpu.victims(cls, count)], "gpu")
            if rows.size:
                self.copies.counters["gpu_watermark_blocks"] += rows.size
                self.copies.counters["gpu_evicted_blocks"] += rows.size
                self.copies.drop_gpu(cls, rows)

    def _over(self, tier: str, cls: SlotClass, *, spare: int) -> int:
        """How many slots of a class to free now. A class that can still get spare slabs counts them as free."""
        total = cls.total + spare * cls.slots_per_slab
        high = self.marks[tier]
        active = self._active.get((tier, cls.id), False)
        count, active = to_free(cls.used, total, high, high - HYSTERESIS, active)
        self._active[tier, cls.id] = active
        return min(count, BACKGROUND_EVICTIONS)

    async def _grow(self) -> None:
        host = self.copies.host
        for chunk in host.chunks():
            self.pinning.came(chunk)
        while host.missing or self._leaving:
            if self._leaving:
                await self._workers.run(self._leaving.pop().discard)
                continue
            number = host.new_number()
            try:
                chunk = await self._workers.run(functools.partial(Chunk, number, host.chunk_bytes))
            except OSError as error:
                self.memory_error = f"host tier: chunk of {host.chunk_bytes} bytes: {error.strerror or error}"
                _log.error("%s; %d chunks are missing; lower host.capacity", self.memory_error, len(host.missing))
                return
            self.memory_error = ""
            host.adopt(host.missing.pop(), chunk)
            self.pinning.came(chunk)
            self._chunk_added.set()

    def _evict_host(self, cls: SlotClass, slots: Slots) -> None:
        self.pressure.evicted(cls, self.copies.host.pool.row[slots])
        self.copies.evict_host(cls, slots)

    def move_slab(self, cls: SlotClass) -> None:
        """Free a chunk of a better-off class; it comes back as new memory, since clients have mapped the old one."""
        host = self.copies.host
        if self._moved_at == host.ticks or ((host.missing or host.spare) and host.may_grow(cls)):
            return  # one at a time, and at most one search in a turn of the ticker
        self._moved_at = host.ticks
        slab = host.slab_to_take(cls)
        if slab is not None:
            self._drop_slab(slab)
            self.copies.counters["host_chunks_moved"] += 1

    def shed_slab(self, cls: SlotClass) -> None:
        """Take a chunk from a class whose tenant has more than its quota, where one has no hold in it."""
        slab = self.copies.host.emptiest(cls)
        if slab is not None:
            self._drop_slab(slab)

    def shed_gpu_slab(self, cls: SlotClass) -> None:
        """The same in gpu, where no block of the slab has its only copy there."""
        gpu = self.copies.gpu
        if gpu is not None and (slab := gpu.emptiest(cls)) is not None:
            self._empty_gpu_slab(slab)

    def _drop_slab(self, slab: int) -> None:
        host = self.copies.host
        donor = next(other for other in host.pool.classes if slab in other.slabs)
        slots = host.pool.slots_of(slab)
        self._evict_host(donor, slots[host.pool.row[slots] >= 0])
        host.pool.remove_slab(slab)
        chunk = host.drop(slab)
        self.chunk_gone(chunk.number)
        self.pinning.gone(chunk)
        self._leaving.append(chunk)
        self.grow()

    def _empty_gpu_slab(self, slab: int) -> None:
        gpu = self.copies.gpu
        assert gpu is not None
        donor = next(other for other in gpu.pool.classes if slab in other.slabs)
        rows = gpu.pool.row[gpu.pool.slots_of(slab)]
        rows = rows[rows >= 0]
        if self.copies.keep_elsewhere(rows, "gpu").size < rows.size:
            return  # some blocks are only there
        self.copies.drop_gpu(donor, rows)
        gpu.pool.remove_slab(slab)
        gpu.spare.append(slab)
