"""Which blocks there are and where: the block table, the page table and the residency marks, kept in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.keys import Keys
from kvtierd.index import slot_steps
from kvtierd.index.block_table import BlockTable
from kvtierd.index.long_lookups import LONG_KEYS, LongLookups
from kvtierd.index.page_table import PageTable
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME

Rows = npt.NDArray[np.int32]

RESIDENT: Final = TIER_GPU | TIER_HOST | TIER_NVME
VISIBLE: Final = 8
"""The block is whole and may be found."""
WRITING: Final = 16
"""Reserved: a client writes it."""
GONE: Final = 32
"""Forgotten while a move still names the row; freed with the last move."""


RETURNED: Final = 1
"""Mark: used again since it was first stored."""
OFFLOADING: Final = 2
"""Mark: on its way to nvme."""
PREFETCHED: Final = 4
"""Mark: fetched ahead, and not used since."""
READ_BACK: Final = 8
"""Mark: read from where it lies on nvme."""

PIECE_ROWS = 4096
"""Rows looked at in one piece of a pass over the table: well under a millisecond."""

SWEEP_PIECES = 64
"""Pieces that one search for rows to give up looks at."""


class CountsDisk(Protocol):
    """Who counts what is on nvme."""

    def changed(self, rows: Rows, sign: int) -> None:
        """Blocks came (1) or left (-1)."""
        ...


class Blocks:
    """Rows of the block table by key. The column `flags` holds where a block is, `marks` what became of it."""

    def __init__(self, capacity: int) -> None:
        self.table = BlockTable(capacity)
        self.pages = PageTable(self.table)
        self.long = LongLookups(self.table, self.pages)
        self.copies = dict.fromkeys((TIER_GPU, TIER_HOST, TIER_NVME), 0)
        """How many blocks have a copy in each tier."""
        self._hand = 0
        self.limits: dict[int, Callable[[Rows], Rows]] = {}
        """By namespace: which leading ones of a prefix may still be served."""
        self.disk_quota: CountsDisk | None = None
        """Of tenants, where one has any: told of copies on nvme that come and go."""
        self.on_free: Callable[[Rows], None] = lambda _rows: None
        """Told of rows that are about to be given back."""

    def find_prefix(self, keys: Keys, namespace: int) -> Rows:
        """Rows of the leading run of visible blocks."""
        if len(keys) >= LONG_KEYS:
            rows = self.long.prefix(keys, namespace)
        else:
            _, rows = self.pages.prefix(keys, namespace)
        hidden = (self.table.flags[rows] & VISIBLE) == 0
        # count_nonzero costs a quarter of any(), which was a sixth of a lookup.
        rows = rows[: int(hidden.argmax())] if np.count_nonzero(hidden) else rows
        return self.limits[namespace](rows) if namespace in self.limits else rows

    def row_of(self, key: Keys, namespace: int) -> int:
        """Row of one visible block, key [1, 32]; -1 for none."""
        found = self.find(key, namespace)
        return int(found[0]) if found.size else -1

    def find(self, keys: Keys, namespace: int) -> Rows:
        """Rows of visible blocks, in the order of keys, without the misses."""
        rows = self.pages.lookup(keys, namespace)
        rows = rows[rows >= 0]
        seen: Rows = rows[(self.table.flags[rows] & VISIBLE) != 0]
        return seen

    def mark_as(self, rows: Rows, mark: int) -> None:
        """Set a mark."""
        self.table.marks[rows] |= np.uint8(mark)

    def unmark_as(self, rows: Rows, mark: int) -> None:
        """Clear a mark."""
        self.table.marks[rows] &= np.uint8(~mark & 0xFF)

    def marked(self, rows: Rows, mark: int) -> npt.NDArray[np.bool_]:
        """Which rows have a mark, [n]."""
        found: npt.NDArray[np.bool_] = (self.table.marks[rows] & np.uint8(mark)) != 0
        return found

    def ids(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """The first eight bytes of the blocks' keys, [n]: what policies know a block by."""
        found: npt.NDArray[np.uint64] = self.table.records[rows, 0]
        return found

    def link(self, rows: Rows) -> None:
        """Remember that these rows, in prefix order, follow each other; -1 stands for a block that is not there."""
        here, behind = rows[:-1], rows[1:]
        both = (here >= 0) & (behind >= 0)
        self.table.next_row[here[both]] = behind[both]

    def link_behind(self, parent: Keys | None, namespace: int, rows: Rows) -> None:
        """As `link`, with the block before the first, key [1, 32], where the client told it."""
        if parent is not None:
            # It may be being written still: a client reserves a later part while it fills the one before.
            rows = np.concatenate([self.pages.lookup(parent, namespace), rows])
        self.link(rows)

    def residency(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Residency masks."""
        return self.table.flags[rows] & np.uint8(RESIDENT)

    def add(self, keys: Keys, namespace: int, flags: int) -> tuple[Rows, npt.NDArray[np.intp], Rows]:
        """Make rows for keys that are not there: (new rows, their positions in keys, rows of all keys).

        Keys that are present, or named twice, get no new one. When the table is full the last ones get none either:
        theirs are -1 among all.
        """
        found = self.pages.lookup(keys, namespace)
        absent = np.flatnonzero(found < 0)
        wanted = absent.size
        rows = self.table.alloc(wanted)
        absent = absent[: rows.size]
        table = self.table
        table.key[rows] = keys[absent]
        table.namespace[rows] = namespace
        table.flags[rows] = flags
        entered = self.long.front.insert(rows) == -1
        if not entered.all():
            # Named twice in this batch, or no place in the page table.
            self._free(rows[~entered])
            rows, absent = rows[entered], absent[entered]
        if rows.size < wanted:
            return rows, absent, self.pages.lookup(keys, namespace)
        found[absent] = rows
        return rows, absent, found

    def mark(self, rows: Rows, tier: int) -> None:
        """The blocks have a copy in a tier now, and had none there."""
        self.table.flags[rows] |= np.uint8(tier)
        self.copies[tier] += rows.size
        if self.disk_quota is not None and tier == TIER_NVME:
            self.disk_quota.changed(rows, 1)

    def unmark(self, rows: Rows, tier: int) -> None:
        """The blocks had a copy in a tier and have none there any more."""
        self.table.flags[rows] &= np.uint8(~tier & 0xFF)
        self.copies[tier] -= rows.size
        if self.disk_quota is not None and tier == TIER_NVME:
            self.disk_quota.changed(rows, -1)

    def unplace(self, rows: Rows, tier: int) -> tuple[Rows, Rows]:
        """Blocks had a copy in host or gpu and have none any more: its slots, and rows that have none anywhere now.

        Rows that are gone already are not among the latter.
        """
        slots, bare = np.empty(rows.size, np.int32), np.empty(rows.size, np.int32)
        word = slot_steps.HOST_SLOT if tier == TIER_HOST else slot_steps.GPU_SLOT
        found = slot_steps.drop_copies(
            self.table.words, self.table.octets, word, tier, RESIDENT | GONE, rows, slots, bare
        )
        self.copies[tier] -= rows.size
        return slots, bare[:found]

    def hide(self, rows: Rows) -> None:
        """Take rows out of the page table; they exist on for whoever still works with them."""
        listed = rows[(self.table.flags[rows] & GONE) == 0]
        if listed.size:
            self.long.front.delete(listed)
            self.table.flags[listed] = (self.table.flags[listed] | GONE) & np.uint8(~VISIBLE & 0xFF)

    def show(self, rows: Rows) -> None:
        """List hidden rows again; their keys must not be taken."""
        self.table.flags[rows] &= np.uint8(~GONE & 0xFF)
        self.long.front.insert(rows)

    def drop(self, rows: Rows) -> None:
        """Forget rows that have no copies: freed now, or with the last move that names them."""
        self.hide(rows)
        idle = rows[self.table.moves[rows] == 0]
        if idle.size:
            self._free(idle)

    def begin_move(self, rows: Rows) -> None:
        """A move names the rows: they are not freed before `end_move`."""
        self.table.moves[rows] += 1

    def end_move(self, rows: Rows) -> None:
        """Undo `begin_move`; forgotten rows go with their last move."""
        self.table.moves[rows] -= 1
        flags, moves = self.table.flags[rows], self.table.moves[rows]
        over = rows[(flags & GONE != 0) & (flags & (RESIDENT | WRITING) == 0) & (moves == 0)]
        if over.size:
            self._free(over)

    def live(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows are still what they were when a move began."""
        alive: npt.NDArray[np.bool_] = (self.table.flags[rows] & GONE) == 0
        return alive

    def of_namespace(self, namespace: int) -> Iterator[Rows]:
        """Visible rows of a namespace, piece by piece, so that a pass over the whole table can be interrupted."""
        for begin in range(0, self.table.used_rows, PIECE_ROWS):
            piece = slice(begin, min(begin + PIECE_ROWS, self.table.used_rows))
            mine = (self.table.namespace[piece] == namespace) & (self.table.flags[piece] & VISIBLE != 0)
            yield (np.flatnonzero(mine) + begin).astype(np.int32)

    def sweep_bare(self, tier: int, count: int) -> Iterator[Rows]:
        """Up to `count` visible rows whose only copy is in `tier` and that no move names, piece by piece.

        A hand goes round the table, as in CLOCK: each call looks at a bounded part and goes on where the last ended.
        """
        for _ in range(SWEEP_PIECES):
            if count <= 0 or not self.table.used_rows:
                return
            begin = self._hand if self._hand < self.table.used_rows else 0
            end = min(begin + PIECE_ROWS, self.table.used_rows)
            self._hand = end
            bare = (self.table.flags[begin:end] & (RESIDENT | VISIBLE)) == (tier | VISIBLE)
            idle = np.flatnonzero(bare & (self.table.moves[begin:end] == 0))[:count]
            count -= idle.size
            yield (idle + begin).astype(np.int32)

    def _free(self, rows: Rows) -> None:
        self.on_free(rows)
        self.table.flags[rows] = 0
        self.table.free(rows)
