"""Insertion, deletion and growth of the page table; each operation does a bounded amount of work.

Two choices of bucket of eight slots each, with displacement along the shortest path found breadth first, fill such a
table beyond 95% (D. G. Andersen et al., "Algorithmic improvements for fast concurrent cuckoo hashing", 2014). The table
grows by linear hashing: one bucket is split for about every eight keys inserted, so that no insertion pays for a
rehash, memory follows the number of keys, and a lookup never sees two tables.
"""

from __future__ import annotations

import numpy as np
from numba import types

from kvtierd.index.intrinsics import count_bits, load_u16, load_u64, lowest_bit, match_lanes, prefetch, store_u64
from kvtierd.index.jit import Word, compiled, helper, subroutine
from kvtierd.index.layout import (
    BUCKETS,
    BUCKETS_AT,
    BUCKETS_MAX,
    CHUNK,
    COUNT,
    DISPLACED,
    ENTRIES_AT,
    GROWING,
    HASHES_AT,
    MASK,
    NAMESPACES,
    NODES_AT,
    NODES_MAX,
    REFUSED,
    ROW_NUMBERS,
    SEARCHED_MAX,
    SLOTS,
    SPLITS,
    STASH_AT,
    STASHED,
    WORDS,
    Rows,
    Words,
    buckets_of,
    free_slots,
    hash_key,
    namespace_of,
    row_of,
    set_slot,
    tag_of,
)
from kvtierd.index.probe import find

U64 = np.uint64

INSERTED, NO_PLACE = -1, -2
"""Outcomes of an insertion; any other is the row that already holds the key."""

LOAD_OF = 20
LOAD_FULL = 19
"""Growth begins when more than 19 of 20 slots are taken..."""
LOAD_EASY = 17
"""...and goes on until 17 of 20 are: constant growth at the brim would displace three times as many entries."""
LOAD_AT_CAPACITY = 18
"""A table for as many blocks as its block table holds ends at 18 of 20: it lives there, with deletions as frequent as
insertions, and an insertion costs half of one at 95%."""
SPLITS_TO_GROW = 2
"""Buckets split with each key inserted while the table grows."""
SPLITS_MAX = 4
"""Most buckets split for one key, when it finds no place otherwise."""

ROOTS = 2
"""The first nodes of a search: the two buckets that the key may lie in."""
# A node of the breadth-first search: bucket offset / 64 in bits 0..31, slot of its parent in 32..39, parent in 40...
_PARENT_SLOT, _PARENT, _LOW32, _LOW8 = U64(32), U64(40), U64(0xFFFFFFFF), U64(0xFF)
_LINE_SHIFT = U64(6)


@helper
def _hash_row(table: Words, records: Words, row: Word) -> Word:
    return hash_key(table, records, U64(row) << _LINE_SHIFT, namespace_of(records, row))


@helper
def _place(table: Words, at: Word, hashed: Word, namespace: Word, row: Word) -> bool:
    free = free_slots(table, at)
    if free == U64(0):
        return False
    set_slot(table, at, U64(lowest_bit(free)), tag_of(hashed), namespace, row)
    return True


@helper
def _move(table: Words, source: Word, slot: Word, target: Word, target_slot: Word) -> None:
    tag = U64(load_u16(table, source + (slot << U64(1))))
    namespace = U64(load_u16(table, source + U64(NAMESPACES) + (slot << U64(1))))
    set_slot(table, target, target_slot, tag, namespace, row_of(table, source, slot))
    set_slot(table, source, slot, U64(0), U64(0), np.int32(0))


@helper
def _hash_entries(table: Words, records: Words, at: Word) -> None:
    """Hash the keys of a bucket's entries, from their records: eight cache misses at once, then eight vector lanes.

    An empty slot has row 0 and gets some hash.
    """
    for slot in range(SLOTS):
        prefetch(records, np.int64(row_of(table, at, U64(slot))) << 6)
    for slot in range(SLOTS):
        store_u64(table, ENTRIES_AT + (slot << 3), _hash_row(table, records, row_of(table, at, U64(slot))))


@helper
def _find_targets(table: Words, records: Words, at: Word) -> None:
    """Note the other bucket that each entry of a full one may lie in (the same if both are one), and prefetch it."""
    _hash_entries(table, records, at)
    for slot in range(SLOTS):
        hashed = load_u64(table, ENTRIES_AT + (slot << 3))
        first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
        target = second if first == at else first
        prefetch(table, target)
        store_u64(table, ENTRIES_AT + (slot << 3), target)


@subroutine
def _shift_path(table: Words, node: Word, slot: Word, target: Word) -> None:
    """Move entries along the path that ends with `slot` of `node` moving to `target`, so that a root has a free slot.

    A shortest path meets no bucket twice, so that no move disturbs another.
    """
    free = U64(lowest_bit(free_slots(table, target)))
    while True:
        entry = load_u64(table, NODES_AT + (node << 3))
        at = (entry & _LOW32) << _LINE_SHIFT
        _move(table, at, slot, target, free)
        table[1, DISPLACED] += U64(1)
        if node < ROOTS:
            return
        target, free = at, slot
        slot, node = (entry >> _PARENT_SLOT) & _LOW8, np.int64(entry >> _PARENT)


@subroutine
def _displace(table: Words, records: Words, first: Word, second: Word) -> bool:
    """Free a slot in one of two full buckets; False when no way is found among NODES_MAX buckets."""
    store_u64(table, NODES_AT, first >> _LINE_SHIFT)
    store_u64(table, NODES_AT + 8, second >> _LINE_SHIFT)
    nodes, current = np.int64(ROOTS), np.int64(0)
    while current < nodes:
        at = (load_u64(table, NODES_AT + (current << 3)) & _LOW32) << _LINE_SHIFT
        _find_targets(table, records, at)
        for slot in range(SLOTS):
            target = load_u64(table, ENTRIES_AT + (slot << 3))
            if target == at:
                continue
            if free_slots(table, target):
                _shift_path(table, current, U64(slot), target)
                table[1, SEARCHED_MAX] = max(table[1, SEARCHED_MAX], U64(current) + U64(1))
                return True
            if nodes < NODES_MAX:
                node = (target >> _LINE_SHIFT) | (U64(slot) << _PARENT_SLOT) | (U64(current) << _PARENT)
                store_u64(table, NODES_AT + (nodes << 3), node)
                nodes += 1
        current += 1
    table[1, SEARCHED_MAX] = max(table[1, SEARCHED_MAX], U64(current))
    return False


@subroutine
def _drain_stash(table: Words, records: Words) -> None:
    """Give entries of the stash a place in their buckets where one has become free."""
    stash = U64(STASH_AT)
    for index in range(SLOTS):
        slot = U64(index)
        tag = load_u16(table, stash + (slot << U64(1)))
        if tag == 0:
            continue
        row = row_of(table, stash, slot)
        hashed, namespace = _hash_row(table, records, row), namespace_of(records, row)
        first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
        if _place(table, first, hashed, namespace, row) or _place(table, second, hashed, namespace, row):
            set_slot(table, stash, slot, U64(0), U64(0), np.int32(0))
            table[0, STASHED] -= U64(1)


@subroutine
def _split(table: Words, records: Words) -> None:
    """Add one bucket, and move into it the entries of its sibling that belong there."""
    buckets, mask = table[0, BUCKETS], table[0, MASK]
    if buckets == mask + mask + U64(2):
        mask = buckets - U64(1)
        table[0, MASK] = mask
    table[0, BUCKETS] = buckets + U64(1)
    table[1, SPLITS] += U64(1)
    source = U64(BUCKETS_AT) + ((buckets - mask - U64(1)) << _LINE_SHIFT)
    target = U64(BUCKETS_AT) + (buckets << _LINE_SHIFT)
    _hash_entries(table, records, source)
    taken = ~free_slots(table, source) & U64(0xFF)
    while taken:
        slot = U64(lowest_bit(taken))
        taken &= taken - U64(1)
        hashed = load_u64(table, U64(ENTRIES_AT) + (slot << U64(3)))
        first, second = buckets_of(hashed, buckets + U64(1), mask)
        if source not in (first, second):
            _move(table, source, slot, target, slot)
    if table[0, STASHED]:
        _drain_stash(table, records)


@helper
def _over(table: Words, share: int) -> bool:
    """Whether more than `share` of LOAD_OF slots would be taken with one more entry."""
    return bool((table[0, COUNT] + U64(1)) * U64(LOAD_OF) > table[0, BUCKETS] * U64(SLOTS * share))


@subroutine
def _split_some(table: Words, records: Words, wanted: Word) -> Word:
    """Split up to `wanted` buckets; returns how many before the table has its full size."""
    room = np.int64(table[0, BUCKETS_MAX] - table[0, BUCKETS])
    count = min(wanted, room)
    for _ in range(count):
        _split(table, records)
    return count


@helper
def _grow(table: Words, records: Words) -> None:
    """Do one key's share of the growth that is due."""
    if _over(table, LOAD_FULL):
        table[0, GROWING] = U64(1)
    if table[0, GROWING]:
        split = _split_some(table, records, SPLITS_TO_GROW)
        if split < SPLITS_TO_GROW or not _over(table, LOAD_EASY):
            table[0, GROWING] = U64(0)


@helper
def _settle(table: Words, records: Words, hashed: Word, namespace: Word, row: Word) -> bool:
    """Put an entry into one of its buckets, displacing others where both are full."""
    first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
    if not (free_slots(table, first) | free_slots(table, second)) and not _displace(table, records, first, second):
        return False
    # The emptier bucket, which leaves fewer buckets full and halves the displacements at 95% load.
    if count_bits(free_slots(table, second)) > count_bits(free_slots(table, first)):
        first = second
    return bool(_place(table, first, hashed, namespace, row))


@subroutine
def _insert_one(table: Words, records: Words, hashed: Word, row: Word) -> Word:
    namespace = namespace_of(records, row)
    known = find(table, records, records, U64(row) << _LINE_SHIFT, hashed, namespace)
    if known >= 0:
        return np.int32(known)
    _grow(table, records)
    settled = _settle(table, records, hashed, namespace, row)
    if not settled and table[0, STASHED] == U64(SLOTS):
        # Splits may relieve the stash or the buckets; bounded, because they cannot tell equal hashes apart.
        _split_some(table, records, SPLITS_MAX)
        settled = _settle(table, records, hashed, namespace, row)
    if not settled and _place(table, U64(STASH_AT), hashed, namespace, row):
        table[0, STASHED] += U64(1)
        settled = True
    if not settled:
        table[1, REFUSED] += U64(1)
        return np.int32(NO_PLACE)
    table[0, COUNT] += U64(1)
    return np.int32(INSERTED)


@helper
def _start_chunk(table: Words, records: Words, rows: Rows, begin: Word, end: Word) -> None:
    """Hash the keys of some rows and prefetch their buckets."""
    for i in range(begin, end):
        prefetch(records, np.int64(rows[i]) << 6)
    for i in range(begin, end):
        hashed = _hash_row(table, records, rows[i])
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
        _start_chunk(table, records, rows, begin, end)
        for i in range(begin, end):
            hashed = load_u64(table, HASHES_AT + ((i - begin) << 3))
            out[i] = _insert_one(table, records, hashed, rows[i])
    return True


@helper
def _clear(table: Words, at: Word, tag: Word, row: Word) -> bool:
    found = match_lanes(table, at, tag)
    while found:
        slot = U64(lowest_bit(found))
        if row_of(table, at, slot) == row:
            set_slot(table, at, slot, U64(0), U64(0), np.int32(0))
            return True
        found &= found - U64(1)
    return False


@subroutine
def _delete_one(table: Words, hashed: Word, row: Word) -> bool:
    tag = tag_of(hashed)
    first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
    if _clear(table, first, tag, row) or _clear(table, second, tag, row):
        return True
    if not _clear(table, U64(STASH_AT), tag, row):
        return False
    table[0, STASHED] -= U64(1)
    return True


@compiled(types.int64(WORDS, WORDS, ROW_NUMBERS))
def delete(table: Words, records: Words, rows: Rows) -> int:
    """Take rows out, whose records still hold their keys; returns how many were in, or -1, and nothing done, when a
    row number is outside the block table."""
    if not _within(records, rows):
        return -1
    deleted = 0
    for begin in range(0, rows.size, CHUNK):
        end = min(begin + CHUNK, rows.size)
        _start_chunk(table, records, rows, begin, end)
        for i in range(begin, end):
            deleted += int(_delete_one(table, load_u64(table, HASHES_AT + ((i - begin) << 3)), rows[i]))
    table[0, COUNT] -= U64(deleted)
    if table[0, STASHED] and deleted:
        _drain_stash(table, records)
    return deleted
