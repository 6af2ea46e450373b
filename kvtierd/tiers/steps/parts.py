"""What the steps have in common: ids of keys, where a slot lies, and word to policies that blocks are used."""

from __future__ import annotations

import numpy as np

from kvtierd.index.board import number_of, u64_at
from kvtierd.index.intrinsics import load_u64, store_i32, store_u64
from kvtierd.index.jit import Word, helper, subroutine
from kvtierd.policy.ghosts import access
from kvtierd.policy.heat import decayed, heated
from kvtierd.policy.history import observe
from kvtierd.policy.leaves import use_slots
from kvtierd.policy.rates import fit_if_due
from kvtierd.tiers.steps import places as at
from kvtierd.tiers.steps.records import (
    DESCRIPTOR_BYTES,
    GENERATION_AT,
    LAST_ACCESS,
    NAMESPACE,
    OFFSET_AT,
    SOURCE_AT,
    STATUS_AT,
)

_CHAINED = True


@helper
def words_of_keys(keys: Word) -> Word:
    """The first eight bytes of each key, [n] uint64: what policies know a block by."""
    words = np.empty(keys.shape[0], np.uint64)
    for index in range(keys.shape[0]):
        words[index] = load_u64(keys, index << 5)
    return words


@helper
def words_of_rows(records: Word, rows: Word) -> Word:
    """The same of the keys in rows of the block table."""
    words = np.empty(rows.size, np.uint64)
    for index in range(rows.size):
        words[index] = records[rows[index], 0]
    return words


@subroutine
def describe(board: Word, cls: Word, slots: Word, where: Word, status: Word, sources: Word, out: Word) -> None:
    """Write the descriptors of slots into out[where[i]]; `out` is [n, DESCRIPTOR_BYTES] uint8."""
    run_slab, run_first = at.column_i32(board, at.RUN_SLAB), at.column_i32(board, at.RUN_FIRST)
    numbers, generation = at.column_u32(board, at.NUMBERS), at.column_u64(board, at.GENERATION)
    shift, mask = number_of(board, at.SHIFT), number_of(board, at.MASK)
    slot_bytes = number_of(cls, at.SLOT_BYTES)
    for index in range(slots.size):
        slot, begin = np.int64(slots[index]), where[index] * DESCRIPTOR_BYTES
        run = slot >> shift
        store_i32(out, begin, np.int32(numbers[run_slab[run]]))
        store_i32(out, begin + STATUS_AT, np.int32(0))
        out[where[index], STATUS_AT], out[where[index], SOURCE_AT] = status, sources[index]
        store_u64(out, begin + OFFSET_AT, np.uint64((run_first[run] + (slot & mask)) * slot_bytes))
        store_u64(out, begin + GENERATION_AT, generation[slot])


@helper
def sum_row(run_sums: Word, shift: Word, mask: Word, slot: Word) -> Word:
    """Row of a slot in its class's sums."""
    return np.int64(run_sums[np.int64(slot) >> shift]) + (np.int64(slot) & mask)


@subroutine
def next_generation(board: Word, slot: Word) -> None:
    """A slot is about to change hands: late readers see another generation in what they have mapped."""
    generation = at.column_u64(board, at.GENERATION)
    shift, mask = number_of(board, at.SHIFT), number_of(board, at.MASK)
    run = np.int64(slot) >> shift
    generation[slot] += np.uint64(1)
    slab = at.column_i32(board, at.RUN_SLAB)[run]
    index = np.int64(at.column_i32(board, at.RUN_FIRST)[run]) + (np.int64(slot) & mask)
    u64_at(at.column_i64(board, at.SHARED)[slab], index + 1)[index] = generation[slot]


@subroutine
def observe_request(
    board: Word, words: Word, hits: Word, began: Word, story: Word, kinds: Word, paces: Word, now: Word
) -> None:
    """Tell the model of a request (see kvtierd.policy.history.observe), and have it fitted when that is due."""
    ring, state = at.ring_of(board, at.RING), at.column_i64(board, at.STORY_STATE)
    returned, unreturned = at.ages_of(board, at.RETURNED), at.ages_of(board, at.UNRETURNED)
    observe(
        at.column_i32(board, at.HEADS), ring, returned, unreturned, state, words, now, hits, began, story, kinds, paces
    )
    fit_if_due(
        ring, returned, unreturned, state, at.column_i32(board, at.PARENTS), at.widths_of(board, at.WIDTHS),
        at.scratch_of(board, at.SCRATCH), at.levels_of(board, at.LEVELS), now,
    )  # fmt: skip


@subroutine
def tell_policy(board: Word, cls: Word, used: Word, kinds: Word, paces: Word, before: Word, now: Word) -> None:
    """Tell the eviction policy that a request uses the blocks in these slots, -1 for none."""
    use_slots(
        at.leaves_of(board, at.LEAVES), at.ends_of(board, at.ENDS), at.marks_of(board, at.MARKS),
        at.cursors_of(board, at.CURSORS), at.levels_of(board, at.LEVELS), number_of(cls, at.CLASS), now, used,
        kinds[: used.size], paces[: used.size], before, _CHAINED,
    )  # fmt: skip


@subroutine
def heat_up(board: Word, rows: Word, now_s: Word, half_life_s: Word) -> None:
    """One use more of the blocks in these rows (see kvtierd.policy.heat)."""
    words = at.words_of(board, at.WORDS)
    for index in range(rows.size):
        row = rows[index]
        packed = np.uint32(words[row, NAMESPACE])
        units = decayed(np.int64(packed >> np.uint32(16)), np.uint32(words[row, LAST_ACCESS]), now_s, half_life_s)
        packed = (packed & np.uint32(0xFFFF)) | (np.uint32(heated(units)) << np.uint32(16))
        words[row, NAMESPACE] = np.int32(packed)
        words[row, LAST_ACCESS] = np.int32(np.uint32(now_s))


@subroutine
def tell_ghosts(board: Word, ids: Word, units: Word) -> None:
    """Tell the ghosts of every tier that these blocks are used."""
    for number in range(number_of(board, at.GHOSTS)):
        first = at.GHOSTS_AT + number * at.GHOST_PLACES
        access(
            at.column_i64(board, first + at.GHOST_STATE), at.column_u64(board, first + at.GHOST_KEYS),
            at.column_i64(board, first + at.GHOST_UNITS), at.column_i64(board, first + at.GHOST_TIMES),
            at.column_i32(board, first + at.GHOST_LINKS), at.column_i64(board, first + at.GHOST_TREE), ids, units,
            at.column_f64(board, first + at.GHOST_SIZES), at.column_f64(board, first + at.GHOST_HITS),
        )  # fmt: skip
