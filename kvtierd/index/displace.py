"""Entries of the page table's buckets: placing them, moving them, and finding room by displacing others.

Two choices of bucket of eight slots each, with displacement along the shortest path found breadth first, fill such a
table beyond 95%. Source: X. Li, D. Andersen, M. Kaminsky, M. Freedman, "Algorithmic improvements for fast concurrent
cuckoo hashing", 2014.
"""

from __future__ import annotations

import numpy as np

from kvtierd.index.intrinsics import load_u16, load_u64, lowest_bit, prefetch, store_u64
from kvtierd.index.jit import Word, helper, subroutine
from kvtierd.index.layout import (
    BUCKETS,
    DISPLACED,
    ENTRIES_AT,
    MASK,
    NAMESPACES,
    NODES_AT,
    NODES_MAX,
    SEARCHED_MAX,
    SLOTS,
    Words,
    buckets_of,
    free_slots,
    hash_key,
    namespace_of,
    row_of,
    set_slot,
    tag_of,
)

U64 = np.uint64
LINE_SHIFT = U64(6)

ROOTS = 2
"""The first nodes of a search: the two buckets that the key may lie in."""
# A node of the breadth-first search: bucket offset / 64 in bits 0..31, slot of its parent in 32..39, parent in 40...
_PARENT_SLOT, _PARENT, _LOW32, _LOW8 = U64(32), U64(40), U64(0xFFFFFFFF), U64(0xFF)


@helper
def hash_row(table: Words, records: Words, row: Word) -> Word:
    """Hash the key and namespace in a record."""
    return hash_key(table, records, U64(row) << LINE_SHIFT, namespace_of(records, row))


@helper
def place(table: Words, at: Word, hashed: Word, namespace: Word, row: Word) -> bool:
    """Write an entry into an empty slot of a bucket; False where there is none."""
    free = free_slots(table, at)
    if free == U64(0):
        return False
    set_slot(table, at, U64(lowest_bit(free)), tag_of(hashed), namespace, row)
    return True


@helper
def move(table: Words, source: Word, slot: Word, target: Word, target_slot: Word) -> None:
    """Move an entry to an empty slot of another bucket."""
    tag = U64(load_u16(table, source + (slot << U64(1))))
    namespace = U64(load_u16(table, source + U64(NAMESPACES) + (slot << U64(1))))
    set_slot(table, target, target_slot, tag, namespace, row_of(table, source, slot))
    set_slot(table, source, slot, U64(0), U64(0), np.int32(0))


@helper
def hash_entries(table: Words, records: Words, at: Word) -> None:
    """Hash the keys of a bucket's entries, from their records: eight cache misses at once, then eight vector lanes.

    An empty slot has row 0 and gets some hash.
    """
    for slot in range(SLOTS):
        prefetch(records, np.int64(row_of(table, at, U64(slot))) << 6)
    for slot in range(SLOTS):
        store_u64(table, ENTRIES_AT + (slot << 3), hash_row(table, records, row_of(table, at, U64(slot))))


@helper
def _find_targets(table: Words, records: Words, at: Word) -> None:
    """Note the other bucket that each entry of a full one may lie in (the same if both are one), and prefetch it."""
    hash_entries(table, records, at)
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
        at = (entry & _LOW32) << LINE_SHIFT
        move(table, at, slot, target, free)
        table[1, DISPLACED] += U64(1)
        if node < ROOTS:
            return
        target, free = at, slot
        slot, node = (entry >> _PARENT_SLOT) & _LOW8, np.int64(entry >> _PARENT)


@subroutine
def displace(table: Words, records: Words, first: Word, second: Word) -> bool:
    """Free a slot in one of two full buckets; False when no way is found among NODES_MAX buckets."""
    store_u64(table, NODES_AT, first >> LINE_SHIFT)
    store_u64(table, NODES_AT + 8, second >> LINE_SHIFT)
    nodes, current = np.int64(ROOTS), np.int64(0)
    while current < nodes:
        at = (load_u64(table, NODES_AT + (current << 3)) & _LOW32) << LINE_SHIFT
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
                node = (target >> LINE_SHIFT) | (U64(slot) << _PARENT_SLOT) | (U64(current) << _PARENT)
                store_u64(table, NODES_AT + (nodes << 3), node)
                nodes += 1
        current += 1
    table[1, SEARCHED_MAX] = max(table[1, SEARCHED_MAX], U64(current))
    return False
