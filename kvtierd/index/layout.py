"""Where everything lies in the page table's memory and in a record of the block table, and the small steps on it.

The page table is one array of 64-byte lines ([lines, 8] uint64), so that a compiled function gets all of its state as
one argument (each costs a call about 50 ns):

    line 0      secret, number of buckets, counts       (read by every lookup)
    line 1      counters for the metrics
    line 2      the stash: one more bucket, for entries that found no place
    line 3      how full the table was when growth last began
    lines 4..   scratch of the running call: hashes, candidates, nodes of a search, entries of a bucket
    the rest    buckets

A bucket is one cache line: eight tags (uint16; 0 is an empty slot), eight namespace numbers (uint16) and
eight rows (int32). Tags share the line with what a match needs next, so that a probe costs one cache miss, not two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.intrinsics import load_i32, load_u64, match_lanes, store_i32, store_u16
from kvtierd.index.jit import Word, helper
from kvtierd.index.siphash import siphash

LINE_BYTES = 64
SLOTS = 8
"""Entries of a bucket."""

# Words of line 0.
K0, K1, BUCKETS, MASK, COUNT, STASHED, BUCKETS_MAX, GROWING = range(8)
# Words of line 1.
LOOKUPS, TOUCHED, TOUCHED_MAX, STASH_PROBES, DISPLACED, SPLITS, REFUSED, SEARCHED_MAX = range(8)

# Words of line 3.
GREW_AT_COUNT, GREW_AT_BUCKETS = range(2)

STASH_AT = 2 * LINE_BYTES
CHUNK = 64
"""Keys that one phase of a lookup handles: enough to keep every miss buffer of a core busy, few enough for L1."""
HASHES_AT = 4 * LINE_BYTES
ROWS_AT = HASHES_AT + 2 * CHUNK * 8
NODES_AT = ROWS_AT + 2 * CHUNK * 8
NODES_MAX = 256
"""Buckets that a search for a free slot may look at."""
ENTRIES_AT = NODES_AT + NODES_MAX * 8
HEADER_LINES = ENTRIES_AT // LINE_BYTES + 1
BUCKETS_AT = HEADER_LINES * LINE_BYTES

NAMESPACES = 16
"""Offset of the namespace numbers in a bucket."""
ROWS = 32
"""Offset of the rows in a bucket."""

RECORD_BYTES = 64
NAMESPACE_WORD = 6
"""Word of a record whose upper half begins with its namespace number."""

WORDS = types.uint64[:, ::1]
"""Numba's type of the page table and of the records."""
KEYS = types.Array(types.uint8, 2, "C", readonly=True)
ROW_NUMBERS = types.int32[::1]
Words = npt.NDArray[np.uint64]
Keys = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int32]

U64 = np.uint64
_ONE, _TAG_SHIFT, _TAG_LOW, _TAG_HIGH, _HALF, _LINE_SHIFT = U64(1), U64(24), U64(0xFF), U64(48), U64(32), U64(6)
_BASE = U64(BUCKETS_AT)
_U16 = U64(0xFFFF)


@helper
def tag_of(hashed: Word) -> Word:
    """Bits 24..31 and 56..63 of the hash: bucket numbers take bits 0..23 and 32..55. Never 0, which means empty."""
    tag = ((hashed >> _TAG_SHIFT) & _TAG_LOW) | ((hashed >> _TAG_HIGH) & (_TAG_LOW << U64(8)))
    return tag | U64(tag == U64(0))


@helper
def bucket_at(choice: Word, buckets: Word, mask: Word) -> Word:
    """Offset of the bucket for one half of a hash, by linear hashing (W. Litwin, 1980).

    `mask + 1` is the largest power of two within `buckets`: those beyond it exist only up to `buckets`.
    """
    wide = choice & (mask + mask + _ONE)
    index = wide if wide < buckets else wide & mask
    return _BASE + (index << _LINE_SHIFT)


@helper
def buckets_of(hashed: Word, buckets: Word, mask: Word) -> tuple[Word, Word]:
    """Offsets of both buckets of a hash; they may be the same one."""
    return bucket_at(hashed, buckets, mask), bucket_at(hashed >> _HALF, buckets, mask)


@helper
def matches(table: Words, at: Word, tag: Word, namespace: Word) -> Word:
    """Bit mask of the slots with this tag and namespace."""
    return match_lanes(table, at, tag) & match_lanes(table, at + U64(NAMESPACES), namespace)


@helper
def free_slots(table: Words, at: Word) -> Word:
    """Bit mask of the empty slots."""
    return match_lanes(table, at, U64(0))


@helper
def row_of(table: Words, at: Word, slot: Word) -> Word:
    """Row of the block in a slot."""
    return load_i32(table, at + U64(ROWS) + (slot << U64(2)))


@helper
def set_slot(table: Words, at: Word, slot: Word, tag: Word, namespace: Word, row: Word) -> None:
    """Write an entry; tag 0 empties the slot."""
    store_u16(table, at + (slot << _ONE), tag)
    store_u16(table, at + U64(NAMESPACES) + (slot << _ONE), namespace)
    store_i32(table, at + U64(ROWS) + (slot << U64(2)), row)


@helper
def key_equals(records: Words, row: Word, keys: npt.NDArray[Any], at: Word) -> Word:
    """Compare the whole 32-byte key of a record with the one at offset `at` of `keys`."""
    record = U64(row) << _LINE_SHIFT
    return (
        (load_u64(records, record) ^ load_u64(keys, at))
        | (load_u64(records, record + U64(8)) ^ load_u64(keys, at + U64(8)))
        | (load_u64(records, record + U64(16)) ^ load_u64(keys, at + U64(16)))
        | (load_u64(records, record + U64(24)) ^ load_u64(keys, at + U64(24)))
    ) == U64(0)


@helper
def hash_key(table: Words, keys: npt.NDArray[Any], at: Word, namespace: Word) -> Word:
    """Hash the key at offset `at` with the table's secret."""
    return siphash(
        table[0, K0],
        table[0, K1],
        load_u64(keys, at),
        load_u64(keys, at + U64(8)),
        load_u64(keys, at + U64(16)),
        load_u64(keys, at + U64(24)),
        namespace,
    )


@helper
def namespace_of(records: Words, row: Word) -> Word:
    """Namespace number of a block."""
    return (records[row, NAMESPACE_WORD] >> _HALF) & _U16
