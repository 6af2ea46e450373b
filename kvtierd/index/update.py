"""Insertion into the page table and deletion, in batches; each key is a bounded amount of work."""

from __future__ import annotations

import numpy as np
from numba import types

from kvtierd.index.displace import LINE_SHIFT, displace, hash_row, place
from kvtierd.index.growth import drain_stash, grow, split_some
from kvtierd.index.intrinsics import (
    count_bits,
    load_u64,
    lowest_bit,
    match_lanes,
    prefetch,
    store_i32,
    store_u64,
)
from kvtierd.index.jit import Word, compiled, helper, subroutine
from kvtierd.index.layout import (
    BUCKETS,
    CHUNK,
    COUNT,
    HASHES_AT,
    MASK,
    REFUSED,
    ROW_NUMBERS,
    ROWS,
    SLOTS,
    STASH_AT,
    STASHED,
    WORDS,
    Rows,
    Words,
    buckets_of,
    free_slots,
    namespace_of,
    row_of,
    set_slot,
    tag_of,
)
from kvtierd.index.probe import find

U64 = np.uint64

INSERTED, NO_PLACE = -1, -2
"""Outcomes of an insertion; any other is the row that already holds the key."""

SPLITS_MAX = 4
"""Most buckets split for one key, beside the growth that is due, when it finds no place otherwise."""


@subroutine
def _settle(table: Words, records: Words, hashed: Word, namespace: Word, row: Word) -> bool:
    """Put an entry into one of its buckets, displacing others where both are full."""
    first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
    if not (free_slots(table, first) | free_slots(table, second)) and not displace(table, records, first, second):
        return False
    # The emptier one, so that buckets that were split fill before others overflow.
    if count_bits(free_slots(table, second)) > count_bits(free_slots(table, first)):
        first = second
    return bool(place(table, first, hashed, namespace, row))


@subroutine
def _insert_one(table: Words, records: Words, hashed: Word, row: Word) -> Word:
    namespace = namespace_of(records, row)
    known = find(table, records, records, U64(row) << LINE_SHIFT, hashed, namespace)
    if known >= 0:
        return np.int32(known)
    grow(table, records)
    settled = _settle(table, records, hashed, namespace, row)
    if not settled and table[0, STASHED] == U64(SLOTS):
        # Splits may relieve the stash or the buckets; bounded, because they cannot tell equal hashes apart.
        split_some(table, records, SPLITS_MAX)
        settled = _settle(table, records, hashed, namespace, row)
    if not settled and place(table, U64(STASH_AT), hashed, namespace, row):
        table[0, STASHED] += U64(1)
        settled = True
    if not settled:
        table[1, REFUSED] += U64(1)
        return np.int32(NO_PLACE)
    table[0, COUNT] += U64(1)
    return np.int32(INSERTED)


@subroutine
def start_chunk(table: Words, records: Words, rows: Rows, begin: Word, end: Word) -> None:
    """Hash the keys of some rows and prefetch their buckets."""
    for i in range(begin, end):
        prefetch(records, np.int64(rows[i]) << 6)
    for i in range(begin, end):
        hashed = hash_row(table, records, rows[i])
        store_u64(table, HASHES_AT + ((i - begin) << 3), hashed)
        first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
        prefetch(table, first)
        prefetch(table, second)


@helper
def _within(records: Words, rows: Rows) -> bool:
    lowest, highest = np.int32(0), np.int32(-1)
    for row in rows:
        lowest, highest = min(lowest, row), max(highest, row)
    return bool(lowest == 0 and highest < records.shape[0])


@compiled(types.boolean(WORDS, WORDS, ROW_NUMBERS, ROW_NUMBERS))
def insert(table: Words, records: Words, rows: Rows, out: Rows) -> bool:
    """Insert rows, with `out[i]` INSERTED, NO_PLACE or the row that has the key; False, and nothing done, when a row
    number is outside the block table."""
    if not _within(records, rows):
        return False
    for begin in range(0, rows.size, CHUNK):
        end = min(begin + CHUNK, rows.size)
        start_chunk(table, records, rows, begin, end)
        for i in range(begin, end):
            hashed = load_u64(table, HASHES_AT + ((i - begin) << 3))
            out[i] = _insert_one(table, records, hashed, rows[i])
    return True


@helper
def _slot_of(table: Words, at: Word, tag: Word, row: Word) -> Word:
    """Slot of a row in a bucket, SLOTS where it is not there."""
    found = match_lanes(table, at, tag)
    while found:
        slot = U64(lowest_bit(found))
        if row_of(table, at, slot) == row:
            return slot
        found &= found - U64(1)
    return U64(SLOTS)


@subroutine
def _locate(table: Words, hashed: Word, row: Word) -> tuple[Word, Word]:
    """Bucket and slot of a row; the slot is SLOTS where it is not in the table."""
    tag = tag_of(hashed)
    first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
    for bucket in (first, second):
        slot = _slot_of(table, bucket, tag, row)
        if slot < U64(SLOTS):
            return bucket, slot
    return U64(STASH_AT), _slot_of(table, U64(STASH_AT), tag, row)


@subroutine
def delete_one(table: Words, hashed: Word, row: Word) -> bool:
    """Take a row out; False where it was not in. The caller counts."""
    bucket, slot = _locate(table, hashed, row)
    if slot == U64(SLOTS):
        return False
    set_slot(table, bucket, slot, U64(0), U64(0), np.int32(0))
    if bucket == U64(STASH_AT):
        table[0, STASHED] -= U64(1)
    return True


@subroutine
def replace_one(table: Words, hashed: Word, row: Word, successor: Word) -> None:
    """Let another row with the same key and namespace have the place of one that is in."""
    bucket, slot = _locate(table, hashed, row)
    store_i32(table, bucket + U64(ROWS) + (slot << U64(2)), successor)


@compiled(types.int64(WORDS, WORDS, ROW_NUMBERS))
def delete(table: Words, records: Words, rows: Rows) -> int:
    """Take rows out, whose records still hold their keys; returns how many were in, or -1, and nothing done, when a
    row number is outside the block table."""
    if not _within(records, rows):
        return -1
    deleted = 0
    for begin in range(0, rows.size, CHUNK):
        end = min(begin + CHUNK, rows.size)
        start_chunk(table, records, rows, begin, end)
        for i in range(begin, end):
            deleted += int(delete_one(table, load_u64(table, HASHES_AT + ((i - begin) << 3)), rows[i]))
    table[0, COUNT] -= U64(deleted)
    if table[0, STASHED] and deleted:
        drain_stash(table, records)
    return deleted
