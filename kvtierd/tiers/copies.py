"""A block's copies in the tiers: adding one, dropping one, and forgetting the block with its last.

Every change of residency goes through here, so that flags, columns, slots and policies stay in step.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvtierd.core.clock import Clock
from kvtierd.core.stored_form import Codec
from kvtierd.core.units import PAGE_BYTES
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME, TIERS, Tier
from kvtierd.storage.interface import Extent, Extents
from kvtierd.storage.layout import block_shape
from kvtierd.telemetry.metrics import METRICS
from kvtierd.tiers.absences import Absences
from kvtierd.tiers.blocks import GONE, PREFETCHED, READ_BACK, RESIDENT, Blocks, Rows
from kvtierd.tiers.gpu_tier import GpuTier
from kvtierd.tiers.host_tier import HostTier
from kvtierd.tiers.namespaces import NamespaceEntry, NamespaceTable
from kvtierd.tiers.shapes import Shapes
from kvtierd.tiers.slot_tier import SlotTier
from kvtierd.tiers.under_way import UnderWay

BIT: dict[Tier, int] = {"gpu": TIER_GPU, "host": TIER_HOST, "nvme": TIER_NVME}


class EventSink(Protocol):
    """Who is told about blocks of one tenant that appear and vanish."""

    def wanted(self) -> bool:
        """Whether anybody is to be told of what happens now; to be asked before each of the others."""
        ...

    def stored(self, keys: Sequence[bytes], parent: bytes | None, block_size: int, medium: str) -> None:
        """Blocks became visible."""
        ...

    def removed(self, keys: Sequence[bytes], medium: str) -> None:
        """Blocks are gone."""
        ...


class Events(Protocol):
    """What is told of blocks, tenant by tenant."""

    def of(self, tenant: str) -> EventSink:
        """Who is told about a tenant's."""
        ...


class Copies:
    """The blocks and their copies."""

    def __init__(
        self, blocks: Blocks, host: HostTier, gpu: GpuTier | None, events: Events | None, clock: Clock
    ) -> None:
        self.blocks = blocks
        self.host = host
        self.gpu = gpu
        self.events = events
        self.absences = Absences(blocks.table.capacity, clock)
        self.namespaces = NamespaceTable()
        self.under_way = UnderWay(blocks)
        self.shapes = Shapes(blocks, host, self.namespaces)
        mine = [name for name, row in METRICS.items() if row.kind == "counter" and not name.startswith("server_")]
        self.counters: collections.Counter[str] = collections.Counter(dict.fromkeys(mine, 0))
        self._several_tiers = False
        """Whether there has been a copy outside of host yet: until then no policy has to know of copies elsewhere."""
        self.dead_extents: list[tuple[bytes, bytes, Extent]] = []
        """Extents of forgotten blocks that wait for their tombstones."""

    def close(self) -> None:
        """Let go of the memory of host and gpu."""
        self.host.close()
        if self.gpu is not None:
            self.gpu.device.close()

    def host_class(self, entry: NamespaceEntry) -> SlotClass:
        """Class of a namespace's slots in host."""
        return self.host.class_for(entry.geometry.slot_bytes, entry.geometry.layers, entry.tenant)

    def gpu_class(self, entry: NamespaceEntry) -> SlotClass:
        """Class of a namespace's slots in gpu; there must be a gpu tier."""
        assert self.gpu is not None
        return self.gpu.class_for(entry.geometry.slot_bytes, entry.geometry.layers, entry.tenant)

    def add_host(self, cls: SlotClass, rows: Rows, slots: Slots) -> None:
        """Filled host slots become copies of rows, in place of the extents that they may have lain in."""
        self.shapes.gather(rows)
        self.blocks.table.host_slot[rows] = slots
        self.blocks.mark(rows, TIER_HOST)
        self.host.settle(cls, slots, rows)
        self._tell_copied(rows)

    def add_gpu(self, cls: SlotClass, rows: Rows, slots: Slots) -> None:
        """Filled gpu slots become copies of rows."""
        assert self.gpu is not None
        self.blocks.table.gpu_slot[rows] = slots
        self.blocks.mark(rows, TIER_GPU)
        self.gpu.settle(cls, slots, rows)
        self._tell_copied(rows)

    def add_nvme(self, rows: Rows, extents: Extents) -> None:
        """Extents on disk become copies of rows."""
        table = self.blocks.table
        table.segment[rows] = extents.segment
        table.extent_page[rows] = extents.page
        self.blocks.unmark_as(rows, READ_BACK)
        self.blocks.mark(rows, TIER_NVME)

    def drop_host(self, cls: SlotClass, rows: Rows) -> None:
        """Drop host copies; blocks without another copy are forgotten."""
        ahead = self.blocks.marked(rows, PREFETCHED)
        if ahead.any():
            self.counters["prefetch_wasted_blocks"] += int(ahead.sum())
            self.blocks.unmark_as(rows[ahead], PREFETCHED)
        self._drop_slots(self.host, cls, rows, TIER_HOST)

    def drop_scattered(self, rows: Rows) -> None:
        """Drop the extents that blocks lie in; blocks without another copy are forgotten."""
        self.shapes.gather(rows)
        self._forget_bare(rows)

    def drop_gpu(self, cls: SlotClass, rows: Rows) -> None:
        """Drop gpu copies; blocks without another copy are forgotten."""
        assert self.gpu is not None
        self._drop_slots(self.gpu, cls, rows, TIER_GPU)

    def drop_nvme(self, rows: Rows) -> None:
        """Extents are gone or no longer wanted; blocks without another copy are forgotten."""
        unread = rows.size - int(np.count_nonzero(self.blocks.marked(rows, READ_BACK)))
        self.counters["nvme_unread_blocks"] += unread
        self.blocks.table.segment[rows] = -1
        self.blocks.unmark(rows, TIER_NVME)
        self._tell_copied(rows)
        self._forget_bare(rows)

    def evict_host(self, cls: SlotClass, slots: Slots) -> None:
        """Drop the host copies that lie in these slots, to make room."""
        rows = self.host.pool.row[slots]
        self.counters["host_evicted_blocks"] += rows.size
        self.absences.left(rows)
        lost = int((self.blocks.residency(rows) == TIER_HOST).sum())
        self.counters["host_lost_blocks"] += lost
        self.drop_host(cls, rows)

    def forget(self, entry: NamespaceEntry, rows: Rows) -> None:
        """Forget blocks of one namespace in every tier; copies in use stay until their last hold ends."""
        table = self.blocks.table
        self._bury(entry, rows[table.segment[rows] >= 0])
        self.blocks.begin_move(rows)
        self.shapes.gather(rows)
        for bit, column in ((TIER_HOST, table.host_slot), (TIER_GPU, table.gpu_slot)):
            mine = rows[column[rows] >= 0]
            if mine.size and bit == TIER_HOST:
                self.drop_host(self.host_class(entry), mine)
            elif mine.size:
                self.drop_gpu(self.gpu_class(entry), mine)
        on_disk = rows[table.segment[rows] >= 0]
        if on_disk.size:
            self.drop_nvme(on_disk)
        self.blocks.drop(rows)
        self.blocks.end_move(rows)

    def ensure_rows(self, count: int) -> None:
        """Have `count` free rows where a bounded search finds blocks to forget: those that are on disk only."""
        short = count - (self.blocks.table.capacity - len(self.blocks.table))
        if short <= 0:
            return
        for rows in self.blocks.sweep_bare(TIER_NVME, short):
            for number in np.unique(self.blocks.table.namespace[rows]).tolist():
                mine = rows[self.blocks.table.namespace[rows] == number]
                self.counters["table_evicted_blocks"] += mine.size
                self.forget(self.namespaces[number], mine)

    def log_fields(self, row: int, tier: Tier) -> dict[str, dict[str, str]]:
        """What a log line about a block says besides its text: `extra` of a logging call."""
        namespace = self.namespaces[int(self.blocks.table.namespace[row])].namespace.model
        key = self.blocks.table.key[row].tobytes().hex()
        return {"fields": {"tier": tier, "namespace": namespace, "block_key": key}}

    def extent(self, row: int, entry: NamespaceEntry) -> Extent:
        """Where a row lies on disk."""
        table = self.blocks.table
        offset = int(table.extent_page[row]) * PAGE_BYTES
        length = block_shape(entry.geometry, self.shapes.forms.nvme_codec(row)).length
        return Extent(int(table.segment[row]), offset, length)

    def extents(self, rows: Rows, entry: NamespaceEntry) -> list[Extent]:
        """Where rows of a namespace lie on disk, as `extent` of each."""
        table, coded = self.blocks.table, self.shapes.forms.in_tier(rows, TIER_NVME)
        lengths = [block_shape(entry.geometry, Codec.RAW).length] * rows.size
        for i in np.flatnonzero(coded).tolist():
            lengths[i] = block_shape(entry.geometry, Codec.FP8_E4M3).length
        segments, pages = table.segment[rows].tolist(), table.extent_page[rows].tolist()
        return [Extent(*place) for place in zip(segments, (page * PAGE_BYTES for page in pages), lengths, strict=True)]

    def keep_elsewhere(self, rows: Rows, tier: Tier) -> Rows:
        """Those rows that have a copy in a tier and another one elsewhere."""
        mask = self.blocks.residency(rows)
        if tier == "host":
            mask |= self.shapes.residency(rows)
        kept: Rows = rows[(mask & BIT[tier] != 0) & (mask & ~np.uint8(BIT[tier]) != 0)]
        return kept

    def tier_counts(self) -> dict[str, int]:
        """Copies by tier."""
        return {f"{tier}_blocks": self.blocks.copies[BIT[tier]] for tier in TIERS}

    def written(self, rows: Rows) -> None:
        """These rows may have got a copy on disk (`add_nvme`): the policies of the other tiers take note."""
        self._tell_copied(rows)

    def _tell_copied(self, rows: Rows) -> None:
        """Copies of these rows came or went: tell each tier which of its blocks are elsewhere too."""
        if not self._several_tiers:
            self._several_tiers = self.blocks.copies[TIER_NVME] > 0 or self.blocks.copies[TIER_GPU] > 0
            if not self._several_tiers:
                return
        mask = self.blocks.residency(rows)
        table = self.blocks.table
        self.shapes.tell_copied(rows)
        for tier, bit, column in ((self.host, TIER_HOST, table.host_slot), (self.gpu, TIER_GPU, table.gpu_slot)):
            here = column[rows] >= 0
            if tier is None or not np.count_nonzero(here):
                continue
            slots, more = column[rows[here]], mask[here] != bit
            for elsewhere in (True, False):
                if (told := slots[more == elsewhere]).size:
                    tier.copied(told, elsewhere=elsewhere)

    def _drop_slots(self, tier: SlotTier, cls: SlotClass, rows: Rows, bit: int) -> None:
        if tier is self.host:
            rows, gone = self.shapes.evicted(rows)
            if gone.size:
                self.counters["host_lost_blocks"] += int((self.blocks.residency(gone) == 0).sum())
                self._tell_copied(gone)
                self._forget_bare(gone)
        slots, bare = self.blocks.unplace(rows, bit)
        tier.disown(cls, slots)
        self._tell_copied(rows)
        self._forget(bare)

    def _forget_bare(self, rows: Rows) -> None:
        flags = self.blocks.table.flags[rows]
        self._forget(rows[flags & (RESIDENT | GONE) == 0])

    def listener(self, tenant: str) -> EventSink | None:
        """Who is to be told of a tenant's block that appears or vanishes now; None while nobody listens."""
        if self.events is None:
            return None
        sink = self.events.of(tenant)
        return sink if sink.wanted() else None

    def _forget(self, bare: Rows) -> None:
        if bare.size:
            if self.events is not None:
                self._tell_removed(bare)
            self.blocks.drop(bare)

    def _tell_removed(self, rows: Rows) -> None:
        numbers = self.blocks.table.namespace[rows]
        for number in np.unique(numbers).tolist():
            if (sink := self.listener(self.namespaces[number].tenant)) is not None:
                keys = self.blocks.table.key[rows[numbers == number]]
                sink.removed([key.tobytes() for key in keys], "host")

    def _bury(self, entry: NamespaceEntry, rows: Rows) -> None:
        keys = self.blocks.table.key
        for row in rows.tolist():
            self.dead_extents.append((entry.stored_digest, keys[row].tobytes(), self.extent(row, entry)))
