"""Which blocks the rows of a batch have in the daemon: numbers, moved about instead of bytes.

Rows that share a beginning share its blocks. Seen from the start they are a tree, whose runs of blocks are what
attention is asked about: a run is read once for all rows that go through it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Blocks that follow each other in all of these rows; [blocks] and [rows], neither empty."""

    rows: Numbers
    blocks: Numbers


class BlockTable:
    """Block numbers of each row, in order. `counts` is how many each row has."""

    def __init__(self, rows: int) -> None:
        self.counts: Numbers = np.zeros(rows, np.int64)
        self._numbers: Numbers = np.zeros((rows, 16), np.int64)

    def copy(self) -> BlockTable:
        """A table of its own with the same rows."""
        copied = BlockTable(0)
        copied.counts, copied._numbers = self.counts.copy(), self._numbers.copy()
        return copied

    @property
    def is_empty(self) -> bool:
        """Whether no row has a block."""
        return not self.counts.any()

    def of_row(self, row: int) -> Numbers:
        """The blocks of a row; a view."""
        return self._numbers[row, : self.counts[row]]

    def append(self, row: int, blocks: Numbers) -> None:
        """Add blocks behind those of a row."""
        begin = int(self.counts[row])
        end = begin + len(blocks)
        while end > self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        self._numbers[row, begin:end] = blocks
        self.counts[row] = end

    def select(self, rows: Numbers) -> None:
        """Make the table one of these rows, which may repeat."""
        self._numbers, self.counts = self._numbers[rows], self.counts[rows]

    def truncate(self, counts: Numbers) -> None:
        """Leave each row its first blocks."""
        self.counts = np.minimum(self.counts, counts)

    def same_past(self, one: int, other: int) -> bool:
        """Whether two rows have the same blocks."""
        return bool(np.array_equal(self.of_row(one), self.of_row(other)))

    def live(self) -> Numbers:
        """Every block that some row has, once, in order."""
        return np.unique(self._numbers[np.arange(self._numbers.shape[1]) < self.counts[:, None]])

    def runs(self) -> list[Run]:
        """The rows as a tree, by its runs of blocks; where rows part or one ends, another run begins."""
        found: list[Run] = []
        groups = [(np.flatnonzero(self.counts), 0)]
        while groups:
            rows, begin = groups.pop()
            if not rows.size:
                continue
            end = self._common_end(rows, begin)
            if end > begin:
                found.append(Run(rows, self._numbers[rows[0], begin:end].copy()))
            left = rows[self.counts[rows] > end]
            following = self._numbers[left, end] if left.size else left
            groups += [(left[following == block], end) for block in np.unique(following)[::-1]]
        return found

    def _common_end(self, rows: Numbers, begin: int) -> int:
        """How far these rows, which are alike up to `begin`, are alike."""
        end = int(self.counts[rows].min())
        if rows.size == 1:
            return end
        differ = (self._numbers[rows, begin:end] != self._numbers[rows[0], begin:end]).any(axis=0)
        return begin + int(differ.argmax()) if differ.any() else end
