"""Blocks that lie in host in extents of other sizes than their own: parts of a block, or several blocks in one.

A block keeps its key and its row whatever becomes of its extents. Usually it is one extent, at its `host_slot`. A block
whose parts are asked for is *known* here: it has a span of granules in a hybrid index, which counts uses and says for
each where it lies: at the row of the block itself, or at the row of an extent. Such a row has a slot and no key:

    host_slot     of the extent, -1 once it was evicted
    key           rows of the blocks that lie in it, int32, -1 for none
    extent_page   tokens of the extent
    moves         how many of the blocks still do

A block has its own slot or extents, never both. As long as all its extents are there, it is resident in host. Where
some were evicted, and there is a copy in another tier, the others stay: reads of their tokens need no more.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.gpu.slot_pool import NO_SLOT, SlotClass, Slots
from kvtierd.index.bitmap import HierarchicalBitmap
from kvtierd.index.extents import GRANULE_TOKENS, Uses
from kvtierd.index.hybrid import EXTENT_GRANULES_MAX, HybridIndex
from kvtierd.index.memory import reserve
from kvtierd.protocol.messages import TIER_HOST
from kvtierd.tiers.blocks import GONE, Blocks, Rows
from kvtierd.tiers.compress_forms import EXTENT, Forms
from kvtierd.tiers.host_tier import HostTier
from kvtierd.tiers.namespaces import NamespaceTable

KNOWN = 16
"""Mark of a block: it has a span in the hybrid index."""

GRANULES = 1 << 18
"""Granules of all known blocks: 16 M tokens, 7 MiB when they are all in use."""

Pieces = npt.NDArray[np.int64]
"""[n, 4]: first token, tokens, place (a row) and first token in the extent there."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldPiece:
    """Tokens of a block that lie in a held slot: `tokens` of them, from `first` of block `block` on, from `offset` of
    an extent of `of_tokens` on. `last` is the one that ends the hold."""

    cls: SlotClass
    slot: int
    of_tokens: int
    block: int
    first: int
    tokens: int
    offset: int
    last: bool


class Shapes:
    """Which extents blocks lie in. All methods run on the loop; rows are of one namespace unless said otherwise."""

    def __init__(self, blocks: Blocks, host: HostTier, namespaces: NamespaceTable, granules: int = GRANULES) -> None:
        self._blocks, self._host, self._namespaces = blocks, host, namespaces
        self._table = blocks.table
        self._first: Rows = reserve((blocks.table.capacity,), np.int32, huge=False)
        """First token of a known block's span, plus one."""
        self._index = HybridIndex(granules * GRANULE_TOKENS)
        self._owners: Rows = reserve((granules,), np.int32, huge=False)
        """Row of the block that has a span, by its first granule, plus one."""
        self._free = HierarchicalBitmap(granules)
        self._granules = granules
        self.forms = Forms(blocks, host, namespaces)
        self.known = 0
        self.extents = 0
        blocks.on_free = self._freed

    @staticmethod
    def can_know(block_tokens: int) -> bool:
        """Whether blocks of this size are whole granules, and no more than an extent has."""
        return block_tokens % GRANULE_TOKENS == 0 and block_tokens <= EXTENT_GRANULES_MAX * GRANULE_TOKENS

    def know(self, rows: Rows, block_tokens: int) -> None:
        """Give blocks a span, as far as there is room: their uses are counted from now on."""
        fresh = rows[(self._table.marks[rows] & KNOWN) == 0]
        for row in fresh.tolist():
            first = self._take(block_tokens // GRANULE_TOKENS)
            if first < 0:
                return
            self._first[row] = first * GRANULE_TOKENS + 1
            self._owners[first] = row + 1
            self._table.marks[row] |= np.uint8(KNOWN)
            self.known += 1
            self._lay(row, 0, block_tokens, row, 0)

    def knows(self, rows: Rows) -> bool:
        """Whether all of these blocks are known."""
        return bool((self._table.marks[rows] & KNOWN).all())

    def touch(self, rows: Rows, block_tokens: int, begin: int, end: int) -> None:
        """Count a use of tokens begin..end-1 of these blocks, which follow each other."""
        self._index.touch_blocks(self._firsts(rows), block_tokens, begin, end)

    def pieces(self, rows: Rows, block_tokens: int, begin: int, end: int) -> Pieces:
        """Extents that hold tokens begin..end-1 of these blocks, which follow each other; whole granules."""
        return self._index.pieces(self._firsts(rows), rows, block_tokens, begin, end)

    def slots(self, pieces: Pieces) -> Slots:
        """Host slots of the extents, -1 for one that is not there."""
        return self._table.host_slot[pieces[:, 2]]

    def tokens_of(self, pieces: Pieces, block_tokens: int) -> npt.NDArray[np.int64]:
        """Tokens of the extents that pieces lie in, [n]."""
        places = pieces[:, 2]
        other = (self._table.marks[places] & EXTENT) != 0
        return np.where(other, self._table.extent_page[places], block_tokens).astype(np.int64)

    def scattered(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which blocks are in host, but not in a slot of their own: in extents, or in a compressed form."""
        inside: npt.NDArray[np.bool_] = (self._table.flags[rows] & TIER_HOST != 0) & (self._table.host_slot[rows] < 0)
        return inside

    def rows_for(self, count: int) -> Rows:
        """Rows for extents, fewer when the block table is full; `place` or `give_rows` follows."""
        rows = self._table.alloc(count)
        self._table.namespace[rows] = 0
        return rows

    def give_rows(self, rows: Rows) -> None:
        """Rows that were taken for extents, and are none."""
        self._table.free(rows)

    def place(self, extent: int, cls: SlotClass, blocks: Rows, slot: int, tokens: int, first: int = 0) -> None:
        """A filled slot becomes the extent, at a row of `rows_for`, of these known blocks, from token `first` on.

        The caller drops their own slots in this turn.
        """
        table, block_tokens = self._table, self._block_tokens(int(blocks[0]))
        named = np.full(EXTENT_GRANULES_MAX, -1, np.int32)
        named[: blocks.size] = blocks
        table.key[extent] = named.view(np.uint8)
        table.namespace[extent] = table.namespace[blocks[0]]
        table.flags[extent], table.marks[extent] = GONE, EXTENT
        table.extent_page[extent], table.moves[extent] = tokens, blocks.size
        table.host_slot[extent] = slot
        self.extents += 1
        self._host.settle(cls, np.array([slot], np.int32), np.array([extent], np.int32))
        for i, block in enumerate(blocks.tolist()):
            self._lay(block, first, min(tokens, block_tokens), extent, i * block_tokens)
        self.tell_copied(blocks[:1])

    def gather(self, rows: Rows) -> None:
        """Blocks have a slot of their own or none: their extents go, those with held slots with the last hold.

        Of any namespaces.
        """
        self.forms.gather(rows)
        if not self.known:
            return
        for row in rows[(self._table.marks[rows] & KNOWN) != 0].tolist():
            one = np.array([row], np.int32)
            if self.scattered(one)[0]:
                self._blocks.unmark(one, TIER_HOST)
            self._leave(row)
            self._lay(row, 0, self._block_tokens(row), row, 0)

    def hold(self, rows: Rows) -> list[HeldPiece]:
        """Hold the slots of extents that scattered blocks of one namespace lie in: what to gather, by block."""
        block_tokens = self._block_tokens(int(rows[0]))
        pieces = self.pieces(rows, block_tokens, 0, rows.size * block_tokens)
        lengths, slots = self.tokens_of(pieces, block_tokens), self.slots(pieces)
        self._host.pool.hold(slots)
        held: list[HeldPiece] = []
        for (begin, tokens, _, offset), length, slot in zip(
            pieces.tolist(), lengths.tolist(), slots.tolist(), strict=True
        ):
            cls = self._host.pool.class_of(slot)
            for at in range(begin, begin + tokens, block_tokens - begin % block_tokens):
                block, first = divmod(at, block_tokens)
                count = min(begin + tokens - at, block_tokens - first)
                last = at + count == begin + tokens
                held.append(HeldPiece(cls, slot, length, block, first, count, offset + at - begin, last))
        return held

    def release(self, held: list[HeldPiece]) -> None:
        """End these holds."""
        for piece in held:
            if piece.last:
                self._host.release(piece.cls, np.array([piece.slot], np.int32))

    def evicted(self, rows: Rows) -> tuple[Rows, Rows]:
        """Of rows whose slots are to be emptied: those of blocks, and the blocks that lose their place in host by it.

        Rows of extents among them have lost their slots when this returns.
        """
        rows, bare = self.forms.evicted(rows)
        if not self.extents:
            return rows, bare
        kind = self._table.marks[rows] & EXTENT
        if not np.count_nonzero(kind):
            return rows, bare
        lost: list[int] = []
        for row in rows[kind != 0].tolist():
            blocks = self.blocks_in(row)
            self._empty(row)
            lost += blocks[self.scattered(blocks)].tolist()
        gone = np.unique(np.array(lost, np.int32))
        self._blocks.unmark(gone, TIER_HOST)
        return rows[kind == 0], np.concatenate([gone, bare])

    def blocks_in(self, row: int) -> Rows:
        """Rows of the blocks that lie in an extent, in order."""
        named = self._table.key[row].copy().view(np.int32)
        blocks: Rows = named[named >= 0]
        return blocks

    def granule_of(self, row: int) -> int:
        """First granule of a known block's span."""
        return (int(self._first[row]) - 1) // GRANULE_TOKENS

    def in_extents(self, row: int) -> bool:
        """Whether anything of a known block lies in an extent that is not the block."""
        return bool((self._places(row) != row).any())

    def blocks_with(self, row: int) -> Rows:
        """Blocks that lie in one extent with a known block, itself among them, in order; of a split one only itself."""
        places = self._places(row)
        if places.size > 1 or places[0] == row:
            return np.array([row], np.int32)
        return self.blocks_in(int(places[0]))

    def uses(self, row: int, block_tokens: int) -> Uses:
        """Uses of each granule of a known block since they were last forgotten."""
        begin = int(self._first[row]) - 1
        return self._index.uses_between(begin, begin + block_tokens)

    def halve_uses(self, row: int) -> bool:
        """Let the uses of a known block count for half; whether any are left."""
        begin = int(self._first[row]) - 1
        return self._index.halve_uses(begin, begin + self._block_tokens(row))

    def forget_uses(self, rows: Rows, block_tokens: int) -> None:
        """Begin anew to count."""
        for row in rows[(self._table.marks[rows] & KNOWN) != 0].tolist():
            begin = int(self._first[row]) - 1
            self._index.forget_uses(begin, begin + block_tokens)

    def known_between(self, begin: int, end: int) -> Rows:
        """Known blocks whose spans begin at granules begin..end-1, in that order."""
        owners = self._owners[begin : min(end, self.granules)]
        return (owners[owners > 0] - 1).astype(np.int32)

    @property
    def granules(self) -> int:
        """Granules that ever had an owner."""
        return self._index.tokens // GRANULE_TOKENS

    def unknow(self, row: int) -> None:
        """Forget the uses of a block, and its extents, if it has any."""
        self._leave(row)
        first = (int(self._first[row]) - 1) // GRANULE_TOKENS
        count = self._block_tokens(row) // GRANULE_TOKENS
        self._index.forget_uses(first * GRANULE_TOKENS, (first + count) * GRANULE_TOKENS)
        self._first[row], self._owners[first] = 0, 0
        self._table.marks[row] &= np.uint8(~KNOWN & 0xFF)
        self._free.set_range(first, first + count)
        self.known -= 1

    def stats(self) -> dict[str, int]:
        """Gauges by name."""
        return {"shapes_known_blocks": self.known, "shapes_extents": self.extents}

    def residency(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """For rows of extents: in host, and wherever all of their blocks are; 0 for those of blocks. [n]"""
        masks = self.forms.residency(rows)
        others = ((self._table.marks[rows] & EXTENT) != 0) & (masks == 0)
        for i in np.flatnonzero(others).tolist():
            blocks = self.blocks_in(int(rows[i]))
            masks[i] = np.bitwise_and.reduce(self._blocks.residency(blocks)) | TIER_HOST
        return masks

    def tell_copied(self, rows: Rows) -> None:
        """Copies of blocks in other tiers came or went: tell host's policy which of their extents are elsewhere too."""
        self.forms.tell_copied(rows)
        if not self.extents:
            return
        places = np.concatenate(
            [self._places(row) for row in rows[(self._table.marks[rows] & KNOWN) != 0].tolist()] or [rows[:0]]
        )
        places = np.unique(places[(self._table.marks[places] & EXTENT) != 0])
        places = places[self._table.host_slot[places] >= 0]
        elsewhere = (self.residency(places) & np.uint8(~TIER_HOST & 0xFF)) != 0
        for answer in (True, False):
            if (told := self._table.host_slot[places[elsewhere == answer]]).size:
                self._host.copied(told, elsewhere=answer)

    def _freed(self, rows: Rows) -> None:
        """Rows of the block table are about to be given back."""
        self.forms.freed(rows)
        if self.known:
            for row in rows[(self._table.marks[rows] & KNOWN) != 0].tolist():
                self.unknow(row)

    def _block_tokens(self, row: int) -> int:
        return self._namespaces[int(self._table.namespace[row])].geometry.block_size

    def _firsts(self, rows: Rows) -> Rows:
        return self._first[rows] - np.int32(1)

    def _lay(self, row: int, first: int, tokens: int, place: int, offset: int) -> None:
        """Tokens of a known block, from `first` on, lie at a place from `offset` on."""
        begin = np.array([int(self._first[row]) - 1 + first], np.int64)
        self._index.assign(begin, tokens, np.array([place], np.int32), np.array([offset], np.int64))

    def _leave(self, row: int) -> None:
        """A block lies in its extents no more; those that hold no other go."""
        for place in self._places(row).tolist():
            if place == row or not self._table.marks[place] & EXTENT:
                continue
            named = self._table.key[place].copy().view(np.int32)
            named[named == row] = -1
            self._table.key[place] = named.view(np.uint8)
            if self._table.moves[place] == 1:
                self._empty(place)
                self.extents -= 1
            self._blocks.end_move(np.array([place], np.int32))

    def _places(self, row: int) -> Rows:
        """Rows that a known block lies at, each once: of extents, or its own."""
        begin = int(self._first[row]) - 1
        spans = self._index.overlapping(begin, begin + self._block_tokens(row))
        return np.unique(self._index.describe(spans)[:, 2]).astype(np.int32)

    def _empty(self, row: int) -> None:
        slot = int(self._table.host_slot[row])
        if slot < 0:
            return
        self._table.host_slot[row] = NO_SLOT
        self._host.disown(self._host.pool.class_of(slot), np.array([slot], np.int32))

    def _take(self, count: int) -> int:
        """First of `count` free granules next to each other, or -1."""
        first = self._free.find_run(count)
        if first >= 0:
            self._free.clear_range(first, first + count)
            return first
        first = self.granules
        if first + count > self._granules:
            return -1
        self._index.append(count * GRANULE_TOKENS, -1)
        return first
