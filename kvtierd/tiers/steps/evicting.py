"""Making room in host: victims of one class lose their slots, and blocks that are nowhere else are forgotten."""

from __future__ import annotations

import numpy as np

from kvtierd.core.keys import KEY_BYTES
from kvtierd.gpu.slot_pool import NO_SLOT, ORPHAN
from kvtierd.index.bitmap import choose, write
from kvtierd.index.block_table import free_rows
from kvtierd.index.board import number_of
from kvtierd.index.intrinsics import store_u64
from kvtierd.index.jit import Word, helper, subroutine
from kvtierd.index.update import delete
from kvtierd.policy.key_filter import see
from kvtierd.policy.leaves import name_victims, remove_slots
from kvtierd.protocol.messages import TIER_HOST
from kvtierd.tiers.blocks import GONE, PREFETCHED, RESIDENT, VISIBLE
from kvtierd.tiers.steps import places as at
from kvtierd.tiers.steps.parts import next_generation, words_of_rows
from kvtierd.tiers.steps.records import FLAGS, HOST_SLOT, MARKS, MOVES

_SET, _CLEAR, _REMEMBER = True, False, True

VICTIMS, LOST, WASTED, FORGOTTEN = range(4)
"""Words of what eviction tells: slots emptied, blocks that had no other copy, blocks fetched ahead for nothing, and
blocks that are forgotten."""


@subroutine
def take_free(board: Word, cls: Word, slots: Word) -> None:
    """Take free slots of a class, of which there are enough: each comes with one hold, and nobody's."""
    row, holds = at.column_i32(board, at.ROW), at.column_i32(board, at.HOLDS)
    words, nodes = at.column_u64(cls, at.FREE_WORDS), at.nodes_of(cls, at.FREE_NODES)
    levels = at.column_i64(cls, at.FREE_LEVELS)
    taken = np.empty(slots.size, np.int64)
    choose(words, nodes, levels, taken)
    write(words, nodes, levels, taken, number_of(cls, at.FREE_MAX), _CLEAR)
    for index in range(slots.size):
        slots[index] = taken[index]
        row[taken[index]], holds[taken[index]] = ORPHAN, 1


@helper
def _leave_host(board: Word, victims: Word, rows: Word, now_ms: Word, bare: Word, told: Word) -> Word:
    """Blocks lose their copy in host; those that have none anywhere go to `bare`, how many."""
    words, octets = at.words_of(board, at.WORDS), at.octets_of(board, at.OCTETS)
    left_ms, found = at.column_u32(board, at.LEFT_MS), 0
    for index in range(victims.size):
        row = rows[index]
        left_ms[row] = now_ms
        told[LOST] += int(octets[row, FLAGS] & RESIDENT == TIER_HOST)
        told[WASTED] += int(octets[row, MARKS] & PREFETCHED != 0)
        octets[row, MARKS] &= np.uint8(0xFF - PREFETCHED)
        words[row, HOST_SLOT] = NO_SLOT
        octets[row, FLAGS] &= np.uint8(0xFF - TIER_HOST)
        if octets[row, FLAGS] & (RESIDENT | GONE) == 0:
            bare[found] = row
            found += 1
    return found


@helper
def _forget(board: Word, rows: Word, keys_out: Word) -> None:
    """Take blocks out of the page table, and free the rows that no move names."""
    octets, records = at.octets_of(board, at.OCTETS), at.records_of(board, at.RECORDS)
    if keys_out.size:
        for index in range(rows.size):
            for word in range(4):
                store_u64(keys_out, index * KEY_BYTES + word * 8, records[rows[index], word])
    delete(at.pages_of(board, at.PAGES), records, rows)
    idle, found = np.empty(rows.size, np.int32), 0
    moves = at.moves_of(board, at.WORDS)
    for row in rows:
        octets[row, FLAGS] = (octets[row, FLAGS] | np.uint8(GONE)) & np.uint8(0xFF - VISIBLE)
        if moves[row, MOVES] == 0:
            octets[row, FLAGS] = 0
            idle[found] = row
            found += 1
    free_rows(
        at.words_of(board, at.WORDS), at.column_i32(board, at.FREED), at.column_i64(board, at.COUNTS), idle[:found]
    )


@subroutine
def evict(
    board: Word, cls: Word, count: Word, scan_max: Word, now: Word, now_ms: Word, keys_out: Word, told: Word
) -> Word:
    """Free up to `count` slots of a class, those that the policy names; how many.

    No victim of an earlier search may be on offer. `keys_out` ([at least count * 32] bytes, or none) gets the keys of
    blocks that are forgotten.
    """
    leaves, ends = at.leaves_of(board, at.LEAVES), at.ends_of(board, at.ENDS)
    marks, cursors = at.marks_of(board, at.MARKS), at.cursors_of(board, at.CURSORS)
    levels, number = at.levels_of(board, at.LEVELS), number_of(cls, at.CLASS)
    victims = np.empty(count, np.int32)
    holds, row_of_slot = at.column_i32(board, at.HOLDS), at.column_i32(board, at.ROW)
    found = name_victims(leaves, ends, marks, cursors, levels, number, now, holds, scan_max, victims)
    if found == 0:
        return 0
    victims = victims[:found]
    rows, freed = np.empty(found, np.int32), np.empty(found, np.int64)
    for index in range(found):
        rows[index] = row_of_slot[victims[index]]
        freed[index] = victims[index]
    ids = words_of_rows(at.records_of(board, at.RECORDS), rows)
    secret = np.uint64(number_of(cls, at.EVICTED_SECRET))
    see(at.cells_of(cls, at.EVICTED), secret, ids, _REMEMBER, np.empty(found, np.bool_))
    bare = np.empty(found, np.int32)
    forgotten = _leave_host(board, victims, rows, now_ms, bare, told)
    remove_slots(leaves, ends, marks, cursors, levels, number, now, victims)
    for slot in victims:
        next_generation(board, slot)
        row_of_slot[slot] = NO_SLOT
    write(
        at.column_u64(cls, at.FREE_WORDS), at.nodes_of(cls, at.FREE_NODES), at.column_i64(cls, at.FREE_LEVELS), freed,
        number_of(cls, at.FREE_MAX), _SET,
    )  # fmt: skip
    if forgotten:
        _forget(board, bare[:forgotten], keys_out)
    told[VICTIMS], told[FORGOTTEN] = found, forgotten
    return found
