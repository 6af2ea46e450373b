"""A hierarchical bitmap: set, clear, count and find runs among millions of positions, in time logarithmic in them.

Used to allocate slots next to each other, and for presence in sequences of hundreds of thousands of tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.core.units import align_up
from kvtierd.index.bit_runs import (
    FAN_OUT,
    FIRST,
    LAST,
    LEAF_BITS,
    LEAF_WORDS,
    LEVELS,
    LONGEST,
    NODES,
    SET,
    U64,
    WORD_BITS,
    WORDS,
    Levels,
    Nodes,
    Words,
    mask_below,
    mask_from,
    rebuild,
    refresh,
)
from kvtierd.index.intrinsics import count_bits, lowest_bit
from kvtierd.index.jit import Word, compiled, subroutine
from kvtierd.index.memory import reserve

POSITIONS_MAX = 1 << 30

Positions = npt.NDArray[np.int64]
_POSITIONS = types.int64[::1]


@compiled(types.int64(WORDS, NODES, LEVELS, _POSITIONS, types.int64, types.boolean))
def write(words: Words, nodes: Nodes, levels: Levels, positions: Positions, capacity: int, value: bool) -> int:
    """Set or clear positions; returns how many changed, or -1, and nothing done, when one is outside.

    Neighbours in order share the work on their leaf.
    """
    for position in positions:
        if position < 0 or position >= capacity:
            return -1
    changed, stale = 0, np.int64(-1)
    for position in positions:
        word, bit = position // WORD_BITS, U64(1) << U64(position % WORD_BITS)
        if bool(words[word] & bit) == value:
            continue
        if stale >= 0 and position // LEAF_BITS != stale:
            refresh(words, nodes, levels, stale)
        words[word] ^= bit
        stale = position // LEAF_BITS
        changed += 1
    if stale >= 0:
        refresh(words, nodes, levels, stale)
    return changed


@compiled(types.void(WORDS, NODES, LEVELS, types.int64, types.int64, types.boolean))
def _write_range(words: Words, nodes: Nodes, levels: Levels, begin: int, end: int, value: bool) -> None:
    """Set or clear positions begin..end-1; begin < end."""
    last = (end - 1) // WORD_BITS
    for word in range(begin // WORD_BITS, last + 1):
        mask = mask_from(max(begin - word * WORD_BITS, 0)) & mask_below(min(end - word * WORD_BITS, WORD_BITS))
        words[word] = words[word] | mask if value else words[word] & ~mask
    rebuild(words, nodes, levels, begin // LEAF_BITS, last // LEAF_WORDS + 1)


@subroutine
def _count_below(words: Words, nodes: Nodes, levels: Levels, end: int) -> Word:
    """Set positions below `end`: whole nodes left of it on every level, then whole words, then bits."""
    count, leaf = np.int64(0), end // LEAF_BITS
    index = np.int64(leaf)
    for level in range(levels.size):
        for node in range(index // FAN_OUT * FAN_OUT, index):
            count += nodes[levels[level] + node, SET]
        index //= FAN_OUT
    for word in range(leaf * LEAF_WORDS, end // WORD_BITS):
        count += count_bits(words[word])
    if end % WORD_BITS:
        count += count_bits(words[end // WORD_BITS] & mask_below(end % WORD_BITS))
    return count


@compiled(types.int64(WORDS, NODES, LEVELS, types.int64, types.int64))
def _count_between(words: Words, nodes: Nodes, levels: Levels, begin: int, end: int) -> int:
    """Set positions in begin..end-1."""
    return int(_count_below(words, nodes, levels, end) - _count_below(words, nodes, levels, begin))


@subroutine
def _run_in_words(words: Words, begin: Word, end: Word, length: Word, run: Word) -> Word:
    """Look for a run of `length` in bits begin..end-1 (end a multiple of 64), after a run of `run` set bits.

    Returns (its first position or -1, run at the end).
    """
    position = begin
    while position < end:
        word = words[position // WORD_BITS] >> U64(position % WORD_BITS)
        left = WORD_BITS - position % WORD_BITS
        ones = min(np.int64(lowest_bit(~word)), left)
        run += ones
        if run >= length:
            return position + ones - run, run
        if ones < left:
            # Jump over the zeros to the next set bit of this word, or to the next word.
            run = 0
            ones += min(np.int64(lowest_bit(word >> U64(ones))), left - ones)
        position += ones
    return np.int64(-1), run


@compiled(types.int64(WORDS, NODES, LEVELS, types.int64, types.int64))
def _find_run(words: Words, nodes: Nodes, levels: Levels, length: int, start: int) -> Word:
    """First position from `start` on where `length` set bits begin, or -1.

    Walks from left to right over the largest nodes that cannot hold the run, and down into the one that does.
    """
    position, run, level, span = np.int64(start), np.int64(0), 0, np.int64(LEAF_BITS)
    if position % LEAF_BITS:
        end = (position // LEAF_BITS + 1) * LEAF_BITS
        found, run = _run_in_words(words, position, end, length, run)
        if found >= 0:
            return found
        position = end
    while position < words.size * WORD_BITS:
        node = levels[level] + position // span
        if run + nodes[node, FIRST] >= length:
            return position - run
        if nodes[node, LONGEST] >= length:
            if level == 0:
                return _run_in_words(words, position, position + LEAF_BITS, length, run)[0]
            level, span = level - 1, span // FAN_OUT
            continue
        run = run + span if nodes[node, FIRST] == span else np.int64(nodes[node, LAST])
        position += span
        while level + 1 < levels.size and position % (span * FAN_OUT) == 0:
            level, span = level + 1, span * FAN_OUT
    return np.int64(-1)


@compiled(types.int64(WORDS, NODES, LEVELS, types.int64))
def _run_from(words: Words, nodes: Nodes, levels: Levels, start: int) -> Word:
    """How many positions from `start` on are set without a gap."""
    position = np.int64(start)
    while position % LEAF_BITS and position < words.size * WORD_BITS:
        left = WORD_BITS - position % WORD_BITS
        ones = min(np.int64(lowest_bit(~(words[position // WORD_BITS] >> U64(position % WORD_BITS)))), left)
        position += ones
        if ones < left:
            return position - start
    level, span = 0, np.int64(LEAF_BITS)
    while position < words.size * WORD_BITS:
        first = nodes[levels[level] + position // span, FIRST]
        position += first
        if first < span:
            break
        while level + 1 < levels.size and position % (span * FAN_OUT) == 0:
            level, span = level + 1, span * FAN_OUT
    return position - start


@compiled(types.int64(WORDS, NODES, LEVELS, _POSITIONS))
def choose(words: Words, nodes: Nodes, levels: Levels, out: Positions) -> Word:
    """Name up to `out.size` set positions: neighbours where a run is long enough, else the first ones there are."""
    taken: Word = np.int64(0)
    position: Word = _find_run(words, nodes, levels, out.size, 0)
    while taken < out.size:
        position = _find_run(words, nodes, levels, 1, max(position, 0))
        if position < 0:
            break
        run = min(_run_from(words, nodes, levels, position), out.size - taken)
        for index in range(run):
            out[taken + index] = position + index
        taken += run
        position += run
    return taken


class HierarchicalBitmap:
    """A bit for each of 0..capacity-1, all clear at first, or all set with `filled`.

    Positions are int64. Takes about 1.3 bits of memory a position, as they are first set. Raises ValueError for a
    capacity outside 1..2**30, and, with nothing changed, for positions outside the bitmap.
    """

    def __init__(self, capacity: int, *, filled: bool = False) -> None:
        if not 1 <= capacity <= POSITIONS_MAX:
            raise ValueError(f"capacity is {capacity} positions; it must be in 1..{POSITIONS_MAX}")
        self.capacity = capacity
        counts = [-(-capacity // LEAF_BITS)]
        while counts[-1] > 1:
            counts.append(-(-counts[-1] // FAN_OUT))
        # Whole groups of eight on every level: what lies beyond the capacity is clear, and needs no special case.
        sizes = [-(-count // FAN_OUT) * FAN_OUT for count in counts]
        self._levels: Levels = np.cumsum([0, *sizes[:-1]])
        self._words: Words = reserve((sizes[0] * LEAF_WORDS,), np.uint64, huge=False)
        self._nodes: Nodes = reserve((sum(sizes), 4), np.int32, huge=False)
        if filled:
            self.set_range(0, capacity)

    @property
    def columns(self) -> tuple[Words, Nodes, Levels]:
        """Bits, summaries and levels, for compiled code that works on them (`choose`, `write`)."""
        return self._words, self._nodes, self._levels

    def nbytes(self, positions: int) -> int:
        """RAM that bits and summaries of positions below `positions` take, in whole pages."""
        leaves = -(-positions // LEAF_BITS)
        upper = self._nodes.nbytes - int(self._levels[1:2].sum()) * self._nodes.strides[0]
        return align_up(leaves * LEAF_BITS // 8) + align_up(leaves * self._nodes.strides[0]) + align_up(upper)

    def set(self, positions: Positions) -> int:
        """Set positions ([n], any order); returns how many were clear."""
        return self._write(positions, value=True)

    def clear(self, positions: Positions) -> int:
        """Clear positions ([n], any order); returns how many were set."""
        return self._write(positions, value=False)

    def set_range(self, begin: int, end: int) -> None:
        """Set positions begin..end-1."""
        self._write_range(begin, end, value=True)

    def clear_range(self, begin: int, end: int) -> None:
        """Clear positions begin..end-1."""
        self._write_range(begin, end, value=False)

    def take(self, count: int) -> Positions:
        """Clear up to `count` set positions and return them in order: neighbours if a run is long enough."""
        out = np.empty(max(0, count), np.int64)
        if count > 0:
            out = out[: choose(self._words, self._nodes, self._levels, out)]
            self._write(out, value=False)
        return out

    def test(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Which of the positions ([n]) are set."""
        checked = np.asarray(positions, np.int64)
        if checked.size and not 0 <= checked.min() <= checked.max() < self.capacity:
            raise self._outside(checked)
        bits: Words = self._words[checked // WORD_BITS] >> (checked % WORD_BITS).astype(np.uint64)
        return (bits & U64(1)).astype(np.bool_)

    def count(self, begin: int = 0, end: int | None = None) -> int:
        """How many of begin..end-1 are set (up to the capacity if `end` is None)."""
        end = self.capacity if end is None else end
        self._check_range(begin, end)
        return _count_between(self._words, self._nodes, self._levels, begin, end)

    def find_first(self, start: int = 0) -> int:
        """First set position from `start` on, or -1."""
        return self.find_run(1, start)

    def find_run(self, length: int, start: int = 0) -> int:
        """First position from `start` on where `length` set positions begin, or -1."""
        self._check_range(start, self.capacity)
        if length < 1:
            raise ValueError(f"a run of {length} positions cannot be found; it must be at least 1")
        return int(_find_run(self._words, self._nodes, self._levels, length, start))

    def run_from(self, start: int) -> int:
        """How many positions from `start` on are set without a gap: 0 if `start` is clear."""
        self._check_range(start, self.capacity)
        return int(_run_from(self._words, self._nodes, self._levels, start))

    def _write(self, positions: Positions, *, value: bool) -> int:
        wanted = np.ascontiguousarray(positions, np.int64)
        changed = write(self._words, self._nodes, self._levels, wanted, self.capacity, value)
        if changed < 0:
            raise self._outside(wanted)
        return changed

    def _write_range(self, begin: int, end: int, *, value: bool) -> None:
        self._check_range(begin, end)
        if begin < end:
            _write_range(self._words, self._nodes, self._levels, begin, end, value)

    def _outside(self, positions: Positions) -> ValueError:
        return ValueError(f"positions {positions.min()}..{positions.max()} are not all in 0..{self.capacity - 1}")

    def _check_range(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= self.capacity:
            raise ValueError(f"range {begin}..{end} is not within 0..{self.capacity}")
