"""One sequence of blocks, some of which are present: its keys, and what is kept in step so as not to probe for them.

Positions below a frontier are *tracked*: watched for insertions and deletions, with a bit for presence and the row of
the block. Those beyond it are known by their keys only, and every question about them probes the page table. Moving the
frontier, up or down and a few positions at a time, is all that switching between the two takes, and every answer is
right wherever it stands. A second frontier, never above the first, bounds the part whose extents are in a hybrid index.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.core.units import align_up
from kvtierd.index.bitmap import HierarchicalBitmap
from kvtierd.index.extents import ABSENT, GRANULE_TOKENS, of_rows
from kvtierd.index.hybrid import EXTENT_GRANULES_MAX, HybridIndex
from kvtierd.index.key_tail import KeyTail
from kvtierd.index.layout import Keys, Rows
from kvtierd.index.memory import reserve
from kvtierd.index.page_table import PageTable
from kvtierd.index.watch import Watch, matching_keys

Positions = npt.NDArray[np.int64]
Extents = npt.NDArray[np.int64]

POSITIONS_MAX = 1 << 19
"""Blocks of a sequence: 32 M tokens in blocks of 64."""


class Columns:
    """What is kept of tracked positions; reserved for the longest sequence, backed as far as it is used."""

    def __init__(self) -> None:
        self.present = HierarchicalBitmap(POSITIONS_MAX)
        self.rows: Rows = reserve((POSITIONS_MAX,), np.int32, huge=False)
        self.watched: Rows = reserve((POSITIONS_MAX,), np.int32, huge=False)


class Sequence:
    """Answers about positions (blocks) and tokens of one sequence. All arguments are in range: the front checks."""

    def __init__(self, number: int, namespace: int, block_tokens: int, pages: PageTable, watch: Watch) -> None:
        self.number, self.namespace, self.block_tokens = number, namespace, block_tokens
        self._pages, self._watch = pages, watch
        self._keys = KeyTail(POSITIONS_MAX)
        self._columns: Columns | None = None
        self._hybrid: HybridIndex | None = None
        self._extended = 0
        self.mixed = False
        """Extents have been split or merged: only the hybrid index knows them."""

    @property
    def length(self) -> int:
        """Positions of the sequence."""
        return self._keys.end

    @property
    def tracked(self) -> int:
        """Positions below the frontier."""
        return self._keys.begin

    @property
    def extended(self) -> int:
        """Positions whose extents are in the hybrid index."""
        return self._extended

    @property
    def hybrid(self) -> HybridIndex | None:
        """The hybrid index, if there is one."""
        return self._hybrid

    def append(self, keys: Keys) -> None:
        """Add blocks at the end."""
        self._keys.append(keys)

    # Questions.

    def rows(self, positions: Positions) -> Rows:
        """Rows of the blocks at some positions, -1 where there is none."""
        below = positions < self.tracked
        if self._columns is not None and below.all():
            return self._columns.rows[positions]
        out = np.empty(positions.size, np.int32)
        if self._columns is not None:
            out[below] = self._columns.rows[positions[below]]
        out[~below] = self._pages.lookup(self._keys.at(positions[~below]), self.namespace)
        return out

    def rows_between(self, begin: int, end: int) -> Rows:
        """The same of positions begin..end-1."""
        out = np.empty(end - begin, np.int32)
        middle = min(max(begin, self.tracked), end)
        if self._columns is not None:
            out[: middle - begin] = self._columns.rows[begin:middle]
        if middle < end:
            out[middle - begin :] = self._pages.lookup(self._keys.between(middle, end), self.namespace)
        return out

    def run(self, start: int) -> int:
        """How many positions from `start` on are present without a gap."""
        middle = max(start, self.tracked)
        if self._columns is not None and start < middle:
            run = self._columns.present.run_from(start)
            if start + run < middle:
                return run
        hit, _ = self._pages.prefix(self._keys.between(middle, self.length), self.namespace)
        return middle + hit - start

    def matching(self, keys: Keys) -> int:
        """How many leading ones of `keys` ([n, 32], contiguous) are the first ones of this sequence."""
        wanted = min(len(keys), self.length)
        middle = min(self.tracked, wanted)
        if self._columns is not None and middle:
            same = self._watch.matching(self._columns.watched[:middle], keys[:middle])
            if same < middle:
                return same
        return middle + matching_keys(self._keys.between(middle, wanted), keys[middle:wanted])

    def leading(self, limit: int) -> Rows:
        """Rows of the leading run of present positions, up to `limit` of them."""
        middle = min(self.tracked, limit)
        known: Rows = np.empty(0, np.int32)
        if self._columns is not None and middle:
            run = min(self._columns.present.run_from(0), middle)
            known = self._columns.rows[:run].copy()
        if known.size < middle or middle == limit:
            return known
        _, more = self._pages.prefix(self._keys.between(middle, limit), self.namespace)
        return np.concatenate([known, more]) if known.size else more

    def count(self, begin: int, end: int) -> int:
        """How many of positions begin..end-1 are present."""
        middle = min(max(begin, self.tracked), end)
        count = 0
        if self._columns is not None and begin < middle:
            count = self._columns.present.count(begin, middle)
        if middle < end:
            count += int(np.count_nonzero(self.rows_between(middle, end) >= 0))
        return count

    def extents(self, begin: int, end: int) -> Extents:
        """Extents of present blocks that hold any of tokens begin..end-1: [n, 4] first token, tokens, place, offset.

        Where nothing was split or merged, a present block is one extent, and its place is its row.
        """
        first = begin // self.block_tokens
        last = -(-end // self.block_tokens) if begin < end else first
        middle = min(max(first, self._extended), last)
        if self._hybrid is None or first == middle:
            return self._blocks_as_extents(first, last)
        known = self._hybrid.placed(begin, min(end, middle * self.block_tokens))
        return known if middle == last else np.concatenate([known, self._blocks_as_extents(middle, last)])

    def _blocks_as_extents(self, first: int, last: int) -> Extents:
        out = np.empty((last - first, 4), np.int64)
        return out[: of_rows(self.rows_between(first, last), first, self.block_tokens, out)]

    # Changes of tracked positions.

    def came(self, positions: Positions, rows: Rows) -> None:
        """Blocks at tracked positions are present now, at these rows."""
        assert self._columns is not None
        self._columns.present.set(positions)
        self._columns.rows[positions] = rows
        self._assign(positions, rows)

    def went(self, positions: Positions, rows: Rows) -> None:
        """Blocks at tracked positions were deleted, if these were the rows that had them."""
        assert self._columns is not None
        positions = positions[self._columns.rows[positions] == rows]
        self._columns.present.clear(positions)
        self._columns.rows[positions] = ABSENT
        if self._hybrid is not None:
            self._assign(positions, np.full(positions.size, ABSENT, np.int32))

    def _assign(self, positions: Positions, places: Rows) -> None:
        if self._hybrid is not None:
            below = positions < self._extended
            self._hybrid.assign(positions[below] * self.block_tokens, self.block_tokens, places[below])

    # Moving the frontiers.

    def track(self, count: int) -> int:
        """Raise the frontier by up to `count` positions; returns by how many, fewer where the watch is full."""
        begin = self.tracked
        count = min(count, self.length - begin)
        if count <= 0:
            return 0
        if self._columns is None:
            self._columns = Columns()
        keys = self._keys.between(begin, begin + count)
        numbers = self._watch.add(keys, self.namespace, self.number, begin)
        rows = self._pages.lookup(keys[: numbers.size], self.namespace)
        self._columns.rows[begin : begin + rows.size] = rows
        self._columns.watched[begin : begin + rows.size] = numbers
        self._columns.present.set(np.flatnonzero(rows >= 0) + begin)
        self._keys.drop(rows.size)
        return rows.size

    def untrack(self, count: int) -> int:
        """Lower the frontier by up to `count` positions; returns by how many."""
        count, end = min(count, self.tracked), self.tracked
        if self._columns is None:
            return 0
        begin = end - count
        self.shorten(begin)
        numbers = self._columns.watched[begin:end].copy()
        self._keys.prepend(self._watch.keys(numbers))
        self._watch.remove(numbers)
        self._columns.present.clear_range(begin, end)
        if begin == 0:
            self._columns = None
        return count

    def extend(self, count: int) -> int:
        """Take up to `count` more tracked positions into the hybrid index; returns how many."""
        if self._hybrid is None:
            self._hybrid = HybridIndex(POSITIONS_MAX * self.block_tokens)
        begin, end = self._extended, min(self._extended + count, self.tracked)
        if self._columns is not None and begin < end:
            self._hybrid.append_many(self.block_tokens, self._columns.rows[begin:end])
        self._extended = end
        return end - begin

    def shorten(self, length: int) -> None:
        """Forget the hybrid index where it reaches beyond `length` positions."""
        if self._extended > length:
            self._hybrid, self._extended, self.mixed = None, 0, False

    def can_extend(self) -> bool:
        """Whether a hybrid index can hold blocks of this size: whole granules, and no more than an extent has."""
        granules, rest = divmod(self.block_tokens, GRANULE_TOKENS)
        return rest == 0 and granules <= EXTENT_GRANULES_MAX

    def nbytes(self) -> float:
        """RAM that the sequence takes beside the blocks' own: keys, records and columns of its positions."""
        total: float = self._keys.nbytes()
        if self._columns is not None:
            columns = self._columns
            total += self.tracked * self._watch.bytes_per_position() + columns.present.nbytes(self.tracked)
            total += 2 * align_up(self.tracked * columns.rows.itemsize)
        if self._hybrid is not None:
            total += self._hybrid.nbytes()
        return total
