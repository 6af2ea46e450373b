"""Growth of the page table by linear hashing (W. Litwin, 1980): one bucket is split at a time.

No insertion pays for a rehash, memory follows the number of keys, and a lookup never sees two tables. A split halves
one bucket, so that the split ones are emptier than the others until all are; two choices of bucket even that out.

The table does not shrink. Its buckets are an eighth of what a block takes, and the rest, rows of the block table that
others know by their numbers, could not shrink with it; a cache is full most of its life, and the entries of a bucket to
be merged may find no place, which would leave a shrinking table stuck at it.
"""

from __future__ import annotations

import numpy as np

from kvtierd.index.displace import LINE_SHIFT, hash_entries, hash_row, move, place
from kvtierd.index.intrinsics import load_u16, load_u64, lowest_bit
from kvtierd.index.jit import Word, helper, subroutine
from kvtierd.index.layout import (
    BUCKETS,
    BUCKETS_AT,
    BUCKETS_MAX,
    COUNT,
    ENTRIES_AT,
    GREW_AT_BUCKETS,
    GREW_AT_COUNT,
    GROWING,
    MASK,
    SLOTS,
    SPLITS,
    STASH_AT,
    STASHED,
    Words,
    buckets_of,
    free_slots,
    namespace_of,
    row_of,
    set_slot,
)

U64 = np.uint64

LOAD_OF = 20
LOAD_FULL = 19
"""Growth begins when 19 of 20 slots are taken..."""
LOAD_EASY = 17
"""...and goes on until fewer than 17 of 20 are: growing all the time at the brim took three times as long a key."""
LOAD_AT_CAPACITY = 18
"""A table for as many blocks as its block table holds ends at 18 of 20: it lives there, with deletions as frequent as
insertions, and an insertion costs half of one at 95%."""
SPLITS_TO_GROW = 2
"""Buckets split with each key inserted while the table grows."""


@subroutine
def drain_stash(table: Words, records: Words) -> None:
    """Give entries of the stash a place in their buckets where one has become free."""
    stash = U64(STASH_AT)
    for index in range(SLOTS):
        slot = U64(index)
        tag = load_u16(table, stash + (slot << U64(1)))
        if tag == 0:
            continue
        row = row_of(table, stash, slot)
        hashed, namespace = hash_row(table, records, row), namespace_of(records, row)
        first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
        if place(table, first, hashed, namespace, row) or place(table, second, hashed, namespace, row):
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
    source = U64(BUCKETS_AT) + ((buckets - mask - U64(1)) << LINE_SHIFT)
    target = U64(BUCKETS_AT) + (buckets << LINE_SHIFT)
    hash_entries(table, records, source)
    taken = ~free_slots(table, source) & U64(0xFF)
    while taken:
        slot = U64(lowest_bit(taken))
        taken &= taken - U64(1)
        hashed = load_u64(table, U64(ENTRIES_AT) + (slot << U64(3)))
        first, second = buckets_of(hashed, buckets + U64(1), mask)
        if source not in (first, second):
            move(table, source, slot, target, slot)
    if table[0, STASHED]:
        drain_stash(table, records)


@helper
def _over(table: Words, share: int) -> bool:
    """Whether `share` of LOAD_OF slots are taken."""
    return bool(table[0, COUNT] * U64(LOAD_OF) >= table[0, BUCKETS] * U64(SLOTS * share))


@subroutine
def split_some(table: Words, records: Words, wanted: Word) -> Word:
    """Split up to `wanted` buckets; returns how many before the table has its full size."""
    room = np.int64(table[0, BUCKETS_MAX] - table[0, BUCKETS])
    count = min(wanted, room)
    for _ in range(count):
        _split(table, records)
    return count


@helper
def grow(table: Words, records: Words) -> None:
    """Do one key's share of the growth that is due."""
    if table[0, GROWING] == U64(0) and _over(table, LOAD_FULL):
        table[0, GROWING] = U64(1)
        table[3, GREW_AT_COUNT], table[3, GREW_AT_BUCKETS] = table[0, COUNT], table[0, BUCKETS]
    if table[0, GROWING]:
        split = split_some(table, records, SPLITS_TO_GROW)
        if split < SPLITS_TO_GROW or not _over(table, LOAD_EASY):
            table[0, GROWING] = U64(0)
