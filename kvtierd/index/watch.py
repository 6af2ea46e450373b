"""Which positions of which sequences a block key stands at, so that an inserted or deleted block finds them.

A watched position is a 64-byte record: its key, its sequence and its place there. Records are found by key through a
page table of their own; those with the same key (sequences that share a prefix) are linked, and the table holds the
first of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.displace import LINE_SHIFT, hash_row
from kvtierd.index.growth import drain_stash
from kvtierd.index.intrinsics import load_i32, load_u64, prefetch, store_i32
from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.layout import (
    CHUNK,
    COUNT,
    HASHES_AT,
    KEYS,
    LINE_BYTES,
    RECORD_BYTES,
    ROW_NUMBERS,
    STASHED,
    WORDS,
    Keys,
    Rows,
    Words,
    key_equals,
    namespace_of,
)
from kvtierd.index.memory import reserve
from kvtierd.index.page_table import PageTable
from kvtierd.index.probe import find
from kvtierd.index.update import delete_one, replace_one, start_chunk

U64 = np.uint64

RECORD = np.dtype(
    {
        "names": ["key", "sequence", "position", "next", "previous", "namespace"],
        "formats": [("u1", 32), "i4", "i4", "i4", "i4", "u2"],
        "offsets": [0, 32, 36, 40, 44, 52],
        "itemsize": RECORD_BYTES,
    }
)
_SEQUENCE_AT, _POSITION_AT, _NEXT_AT, _PREVIOUS_AT = 32, 36, 40, 44
_NONE = -1
_PAIR = _POSITIONS = types.int64[::1]
Positions = npt.NDArray[np.int64]
MATCHES_MAX = 1024
"""Positions that `matches` answers at a time."""


@helper
def _get(records: Words, number: Word, at: int) -> Word:
    return load_i32(records, (np.int64(number) << 6) + at)


@helper
def _set(records: Words, number: Word, at: int, value: Word) -> None:
    store_i32(records, (np.int64(number) << 6) + at, value)


@compiled(types.void(WORDS, ROW_NUMBERS, ROW_NUMBERS))
def _link(records: Words, numbers: Rows, heads: Rows) -> None:
    """Put each record behind the head of its key; those with head -1 are heads themselves."""
    for index in range(numbers.size):
        number, head = numbers[index], heads[index]
        behind = _NONE if head < 0 else _get(records, head, _NEXT_AT)
        _set(records, number, _NEXT_AT, behind)
        _set(records, number, _PREVIOUS_AT, max(head, _NONE))
        if head >= 0:
            _set(records, head, _NEXT_AT, number)
        if behind >= 0:
            _set(records, behind, _PREVIOUS_AT, number)


@compiled(types.void(WORDS, WORDS, ROW_NUMBERS))
def _unlink(table: Words, records: Words, numbers: Rows) -> None:
    """Take records out of their lists; a head is followed in the table by the next one, or by nothing."""
    for number in numbers:
        prefetch(records, np.int64(number) << 6)
    gone = np.int64(0)
    for number in numbers:
        behind, before = _get(records, number, _NEXT_AT), _get(records, number, _PREVIOUS_AT)
        if behind >= 0:
            _set(records, behind, _PREVIOUS_AT, before)
        if before >= 0:
            _set(records, before, _NEXT_AT, behind)
        elif behind >= 0:
            replace_one(table, hash_row(table, records, number), number, behind)
        else:
            gone += np.int64(delete_one(table, hash_row(table, records, number), number))
    table[0, COUNT] -= U64(gone)
    if table[0, STASHED] and gone:
        drain_stash(table, records)


@compiled(types.void(WORDS, WORDS, WORDS, ROW_NUMBERS, ROW_NUMBERS))
def _heads(table: Words, records: Words, others: Words, rows: Rows, out: Rows) -> None:
    """Find the keys of some rows of other records."""
    for begin in range(0, rows.size, CHUNK):
        end = min(begin + CHUNK, rows.size)
        start_chunk(table, others, rows, begin, end)
        for i in range(begin, end):
            hashed = load_u64(table, HASHES_AT + ((i - begin) << 3))
            out[i] = find(table, records, others, U64(rows[i]) << LINE_SHIFT, hashed, namespace_of(others, rows[i]))


@compiled(types.int64(WORDS, ROW_NUMBERS, KEYS))
def _matching(records: Words, numbers: Rows, keys: Keys) -> int:
    """How many leading keys are those of these records."""
    for index in range(numbers.size):
        if not key_equals(records, U64(numbers[index]), keys, U64(index) << U64(5)):
            return index
    return int(numbers.size)


@compiled(types.int64(KEYS, KEYS))
def matching_keys(ours: Keys, theirs: Keys) -> int:
    """How many leading keys are the same, of as many as the shorter one has; both contiguous, [n, 32]."""
    count = min(ours.shape[0], theirs.shape[0])
    for index in range(count):
        at = U64(index) << U64(5)
        for word in range(4):
            if load_u64(ours, at + U64(8 * word)) != load_u64(theirs, at + U64(8 * word)):
                return index
    return int(count)


@compiled(types.int64(WORDS, ROW_NUMBERS, ROW_NUMBERS, _PAIR, ROW_NUMBERS, _POSITIONS, ROW_NUMBERS))
def _expand(
    records: Words, rows: Rows, heads: Rows, cursor: Positions, who: Rows, where: Positions, what: Rows
) -> Word:
    """Write out the lists behind `heads` (of `rows`): sequence, position and row of each record; returns how many.

    `cursor` is the head to go on at and the record to go on with (-1: the head), for the rest when there is no room.
    """
    found, index, number = 0, cursor[0], cursor[1]
    while index < heads.size:
        if number < 0:
            number = np.int64(heads[index])
        while number >= 0 and found < who.size:
            who[found], where[found] = _get(records, number, _SEQUENCE_AT), _get(records, number, _POSITION_AT)
            what[found] = rows[index]
            found += 1
            number = np.int64(_get(records, number, _NEXT_AT))
        if number >= 0:
            break
        index += 1
    cursor[0], cursor[1] = index, number
    return found


class Watch:
    """Watched positions of sequences, up to `capacity` of them; numbers are [n] int32 of their records.

    Memory is 64 bytes a position, its share of the table's buckets (some 9) and 4 on the list of free ones, taken as
    they are first used.
    """

    def __init__(self, capacity: int, secret: bytes | None = None) -> None:
        self.capacity = capacity
        self.records: Words = reserve((capacity, RECORD_BYTES // 8), np.uint64, huge=False)
        fields = self.records.view(RECORD)[:, 0]
        self._key: Keys = fields["key"]
        self._namespace: npt.NDArray[np.uint16] = fields["namespace"]
        self._sequence: Rows = fields["sequence"]
        self._position: Rows = fields["position"]
        self._pages = PageTable(self, secret)
        self._freed: Rows = reserve((capacity,), np.int32)
        self._fresh = self._free_count = 0

    def __len__(self) -> int:
        """Positions watched."""
        return self._fresh - self._free_count

    def add(self, keys: Keys, namespace: int, sequence: int, position: int) -> Rows:
        """Watch `keys` ([n, 32]), which stand at `position` and behind it: numbers of the records.

        Fewer than all of them, the first ones, when the watch is full or a key finds no place.
        """
        numbers = self._take(len(keys))
        self._key[numbers], self._namespace[numbers] = keys[: numbers.size], namespace
        self._sequence[numbers] = sequence
        self._position[numbers] = np.arange(position, position + numbers.size, dtype=np.int32)
        heads = self._pages.insert(numbers)
        _link(self.records, numbers, heads)
        refused = heads < _NONE
        if np.count_nonzero(refused):
            first = int(refused.argmax())
            behind = numbers[first:]
            _unlink(self._pages.words, self.records, behind[~refused[first:]])
            self._give(behind)
            return numbers[:first]
        return numbers

    def remove(self, numbers: Rows) -> None:
        """Watch these positions no more."""
        _unlink(self._pages.words, self.records, numbers)
        self._give(numbers)

    def keys(self, numbers: Rows) -> Keys:
        """Keys of watched positions, a copy of shape [n, 32]."""
        return self._key[numbers]

    def matching(self, numbers: Rows, keys: Keys) -> int:
        """How many leading ones of `keys` ([n, 32], contiguous) are those of these positions, in order."""
        return _matching(self.records, numbers, keys[: numbers.size])

    def matches(self, records: Words, rows: Rows) -> Iterator[tuple[Rows, Positions, Rows]]:
        """Where the keys of some rows ([n]) of another table's records are watched: sequences, positions and rows, some
        at a time."""
        heads = np.empty(rows.size, np.int32)
        _heads(self._pages.words, self.records, records, rows, heads)
        cursor = np.array([0, _NONE], np.int64)
        while cursor[0] < rows.size:
            who, what = np.empty(MATCHES_MAX, np.int32), np.empty(MATCHES_MAX, np.int32)
            where = np.empty(MATCHES_MAX, np.int64)
            found = _expand(self.records, rows, heads, cursor, who, where, what)
            if found:
                yield who[:found], where[:found], what[:found]

    def bytes_per_position(self) -> float:
        """RAM of a watched position."""
        return RECORD_BYTES + self._freed.itemsize + self._pages.bytes_per_block()

    def _take(self, count: int) -> Rows:
        again = min(count, self._free_count)
        fresh = min(count - again, self.capacity - self._fresh)
        self._free_count -= again
        known = self._freed[self._free_count : self._free_count + again][::-1]
        self._fresh += fresh
        return np.concatenate([known, np.arange(self._fresh - fresh, self._fresh, dtype=np.int32)])

    def _give(self, numbers: Rows) -> None:
        self._freed[self._free_count : self._free_count + numbers.size] = numbers[::-1]
        self._free_count += numbers.size


assert RECORD.itemsize == RECORD_BYTES == LINE_BYTES == 1 << int(LINE_SHIFT)
