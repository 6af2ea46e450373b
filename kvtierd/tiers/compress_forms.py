"""Which blocks are in FP8 and where: their compressed forms in host, and which of their copies FP8 has touched.

A block whose form in host is compressed has no slot of its own there. Its compressed form is a row of the block table
without a key, as an extent of another size is (`kvtierd.tiers.shapes`), in a slot of its own size class:

    host_slot     of the compressed form
    key           the block's row, int32, then -1
    heat, last_access_s   the block's, so that eviction compares it with others
    moves         1

So eviction, holds and accounts need to know nothing new. A block has its own slot, or extents, or a compressed form,
never two of these. What a read decodes gets a slot of its own and the compressed form goes.

That a copy has been through FP8 stays true after it was decoded: `lossy` says it by tier, and every reply that serves
such a copy names the codec. All methods run on the loop.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums
from kvtierd.core.stored_form import Codec
from kvtierd.gpu.slot_pool import NO_SLOT, SlotClass, Slots
from kvtierd.index.memory import reserve
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME
from kvtierd.tiers.blocks import GONE, Blocks, Rows
from kvtierd.tiers.host_tier import HostTier
from kvtierd.tiers.namespaces import NamespaceTable

COMPRESSED: Final = 64
"""Mark of a row that is no block, but the compressed form of one."""
EXTENT: Final = 32
"""Mark of a row that is no block (as in `kvtierd.tiers.shapes`); a compressed form has it too."""

Masks = npt.NDArray[np.uint8]
Errors = npt.NDArray[np.float32]
"""Errors of a block's groups, [layers, 2 x groups]: relative L2, then largest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies in host as one piece: its slot, that slot's class, and in which form it is there."""

    cls: SlotClass
    slot: int
    codec: Codec


class Forms:
    """Columns over the rows of the block table. Rows may be of several namespaces unless said otherwise."""

    def __init__(self, blocks: Blocks, host: HostTier, namespaces: NamespaceTable) -> None:
        self._blocks, self._table, self._host, self._namespaces = blocks, blocks.table, host, namespaces
        capacity = blocks.table.capacity
        self.lossy: Masks = reserve((capacity,), np.uint8, huge=False)
        """Tiers in which the block's copy has been through FP8; means nothing where it has no copy."""
        self._place: Rows = reserve((capacity,), np.int32, huge=False)
        """Row of the block's compressed form, plus one."""
        self._stored_sum: Sums = reserve((capacity,), np.uint64, huge=False)
        """Block sum of the form on nvme, where that is FP8."""
        self._decoded_sum: Sums = reserve((capacity,), np.uint64, huge=False)
        """Block sum of what was decoded into host."""
        self.errors: dict[int, Errors] = {}
        """Of decoded blocks, what encoding them had lost; carried on when they are encoded again."""
        self.count = 0
        """Blocks whose form in host is compressed."""
        self.spaces: set[int] = set()
        """Numbers of the namespaces that may have copies which have been through FP8."""
        self._touched: set[tuple[int, int, str]] = set()
        """Shapes (bytes, layers, tenant) of host slots that may hold compressed forms or blocks of those namespaces."""
        self.seen = False
        """Whether there ever was such a copy: until then nothing here costs anything."""

    # Where blocks lie

    def mask(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which blocks are compressed in host, [n]."""
        found: npt.NDArray[np.bool_] = self._place[rows] > 0
        return found

    def place_of(self, row: int) -> Place | None:
        """Where a block lies in host as one piece, exact or compressed; None where it does not.

        Whoever reads there holds the slot (`host.pool.hold`), from the turn of the loop in which it asked on.
        """
        form = int(self._place[row]) - 1
        slot = int(self._table.host_slot[form if form >= 0 else row])
        if slot < 0:
            return None
        return Place(self._host.pool.class_of(slot), slot, Codec.FP8_E4M3 if form >= 0 else Codec.RAW)

    def slots(self, rows: Rows) -> Slots:
        """Slots of the compressed forms of these blocks, all of which have one, [n]."""
        return self._table.host_slot[self._place[rows] - 1]

    def nvme_codec(self, row: int) -> Codec:
        """In which form a block lies on nvme."""
        return Codec.FP8_E4M3 if self.lossy[row] & TIER_NVME else Codec.RAW

    def nvme_sum(self, row: int) -> int:
        """Block sum of the form on nvme."""
        column = self._stored_sum if self.lossy[row] & TIER_NVME else self._table.block_sum
        return int(column[row])

    def nvme_sums(self, rows: Rows) -> Sums:
        """Block sums of the forms on nvme, [n]."""
        exact = self._table.block_sum[rows]
        return np.where(self.in_tier(rows, TIER_NVME), self._stored_sum[rows], exact) if self.seen else exact

    def host_sum(self, row: int) -> int:
        """Block sum of a block that is in host, decoded or never encoded."""
        column = self._decoded_sum if self.lossy[row] & TIER_HOST else self._table.block_sum
        return int(column[row])

    def host_sums(self, rows: Rows) -> Sums:
        """As `host_sum`, of many blocks, [n]."""
        decoded = self.in_tier(rows, TIER_HOST)
        return np.where(decoded, self._decoded_sum[rows], self._table.block_sum[rows])

    # What replies say

    def is_lossy(self, namespace: int) -> bool:
        """Whether some copies of a namespace may have been through FP8."""
        return namespace in self.spaces

    def touches(self, cls: SlotClass) -> bool:
        """Whether slots of a class in host may hold compressed forms, or blocks which have been through FP8."""
        return (cls.slot_bytes, cls.layers, cls.tenant) in self._touched

    def in_tier(self, rows: Rows, tier: int) -> npt.NDArray[np.bool_]:
        """Which of these blocks have been through FP8 in a tier, [n]."""
        found: npt.NDArray[np.bool_] = (self.lossy[rows] & np.uint8(tier)) != 0
        return found

    def codecs_of(self, rows: Rows, joined: bytes = b"") -> bytes:
        """The codec that each of these blocks would be served as, one byte a block; empty where all are exact.

        `joined` has those of another namespace's blocks at the same places: a place is exact if both are.
        """
        if not self.seen and not joined:
            return b""
        tiers = self._blocks.residency(rows)
        first = np.where(tiers & TIER_HOST, TIER_HOST, np.where(tiers & TIER_GPU, TIER_GPU, TIER_NVME))
        found: npt.NDArray[np.bool_] = (self.lossy[rows] & first) != 0
        if joined:
            found = found | (np.frombuffer(joined, np.uint8)[: found.size] != 0)
        return _named(found)

    def codecs_in(self, slots: Slots) -> bytes:
        """The codecs of the blocks in these host slots, as `codecs_of`.

        Of a slot whose block was deleted meanwhile nobody knows any more: it counts as FP8.
        """
        if not self.seen or not slots.size:
            return b""
        rows = self._host.pool.row[slots]
        found = rows < 0
        found[rows >= 0] = self.in_tier(rows[rows >= 0], TIER_HOST)
        return _named(found)

    def codecs_at(self, places: npt.NDArray[np.int64]) -> bytes:
        """The codecs of what lies at these rows, blocks or extents of some; as `codecs_of`."""
        if not self.seen:
            return b""
        named = np.ascontiguousarray(self._table.key[places]).view(np.int32).reshape(places.size, -1)
        extents = (self._table.marks[places] & EXTENT) != 0
        named[~extents], named[~extents, 0] = -1, places[~extents]
        lossy = self.in_tier(named, TIER_HOST) & (named >= 0)
        return _named(np.logical_or.reduce(lossy, axis=1))

    def shared(self, codecs: bytes, count: int) -> bytes:
        """The codecs of places of which the first `count` have an exact block of another namespace too."""
        return _named(np.frombuffer(codecs, np.uint8)[:count] != 0)

    # What happens to copies

    def settle(self, cls: SlotClass, rows: Rows, forms: Rows, slots: Slots) -> None:
        """Filled slots become the compressed forms, at rows of `Shapes.rows_for`, of blocks that are in host.

        The caller has dropped the blocks' own slots in this turn; they stay resident in host.
        """
        table = self._table
        named = np.full((rows.size, table.key.shape[1] // 4), -1, np.int32)
        named[:, 0] = rows
        table.key[forms] = named.view(np.uint8)
        for column in (table.namespace, table.heat, table.last_access_s):
            column[forms] = column[rows]
        table.flags[forms], table.marks[forms], table.moves[forms] = GONE, EXTENT | COMPRESSED, 1
        table.host_slot[forms] = slots
        self._place[rows] = forms + 1
        self.lossy[rows] |= np.uint8(TIER_HOST)
        self._note(rows)
        self._touched.add((cls.slot_bytes, cls.layers, cls.tenant))
        self.count += rows.size
        self._forget_errors(rows)
        self._host.settle(cls, slots, forms)
        self.tell_copied(rows)

    def gather(self, rows: Rows) -> None:
        """Blocks have another place in host or none: compressed forms of theirs go, held ones with the last hold."""
        if self.count and (mine := rows[self._place[rows] > 0]).size:
            self._drop(self._place[mine] - 1, mine)

    def evicted(self, rows: Rows) -> tuple[Rows, Rows]:
        """Of rows whose slots are to be emptied: those that are no compressed forms, and the blocks of those that are.

        The latter have lost their place in host when this returns.
        """
        if self.errors:
            self._forget_errors(rows)
        if not self.count:
            return rows, rows[:0]
        mine = (self._table.marks[rows] & COMPRESSED) != 0
        if not np.count_nonzero(mine):
            return rows, rows[:0]
        forms = rows[mine]
        blocks = self.blocks_of(forms)
        self._drop(forms, blocks)
        return rows[~mine], blocks

    def blocks_of(self, forms: Rows) -> Rows:
        """The blocks whose compressed forms these rows are."""
        named = np.ascontiguousarray(self._table.key[forms]).view(np.int32)
        return np.ascontiguousarray(named.reshape(forms.size, -1)[:, 0])

    def residency(self, rows: Rows) -> Masks:
        """For rows of compressed forms: in host, and wherever their blocks are; 0 for others. [n]"""
        masks = np.zeros(rows.size, np.uint8)
        if self.count and np.count_nonzero(mine := (self._table.marks[rows] & COMPRESSED) != 0):
            masks[mine] = self._blocks.residency(self.blocks_of(rows[mine])) | TIER_HOST
        return masks

    def tell_copied(self, rows: Rows) -> None:
        """Copies of these blocks in other tiers came or went: tell host's policy about their compressed forms."""
        if not self.count or not (mine := rows[self._place[rows] > 0]).size:
            return
        slots = self.slots(mine)
        elsewhere = (self._blocks.residency(mine) & np.uint8(~TIER_HOST & 0xFF)) != 0
        for answer in (True, False):
            if (told := slots[elsewhere == answer]).size:
                self._host.copied(told, elsewhere=answer)

    def arrived(self, rows: Rows, lossy: npt.NDArray[np.bool_], sums: Sums) -> None:
        """Blocks got slots of their own in host; `sums` [n] are their block sums where they have been through FP8."""
        if not self.seen:
            return
        self.lossy[rows] = (self.lossy[rows] & np.uint8(~TIER_HOST & 0xFF)) | np.where(lossy, TIER_HOST, 0)
        self._decoded_sum[rows[lossy]] = sums[lossy]
        self._note(rows[lossy])

    def recalled(self, rows: Rows, sums: Sums) -> None:
        """Blocks of the life before lie in host as they were decoded then, with these block sums, [n]."""
        self._note(rows)
        self.arrived(rows, np.ones(rows.size, np.bool_), sums)

    def raised(self, rows: Rows) -> None:
        """Blocks were copied from host into gpu."""
        if self.seen:
            passed = np.where(self.in_tier(rows, TIER_HOST), TIER_GPU, 0).astype(np.uint8)
            self.lossy[rows] = (self.lossy[rows] & np.uint8(~TIER_GPU & 0xFF)) | passed

    def stored(self, rows: Rows, codecs: Masks, sums: Sums) -> None:
        """Blocks lie on nvme now, in these forms, whose block sums these are ([n] each)."""
        lossy = codecs != Codec.RAW
        if not self.seen and not lossy.any():
            return
        passed = np.where(lossy, TIER_NVME, 0).astype(np.uint8)
        self.lossy[rows] = (self.lossy[rows] & np.uint8(~TIER_NVME & 0xFF)) | passed
        self._stored_sum[rows[lossy]] = sums[lossy]
        self._note(rows[lossy])

    def freed(self, rows: Rows) -> None:
        """Rows of the block table are about to be given back."""
        if self.seen:
            self.gather(rows)
            self._forget_errors(rows)
            self.lossy[rows] = 0

    def _forget_errors(self, rows: Rows) -> None:
        for row in rows.tolist() if self.errors else ():
            self.errors.pop(row, None)

    def _note(self, rows: Rows) -> None:
        if not rows.size:
            return
        self.seen = True
        for number in set(np.unique(self._table.namespace[rows]).tolist()) - self.spaces:
            self.spaces.add(number)
            entry = self._namespaces[number]
            self._touched.add((entry.geometry.slot_bytes, entry.geometry.layers, entry.tenant))

    def _drop(self, forms: Rows, blocks: Rows) -> None:
        table, host = self._table, self._host
        slots = table.host_slot[forms]
        table.host_slot[forms], self._place[blocks] = NO_SLOT, 0
        self._blocks.unmark(blocks, TIER_HOST)
        self.count -= forms.size
        classes = host.pool.class_ids(slots)
        for number in np.unique(classes).tolist():
            host.disown(host.pool.classes[number], slots[classes == number])
        self._blocks.end_move(forms)


def _named(lossy: npt.NDArray[np.bool_]) -> bytes:
    if not np.count_nonzero(lossy):
        return b""
    return np.where(lossy, Codec.FP8_E4M3, Codec.RAW).astype(np.uint8).tobytes()
