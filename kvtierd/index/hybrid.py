"""The hybrid index: extents of several sizes within one sequence, which split and merge while keys stay as they are.

A sequence is cut into granules (64 tokens); an extent covers one to eight of them, next to each other, and lies at a
place of its owner's choice. A map from granule to extent answers where a token lies in one step and makes a split or a
merge a matter of at most eight entries, whatever the length of the sequence. Blocks are fixed spans of tokens and need
not end where extents do: one may lie in several extents, one extent may hold several.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.layout import ROW_NUMBERS, Rows
from kvtierd.index.memory import reserve

GRANULE_TOKENS = 64
EXTENT_GRANULES_MAX = 8
GRANULES_MAX = 1 << 24
"""A billion tokens."""

BEGIN, LENGTH, PLACE, OFFSET = range(4)
"""Columns of an extent: first granule, number of granules (0 for a free number), place, first granule within it."""

_EXTENTS = types.int32[:, ::1]
_USES = types.uint32[::1]
_COUNTS = types.int64[::1]
Extents = npt.NDArray[np.int32]
Uses = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]

_GRANULES, _FRESH, _FREE_HEAD = range(3)
"""State: granules of the sequence; extent numbers ever used; first free one plus one (linked through BEGIN)."""
_SATURATED = np.uint32(0xFFFFFFFF)


@helper
def _new_extent(extents: Extents, counts: Counts) -> Word:
    if counts[_FREE_HEAD]:
        number = counts[_FREE_HEAD] - 1
        counts[_FREE_HEAD] = extents[number, BEGIN]
        return number
    counts[_FRESH] += 1
    return counts[_FRESH] - 1


@helper
def _drop_extent(extents: Extents, counts: Counts, number: Word) -> None:
    extents[number, BEGIN], extents[number, LENGTH] = counts[_FREE_HEAD], 0
    counts[_FREE_HEAD] = number + 1


@helper
def _cover(owner: Rows, extents: Extents, number: Word, begin: Word, length: Word, place: Word, offset: Word) -> None:
    extents[number, BEGIN], extents[number, LENGTH] = begin, length
    extents[number, PLACE], extents[number, OFFSET] = place, offset
    owner[begin : begin + length] = number


@compiled(types.int64(ROW_NUMBERS, _EXTENTS, _COUNTS, types.int64, types.int64))
def _append(owner: Rows, extents: Extents, counts: Counts, length: int, place: int) -> Word:
    number = _new_extent(extents, counts)
    _cover(owner, extents, number, counts[_GRANULES], length, place, 0)
    counts[_GRANULES] += length
    return number


@compiled(types.int64(ROW_NUMBERS, _EXTENTS, types.int64, types.int64, ROW_NUMBERS))
def _overlapping(owner: Rows, extents: Extents, begin: int, end: int, out: Rows) -> Word:
    """Extents that overlap granules begin..end-1, in order; returns how many."""
    found, granule = 0, begin
    while granule < end:
        number = owner[granule]
        out[found] = number
        found += 1
        granule = extents[number, BEGIN] + extents[number, LENGTH]
    return found


@compiled(types.void(ROW_NUMBERS, _EXTENTS, _COUNTS, types.int64, ROW_NUMBERS, ROW_NUMBERS))
def _split(owner: Rows, extents: Extents, counts: Counts, number: int, lengths: Rows, out: Rows) -> None:
    """Cut an extent into parts of these lengths; the first part keeps its number."""
    begin, place, offset = extents[number, BEGIN], extents[number, PLACE], extents[number, OFFSET]
    for part, length in enumerate(lengths):
        out[part] = number if part == 0 else _new_extent(extents, counts)
        _cover(owner, extents, out[part], begin, length, place, offset)
        begin, offset = begin + length, offset + length


@compiled(types.void(ROW_NUMBERS, _EXTENTS, _COUNTS, ROW_NUMBERS, types.int64))
def _merge(owner: Rows, extents: Extents, counts: Counts, numbers: Rows, place: int) -> None:
    """Make one extent of neighbours given in order; it keeps the first one's number."""
    length = extents[numbers[0], LENGTH]
    for index in range(1, numbers.size):
        length += extents[numbers[index], LENGTH]
        _drop_extent(extents, counts, numbers[index])
    _cover(owner, extents, numbers[0], extents[numbers[0], BEGIN], length, place, 0)


@compiled(types.void(_USES, types.int64, types.int64))
def _touch(uses: Uses, begin: int, end: int) -> None:
    for granule in range(begin, end):
        if uses[granule] != _SATURATED:
            uses[granule] += np.uint32(1)


class HybridIndex:
    """The extents of one sequence of up to `tokens_max` tokens (a whole number of granules of 64).

    Extents have numbers that stay valid until the extent is split (the first part keeps it) or merged into another.
    `place` is any int32 of the owner's, such as a slot; an extent begins `offset` granules into it, so that a split
    moves no bytes: its parts lie where they lay. Memory is 8 bytes a granule and 16 an extent.
    Raises ValueError, with nothing changed, for tokens, extents or lengths that are out of range.
    """

    def __init__(self, tokens_max: int) -> None:
        granules = tokens_max // GRANULE_TOKENS
        if tokens_max % GRANULE_TOKENS or not 1 <= granules <= GRANULES_MAX:
            raise ValueError(f"tokens_max is {tokens_max}; it must be a multiple of {GRANULE_TOKENS}, at least that")
        self._owner: Rows = reserve((granules,), np.int32)
        self._extents: Extents = reserve((granules, 4), np.int32)
        self._uses: Uses = reserve((granules,), np.uint32)
        self._counts: Counts = np.zeros(3, np.int64)

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return int(self._counts[_GRANULES]) * GRANULE_TOKENS

    def append(self, tokens: int, place: int) -> int:
        """Extend the sequence by an extent of `tokens` (64 to 512, whole granules) at `place`; returns its number."""
        length = self._granules_of(tokens)
        if self.tokens + tokens > len(self._owner) * GRANULE_TOKENS:
            raise ValueError(f"{tokens} tokens after {self.tokens} are over {len(self._owner) * GRANULE_TOKENS}")
        return int(_append(self._owner, self._extents, self._counts, length, place))

    def locate(self, tokens: npt.NDArray[np.int64]) -> Rows:
        """Numbers of the extents that hold these tokens ([n])."""
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.tokens:
            raise ValueError(f"tokens {tokens.min()}..{tokens.max()} are not all in 0..{self.tokens - 1}")
        found: Rows = self._owner[tokens // GRANULE_TOKENS]
        return found

    def overlapping(self, begin: int, end: int) -> Rows:
        """Numbers of the extents that hold any of tokens begin..end-1, in order."""
        first, last = self._span(begin, end)
        out = np.empty(last - first, np.int32)
        return out[: _overlapping(self._owner, self._extents, first, last, out)]

    def describe(self, extents: Rows) -> Counts:
        """Columns of extents ([n, 4] int64): first token, tokens, place, offset in the place in tokens."""
        self._check(extents)
        columns = self._extents[extents].astype(np.int64)
        columns[:, [BEGIN, LENGTH, OFFSET]] *= GRANULE_TOKENS
        return columns

    def split(self, extent: int, tokens: npt.NDArray[np.int64]) -> Rows:
        """Cut an extent into parts of these lengths in tokens ([n], together its own); returns their numbers."""
        self._check(np.array([extent], np.int32))
        lengths = np.array([self._granules_of(int(count)) for count in tokens], np.int32)
        if lengths.sum() != self._extents[extent, LENGTH]:
            whole = int(self._extents[extent, LENGTH]) * GRANULE_TOKENS
            raise ValueError(f"parts of {int(np.sum(tokens))} tokens do not make the {whole} of extent {extent}")
        out = np.empty(lengths.size, np.int32)
        _split(self._owner, self._extents, self._counts, extent, lengths, out)
        return out

    def merge(self, extents: Rows, place: int) -> int:
        """Make one extent of neighbours ([n], in order, at most 512 tokens), now at `place`; returns its number.

        The owner has brought their bytes together there before.
        """
        self._check(extents)
        begins, lengths = self._extents[extents, BEGIN], self._extents[extents, LENGTH]
        if extents.size == 0 or (begins[1:] != begins[:-1] + lengths[:-1]).any():
            raise ValueError(f"extents {extents.tolist()} are not neighbours in order")
        self._granules_of(int(lengths.sum()) * GRANULE_TOKENS)
        _merge(self._owner, self._extents, self._counts, extents, place)
        return int(extents[0])

    def touch(self, begin: int, end: int) -> None:
        """Count a use of every granule that holds any of tokens begin..end-1."""
        _touch(self._uses, *self._span(begin, end))

    def uses(self, extent: int) -> Uses:
        """Uses of each granule of an extent, [granules] uint32: what tells whether a part of it is used alone."""
        self._check(np.array([extent], np.int32))
        begin, length = self._extents[extent, [BEGIN, LENGTH]]
        return self._uses[begin : begin + length].copy()

    def _granules_of(self, tokens: int) -> int:
        if tokens % GRANULE_TOKENS or not 1 <= tokens // GRANULE_TOKENS <= EXTENT_GRANULES_MAX:
            most = EXTENT_GRANULES_MAX * GRANULE_TOKENS
            raise ValueError(f"an extent of {tokens} tokens is no multiple of {GRANULE_TOKENS} up to {most}")
        return tokens // GRANULE_TOKENS

    def _span(self, begin: int, end: int) -> tuple[int, int]:
        if not 0 <= begin <= end <= self.tokens:
            raise ValueError(f"tokens {begin}..{end} are not within 0..{self.tokens}")
        return begin // GRANULE_TOKENS, max(begin // GRANULE_TOKENS, -(-end // GRANULE_TOKENS))

    def _check(self, extents: Rows) -> None:
        known = extents[(extents >= 0) & (extents < self._counts[_FRESH])]
        if known.size < extents.size or (self._extents[known, LENGTH] == 0).any():
            raise ValueError(f"extents {extents.tolist()} are not all in the sequence")
