"""From host into gpu slots: the second part of an onboarding towards gpu."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.room import Room
from kvtierd.tiers.speeds import Speeds
from kvtierd.tiers.workers import Workers

PIECE_BLOCKS = 8
"""Blocks that are raised at once."""


class _ToHost(Protocol):
    async def hold_in_host(self, entry: NamespaceEntry, rows: Rows, *, ahead: bool = False) -> Slots:
        """See Onboarder.hold_in_host."""
        ...


class GpuRaiser:
    """Copies blocks from host into gpu. Runs on the loop; bytes move in worker threads."""

    def __init__(self, onboarder: _ToHost, room: Room, workers: Workers, speeds: Speeds) -> None:
        self._onboarder = onboarder
        self._copies = room.copies
        self._room = room
        self._workers = workers
        self._speeds = speeds
        self._raising = asyncio.Lock()

    async def raise_to_gpu(self, entry: NamespaceEntry, rows: Rows) -> int:
        """Copy the leading run of rows into gpu slots, by way of host; how many are there then."""
        copies, gpu = self._copies, self._copies.gpu
        if gpu is None or gpu.pool.slab_bytes < entry.geometry.slot_bytes:
            return 0
        host_cls, gpu_cls = copies.host_class(entry), copies.gpu_class(entry)
        total = 0
        for begin in range(0, rows.size, PIECE_BLOCKS):
            piece = rows[begin : begin + PIECE_BLOCKS]
            # One piece at a time: copies into gpu share one bus, and no block is raised twice at once.
            async with self._raising:
                absent = piece[copies.blocks.table.gpu_slot[piece] < 0]
                held = await self._onboarder.hold_in_host(entry, absent)
                try:
                    done = await self._fill_gpu(host_cls, gpu_cls, absent[: held.size], held)
                finally:
                    copies.host.release(host_cls, held)
            total += piece.size - absent.size + done
            if done < absent.size:
                break
        return total

    async def _fill_gpu(self, host_cls: SlotClass, gpu_cls: SlotClass, rows: Rows, sources: Slots) -> int:
        copies, gpu = self._copies, self._copies.gpu
        assert gpu is not None
        slots = self._room.take_gpu(gpu_cls, rows.size)
        rows, sources = rows[: slots.size], sources[: slots.size]
        if not rows.size:
            return 0
        copies.blocks.begin_move(rows)

        def copy_all() -> None:
            for source, target in zip(sources.tolist(), slots.tolist(), strict=True):
                gpu.copy_in(gpu_cls, target, copies.host.view(host_cls, source))

        copied = False
        asked = int(rows.size) * gpu_cls.slot_bytes
        self._speeds.gpu_in.begin(asked)
        try:
            await self._workers.run(copy_all)
            copied = True
        finally:
            self._speeds.gpu_in.end(copied * asked, asked)
            kept = copies.blocks.live(rows) & copied
            if kept.any():
                gpu.set_sums(gpu_cls, slots[kept], copies.host.sums_of(host_cls, sources[kept]))
                copies.add_gpu(gpu_cls, rows[kept], slots[kept])
                copies.shapes.forms.raised(rows[kept])
            copies.blocks.end_move(rows)
            gpu.release(gpu_cls, slots)
        return int(slots.size)
