"""The steps on extents under the hybrid index: a map from granule to extent, and the extents' columns.

An extent that is gone leaves its number on a list of free ones, linked through BEGIN, so that there are never more
numbers than granules.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.layout import ROW_NUMBERS, Rows

GRANULE_TOKENS = 64
BEGIN, LENGTH, PLACE, OFFSET = range(4)
"""Columns of an extent: first granule, number of granules (0 for a free number), place, first granule within it."""
ABSENT = -1
"""Place of an extent that lies nowhere."""

EXTENTS = types.int32[:, ::1]
USES = types.uint32[::1]
COUNTS = types.int64[::1]
TABLE = types.int64[:, ::1]
Extents = npt.NDArray[np.int32]
Uses = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]

GRANULES, FRESH, FREE_HEAD = range(3)
"""State: granules of the sequence; extent numbers ever used; first free one plus one."""
_SATURATED = np.uint32(0xFFFFFFFF)


@helper
def _new_extent(extents: Extents, counts: Counts) -> Word:
    if counts[FREE_HEAD]:
        number = counts[FREE_HEAD] - 1
        counts[FREE_HEAD] = extents[number, BEGIN]
        return number
    counts[FRESH] += 1
    return counts[FRESH] - 1


@helper
def _drop_extent(extents: Extents, counts: Counts, number: Word) -> None:
    extents[number, BEGIN], extents[number, LENGTH] = counts[FREE_HEAD], 0
    counts[FREE_HEAD] = number + 1


@helper
def _cover(owner: Rows, extents: Extents, number: Word, begin: Word, length: Word, place: Word, offset: Word) -> None:
    extents[number, BEGIN], extents[number, LENGTH] = begin, length
    extents[number, PLACE], extents[number, OFFSET] = place, offset
    owner[begin : begin + length] = number


@compiled(types.int64(ROW_NUMBERS, EXTENTS, COUNTS, types.int64, ROW_NUMBERS))
def append(owner: Rows, extents: Extents, counts: Counts, length: int, places: Rows) -> Word:
    """Add extents of `length` granules behind the others; returns the number of the last one."""
    number = np.int64(-1)
    for place in places:
        number = _new_extent(extents, counts)
        _cover(owner, extents, number, counts[GRANULES], length, place, 0)
        counts[GRANULES] += length
    return number


@compiled(types.int64(ROW_NUMBERS, EXTENTS, types.int64, types.int64, ROW_NUMBERS))
def overlapping(owner: Rows, extents: Extents, begin: int, end: int, out: Rows) -> Word:
    """Extents that overlap granules begin..end-1, in order; returns how many."""
    found, granule = 0, begin
    while granule < end:
        number = owner[granule]
        out[found] = number
        found += 1
        granule = extents[number, BEGIN] + extents[number, LENGTH]
    return found


@compiled(types.int64(ROW_NUMBERS, EXTENTS, types.int64, types.int64, TABLE))
def placed(owner: Rows, extents: Extents, begin: int, end: int, out: Counts) -> Word:
    """Columns, in tokens, of the extents that overlap granules begin..end-1 and lie somewhere; returns how many."""
    found, granule = 0, begin
    while granule < end:
        number = owner[granule]
        first, length = extents[number, BEGIN], extents[number, LENGTH]
        if extents[number, PLACE] >= 0:
            out[found, BEGIN], out[found, LENGTH] = first * GRANULE_TOKENS, length * GRANULE_TOKENS
            out[found, PLACE], out[found, OFFSET] = extents[number, PLACE], extents[number, OFFSET] * GRANULE_TOKENS
            found += 1
        granule = first + length
    return found


@compiled(types.int64(ROW_NUMBERS, types.int64, types.int64, TABLE))
def of_rows(rows: Rows, first: int, tokens: int, out: Counts) -> Word:
    """The same of blocks of `tokens` each, from number `first` on, that are extents at their rows."""
    found = 0
    for index in range(rows.size):
        if rows[index] >= 0:
            out[found, BEGIN], out[found, LENGTH] = (first + index) * tokens, tokens
            out[found, PLACE], out[found, OFFSET] = rows[index], 0
            found += 1
    return found


@compiled(types.void(ROW_NUMBERS, EXTENTS, COUNTS, types.int64, ROW_NUMBERS, ROW_NUMBERS))
def split(owner: Rows, extents: Extents, counts: Counts, number: int, lengths: Rows, out: Rows) -> None:
    """Cut an extent into parts of these lengths; the first part keeps its number."""
    begin, place, offset = extents[number, BEGIN], extents[number, PLACE], extents[number, OFFSET]
    for part, length in enumerate(lengths):
        out[part] = number if part == 0 else _new_extent(extents, counts)
        _cover(owner, extents, out[part], begin, length, place, offset)
        begin, offset = begin + length, offset + length


@compiled(types.void(ROW_NUMBERS, EXTENTS, COUNTS, ROW_NUMBERS, types.int64))
def merge(owner: Rows, extents: Extents, counts: Counts, numbers: Rows, place: int) -> None:
    """Make one extent of neighbours given in order; it keeps the first one's number."""
    length = extents[numbers[0], LENGTH]
    for index in range(1, numbers.size):
        length += extents[numbers[index], LENGTH]
        _drop_extent(extents, counts, numbers[index])
    _cover(owner, extents, numbers[0], extents[numbers[0], BEGIN], length, place, 0)


@helper
def _cut(owner: Rows, extents: Extents, counts: Counts, granule: Word) -> None:
    """Make an extent begin at a granule: what is left of it keeps its number."""
    if granule == counts[GRANULES]:
        return
    number = owner[granule]
    left = granule - extents[number, BEGIN]
    if left == 0:
        return
    right = extents[number, LENGTH] - left
    extents[number, LENGTH] = left
    place, offset = extents[number, PLACE], extents[number, OFFSET]
    _cover(owner, extents, _new_extent(extents, counts), granule, right, place, offset + left)


@compiled(types.void(ROW_NUMBERS, EXTENTS, COUNTS, types.int64[::1], types.int64, ROW_NUMBERS, ROW_NUMBERS))
def assign(
    owner: Rows, extents: Extents, counts: Counts, begins: Counts, length: int, places: Rows, offsets: Rows
) -> None:
    """Make each span of `length` granules an extent of its own, cut out of those that held its granules."""
    for index in range(begins.size):
        begin = begins[index]
        _cut(owner, extents, counts, begin)
        _cut(owner, extents, counts, begin + length)
        granule = begin
        while granule < begin + length:
            number = owner[granule]
            granule += extents[number, LENGTH]
            _drop_extent(extents, counts, number)
        _cover(owner, extents, _new_extent(extents, counts), begin, length, places[index], offsets[index])


@compiled(types.int64(ROW_NUMBERS, EXTENTS, ROW_NUMBERS, ROW_NUMBERS, types.int64, types.int64, types.int64, TABLE))
def pieces(
    owner: Rows, extents: Extents, firsts: Rows, blocks: Rows, granules: int, begin: int, end: int, out: Counts
) -> Word:
    """What granules begin..end-1 of some blocks lie in: returns how many rows of `out` (granule, granules, place,
    offset), neighbours at one place taken together.

    Block i has granules `i * granules` on, and lies in the extents from granule `firsts[i]` on, or, where that is -1,
    as a whole at `blocks[i]`. `out` has room for as many as there are granules.
    """
    found, granule = 0, np.int64(begin)
    while granule < end:
        block, within = granule // granules, granule % granules
        place, offset = np.int64(blocks[block]), np.int64(within)
        length = min(np.int64((block + 1) * granules), np.int64(end)) - granule
        if firsts[block] >= 0:
            number = owner[firsts[block] + within]
            skipped = firsts[block] + within - extents[number, BEGIN]
            place, offset = np.int64(extents[number, PLACE]), np.int64(extents[number, OFFSET] + skipped)
            length = min(np.int64(extents[number, LENGTH] - skipped), length)
        last = found - 1
        if found and out[last, PLACE] == place and out[last, OFFSET] + out[last, LENGTH] == offset:
            out[last, LENGTH] += length
        else:
            out[found, BEGIN], out[found, LENGTH], out[found, PLACE], out[found, OFFSET] = (
                granule, length, place, offset,
            )  # fmt: skip
            found += 1
        granule += length
    return found


@compiled(types.void(USES, types.int64, types.int64))
def forget_uses(uses: Uses, begin: int, end: int) -> None:
    """Begin anew to count the uses of granules begin..end-1."""
    uses[begin:end] = 0


@compiled(types.boolean(USES, types.int64, types.int64))
def halve_uses(uses: Uses, begin: int, end: int) -> bool:
    """Halve the uses of granules begin..end-1; whether any are left."""
    left = False
    for granule in range(begin, end):
        uses[granule] >>= np.uint32(1)
        left |= uses[granule] > 0
    return left


@compiled(types.void(USES, ROW_NUMBERS, types.int64, types.int64, types.int64))
def touch_blocks(uses: Uses, firsts: Rows, granules: int, begin: int, end: int) -> None:
    """Count a use of granules begin..end-1 of some blocks; those that are not counted have -1 in `firsts`."""
    for granule in range(begin, end):
        first = firsts[granule // granules]
        if first >= 0 and uses[first + granule % granules] != _SATURATED:
            uses[first + granule % granules] += np.uint32(1)


@compiled(types.void(USES, types.int64, types.int64))
def touch(uses: Uses, begin: int, end: int) -> None:
    """Count a use of granules begin..end-1."""
    for granule in range(begin, end):
        if uses[granule] != _SATURATED:
            uses[granule] += np.uint32(1)
