"""Lookups in the page table, in phases over chunks of keys, so that cache misses overlap.

The next chunk is hashed and its buckets are prefetched before the present one is looked at; then the tags are
compared and the records of candidates prefetched; then whole keys are compared. One key after the other would wait for
two or three misses in a row each time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.intrinsics import load_i32, load_u64, lowest_bit, prefetch, store_i32, store_u64
from kvtierd.index.jit import Word, compiled, helper, subroutine
from kvtierd.index.layout import (
    BUCKETS,
    CHUNK,
    HASHES_AT,
    KEYS,
    LOOKUPS,
    MASK,
    ROW_NUMBERS,
    ROWS_AT,
    STASH_AT,
    STASH_PROBES,
    STASHED,
    TOUCHED,
    TOUCHED_MAX,
    WORDS,
    Keys,
    Rows,
    Words,
    buckets_of,
    hash_key,
    key_equals,
    matches,
    row_of,
    tag_of,
)

U64 = np.uint64
AHEAD = 16
"""Keys that `prefix` looks at together: what it does beyond the first miss is bounded by twice this."""


@subroutine
def find(table: Words, records: Words, keys: npt.NDArray[Any], at: Word, hashed: Word, namespace: Word) -> Word:
    """Row of the key at offset `at` of `keys`, or -1; compares every entry whose tag and namespace match in full."""
    tag = tag_of(hashed)
    first, second = buckets_of(hashed, table[0, BUCKETS], table[0, MASK])
    for bucket in (first, second, U64(STASH_AT)):
        found = matches(table, bucket, tag, namespace)
        while found:
            row = row_of(table, bucket, U64(lowest_bit(found)))
            if key_equals(records, row, keys, at):
                return row
            found &= found - U64(1)
    return np.int32(-1)


@subroutine
def _start(table: Words, keys: Keys, begin: Word, end: Word, place: Word, namespace: Word) -> None:
    """Hash keys begin..end-1 into the scratch from `place` on, and prefetch their buckets."""
    buckets, mask = table[0, BUCKETS], table[0, MASK]
    for i in range(begin, end):  # Nothing else in this loop, so that it runs in vector lanes.
        hashed = hash_key(table, keys, U64(i) << U64(5), namespace)
        store_u64(table, HASHES_AT + ((place + i - begin) << 3), hashed)
    for i in range(end - begin):
        first, second = buckets_of(load_u64(table, HASHES_AT + ((place + i) << 3)), buckets, mask)
        prefetch(table, first)
        prefetch(table, second)


@subroutine
def _choose(table: Words, records: Words, count: Word, place: Word, namespace: Word) -> Word:
    """Note the first entry that matches by tag and namespace, and prefetch its record; returns how many keys have two
    different buckets.

    Both are always read: waiting to see whether the first is enough would cost more than the line.
    """
    buckets, mask = table[0, BUCKETS], table[0, MASK]
    two = np.int64(0)
    for i in range(count):
        hashed = load_u64(table, HASHES_AT + ((place + i) << 3))
        first, second = buckets_of(hashed, buckets, mask)
        two += np.int64(first != second)
        tag = tag_of(hashed)
        found = matches(table, first, tag, namespace) | (matches(table, second, tag, namespace) << U64(8))
        row = np.int32(-1)
        if found:
            slot = U64(lowest_bit(found))
            row = row_of(table, first if slot < U64(8) else second, slot & U64(7))
            prefetch(records, np.int64(row) << 6)
        store_i32(table, ROWS_AT + ((place + i) << 2), row)
    return two


@helper
def _verify(table: Words, records: Words, keys: Keys, begin: Word, i: Word, place: Word, namespace: Word) -> Word:
    """Row of key i after comparing the whole key; entries beyond the first that matched are rare, as is the stash."""
    row = load_i32(table, ROWS_AT + ((place + i - begin) << 2))
    at = U64(i) << U64(5)
    if row >= 0 and key_equals(records, row, keys, at):
        return row
    if row < 0 and table[0, STASHED] == U64(0):
        return np.int32(-1)
    table[1, STASH_PROBES] += U64(1)
    return find(table, records, keys, at, load_u64(table, HASHES_AT + ((place + i - begin) << 3)), namespace)


@helper
def _count(table: Words, lookups: Word, two: Word) -> None:
    """Add to the counters: `two` of the lookups touched two buckets, the others one."""
    table[1, LOOKUPS] += U64(lookups)
    table[1, TOUCHED] += U64(lookups + two)
    table[1, TOUCHED_MAX] = max(table[1, TOUCHED_MAX], U64(min(lookups, 1) + min(two, 1)))


@compiled(types.void(WORDS, WORDS, KEYS, types.int64, ROW_NUMBERS))
def lookup(table: Words, records: Words, keys: Keys, number: int, out: Rows) -> None:
    """Fill `out` with the rows of `keys` in namespace `number`, -1 where there is none."""
    namespace, count, two = U64(number), keys.shape[0], np.int64(0)
    _start(table, keys, 0, min(count, CHUNK), 0, namespace)
    for begin in range(0, count, CHUNK):
        end, place = min(begin + CHUNK, count), begin & CHUNK
        _start(table, keys, end, min(end + CHUNK, count), place ^ CHUNK, namespace)
        two += _choose(table, records, end - begin, place, namespace)
        for i in range(begin, end):
            out[i] = _verify(table, records, keys, begin, i, place, namespace)
    _count(table, count, two)


@compiled(types.int64(WORDS, WORDS, KEYS, types.int64, ROW_NUMBERS))
def prefix(table: Words, records: Words, keys: Keys, number: int, out: Rows) -> Word:
    """Fill `out` with the rows of the leading keys that are present and return their number."""
    namespace, count, looked, two = U64(number), keys.shape[0], np.int64(0), np.int64(0)
    hit, missed = np.int64(0), False
    _start(table, keys, 0, min(count, AHEAD), 0, namespace)
    while hit < count and not missed:
        begin, end, place = hit, min(hit + AHEAD, count), hit & AHEAD
        _start(table, keys, end, min(end + AHEAD, count), place ^ AHEAD, namespace)
        two += _choose(table, records, end - begin, place, namespace)
        looked = end
        while hit < end and not missed:
            row = _verify(table, records, keys, begin, hit, place, namespace)
            missed = row < 0
            if not missed:
                out[hit] = row
                hit += 1
    _count(table, looked, two)
    return hit
