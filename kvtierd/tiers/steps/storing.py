"""Reserve and Commit, one compiled function each, for the cases that `writes.py` does not have to go through itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.block_table import alloc_rows, free_rows
from kvtierd.index.board import BOARD, Words64, number_of
from kvtierd.index.intrinsics import load_u64
from kvtierd.index.jit import Word, compiled, helper, subroutine
from kvtierd.index.layout import KEYS, ROW_NUMBERS, Keys, Rows
from kvtierd.index.probe import lookup
from kvtierd.index.update import insert
from kvtierd.policy.key_filter import see
from kvtierd.protocol.messages import SLOT_BUSY, SLOT_EXISTS, SLOT_GRANTED, TIER_HOST
from kvtierd.tiers.blocks import VISIBLE, WRITING
from kvtierd.tiers.slot_tier import MAX_SCAN
from kvtierd.tiers.steps import places as at
from kvtierd.tiers.steps.evicting import evict, take_free
from kvtierd.tiers.steps.parts import (
    describe,
    heat_up,
    observe_request,
    sum_row,
    tell_ghosts,
    tell_policy,
    words_of_keys,
    words_of_rows,
)
from kvtierd.tiers.steps.reading import BYTES, Bytes, row_of, slot_of_row
from kvtierd.tiers.steps.records import FLAGS, HOST_SLOT, NAMESPACE, NEXT_ROW, STATUS_AT

NEEDS_SLAB, LEFT_ALONE = -1, -2
"""Answers of `reserve` that changed nothing: a spare slab would give it its slots; the block table has no rows."""

NEW, NO_ROW, RETURNED, SHORT = range(4, 8)
"""Words of what `reserve` tells, behind those of eviction: new rows, keys that got none, rows whose blocks had left the
tier lately, and slots missing."""
TOLD_WORDS = 16
_REMEMBER = False


@subroutine
def _add_rows(board: Word, keys: Word, namespace: Word, chain: Word, rows: Word, position: Word) -> Word:
    """Make rows for the keys whose `chain` is -1: how many. A key named twice, or without a place, gets none."""
    pages, records = at.pages_of(board, at.PAGES), at.records_of(board, at.RECORDS)
    words, octets = at.words_of(board, at.WORDS), at.octets_of(board, at.OCTETS)
    freed, counts = at.column_i32(board, at.FREED), at.column_i64(board, at.COUNTS)
    pins, wanted = at.column_u16(board, at.PINS), 0
    for index in range(chain.size):
        if chain[index] < 0:
            position[wanted] = index
            wanted += 1
    alloc_rows(words, freed, counts, rows[:wanted])
    for index in range(wanted):
        row = rows[index]
        pins[row] = 0
        for word in range(4):
            records[row, word] = load_u64(keys, (position[index] << 5) + word * 8)
        words[row, NAMESPACE] = namespace
        octets[row, FLAGS] = WRITING
    outcome, kept = np.empty(wanted, np.int32), 0
    insert(pages, records, rows[:wanted], outcome)
    refused = np.empty(1, np.int32)
    for index in range(wanted):
        if outcome[index] == -1:
            chain[position[index]] = rows[index]
            rows[kept], position[kept] = rows[index], position[index]
            kept += 1
            continue
        chain[position[index]] = max(outcome[index], np.int32(-1))
        refused[0] = rows[index]
        octets[rows[index], FLAGS] = 0
        free_rows(words, freed, counts, refused)
    return kept


@helper
def _link(board: Word, parent: Word, chain: Word) -> None:
    """Remember that these rows follow each other; -1 stands for a block that is not there."""
    words, before = at.words_of(board, at.WORDS), parent
    for index in range(chain.size):
        if before >= 0 and chain[index] >= 0:
            words[before, NEXT_ROW] = chain[index]
        before = chain[index]


@helper
def _slots_there(board: Word, chain: Word, position: Word, used: Word) -> Word:
    """Slots of those blocks of a store that are there, -1 for others; how many leading ones are."""
    words, hits = at.words_of(board, at.WORDS), 0
    for index in range(chain.size):
        used[index] = words[chain[index], HOST_SLOT] if chain[index] >= 0 else np.int32(-1)
    for index in range(position.size):
        used[position[index]] = -1
    while hits < used.size and used[hits] >= 0:
        hits += 1
    return hits


@helper
def _hold(board: Word, slots: Word, before: Word, more: Word) -> None:
    """Holds of slots, and of the one `before` them, -1 for none, that begin or end together: none can go in between."""
    holds = at.column_i32(board, at.HOLDS)
    if before >= 0:
        holds[before] += more
    for slot in slots:
        if slot >= 0:
            holds[slot] += more


@helper
def _lately_evicted(board: Word, cls: Word, rows: Word) -> Word:
    """How many of these blocks left the tier lately."""
    secret, ids = np.uint64(number_of(cls, at.EVICTED_SECRET)), words_of_rows(at.records_of(board, at.RECORDS), rows)
    return see(at.cells_of(cls, at.EVICTED), secret, ids, _REMEMBER, np.empty(rows.size, np.bool_))


@subroutine
def _begin_descriptors(board: Word, chain: Word, position: Word, ids: Word, descriptors: Word) -> Word:
    """Say of every block that it exists, or that nothing is granted to it; how many have no row. Fills `ids`, too."""
    records, without = at.records_of(board, at.RECORDS), 0
    descriptors[:] = 0
    for index in range(chain.size):
        if chain[index] < 0:
            without += 1
            descriptors[index, STATUS_AT], ids[index] = SLOT_BUSY, np.uint64(0)
        else:
            descriptors[index, STATUS_AT], ids[index] = SLOT_EXISTS, records[chain[index], 0]
    for index in range(position.size):
        descriptors[position[index], STATUS_AT] = SLOT_BUSY
    return without


@compiled(
    types.int64(
        BOARD, BOARD, KEYS, KEYS, types.int64, types.int64, types.int64, types.boolean, types.int64, types.int64[::1],
        types.uint16[::1], types.uint8[::1], types.uint32, types.uint32, types.uint32, ROW_NUMBERS, ROW_NUMBERS,
        types.int64[::1], ROW_NUMBERS, types.uint64[::1], types.uint8[:, ::1], BYTES, types.int64[::1],
    )
)  # fmt: skip
def reserve(
    board: Words64, cls: Words64, keys: Keys, parent: Keys, namespace: int, free: int, spare: int, observed: bool,
    began: int, story: Words64, kinds: npt.NDArray[np.uint16], paces: Bytes, was: int, now: int, now_ms: int,
    rows: Rows, slots: Rows, position: Words64, chain: Rows, ids: npt.NDArray[np.uint64], descriptors: Bytes,
    keys_out: Bytes, told: Words64,
) -> int:  # fmt: skip
    """Rows and slots for those of `keys` ([n, 32]) that are not there: how many got both, or why nothing was done.

    `free` is how many slots of the class are free, `spare` how many slabs are nobody's. Where `observed`, the request
    is told to the model (began, story, kinds and paces as in kvtierd.policy.history.observe); else kinds and paces are
    known. `was` is the tick of the request before, `now` that of this one. Filled in are `rows`, `slots` and
    `position` of the new blocks, `chain` and `ids` of all, `descriptors` ([n, 24]), `keys_out` (see `evict`), `told`.
    """
    counts = at.column_i64(board, at.COUNTS)
    records = at.records_of(board, at.RECORDS)
    if counts[0] - counts[1] + keys.shape[0] > records.shape[0]:
        return LEFT_ALONE
    lookup(at.pages_of(board, at.PAGES), records, keys, namespace, chain)
    absent = 0
    for index in range(chain.size):
        absent += int(chain[index] < 0)
    if absent > free and spare > 0:
        return NEEDS_SLAB
    told[:] = 0
    new = _add_rows(board, keys, namespace, chain, rows, position)
    told[NEW] = new
    above = row_of(board, parent, namespace)
    _link(board, above, chain)
    before = slot_of_row(board, above)
    told[RETURNED] = _lately_evicted(board, cls, rows[:new])
    used = np.empty(chain.size, np.int32)
    hits = _slots_there(board, chain, position[:new], used)
    # What is there of the request, and the block that it goes on from, may not go to make its room.
    _hold(board, used, before, 1)
    if new > free:
        free += evict(board, cls, new - free, MAX_SCAN, was, now_ms, keys_out, told)
    _hold(board, used, before, -1)
    granted = min(new, free)
    told[SHORT] = new - granted
    take_free(board, cls, slots[:granted])
    told[NO_ROW] = _begin_descriptors(board, chain, position[:new], ids, descriptors)
    for index in range(granted):
        used[position[index]] = slots[index]
    if observed:
        observe_request(board, words_of_keys(keys), hits if began < 0 else 0, began, story, kinds, paces, now)
    if chain.size:
        tell_policy(board, cls, used, kinds, paces, before, now)
    nowhere = np.zeros(granted, np.uint8)
    describe(board, cls, slots[:granted], position[:granted], np.uint8(SLOT_GRANTED), nowhere, descriptors)
    return int(granted)


@compiled(
    types.int64(
        BOARD, BOARD, ROW_NUMBERS, ROW_NUMBERS, types.Array(types.uint64, 2, "C", readonly=True),
        types.Array(types.uint64, 1, "C", readonly=True), types.uint32, types.float64,
    )
)  # fmt: skip
def commit(
    board: Words64, cls: Words64, rows: Rows, slots: Rows, sums: npt.NDArray[np.uint64],
    totals: npt.NDArray[np.uint64], now_s: int, half_life_s: float,
) -> int:  # fmt: skip
    """Reserved blocks become visible, with their layer sums ([n, layers]) and block sums: n, or -1, and nothing done.

    It is for blocks that the policy knows and that are nowhere else. Their holds as reserved ones end.
    """
    words, octets = at.words_of(board, at.WORDS), at.octets_of(board, at.OCTETS)
    leaves, row_of_slot = at.leaves_of(board, at.LEAVES), at.column_i32(board, at.ROW)
    holds, run_sums = at.column_i32(board, at.HOLDS), at.column_i32(board, at.RUN_SUMS)
    for index in range(rows.size):
        if octets[rows[index], FLAGS] != WRITING or leaves[slots[index]].kind == 0:
            return -1
    kept, layers = at.column_u64(cls, at.SUMS), number_of(cls, at.LAYERS)
    shift, mask = number_of(board, at.SHIFT), number_of(board, at.MASK)
    block_sums = at.column_u64(board, at.BLOCK_SUMS)
    for index in range(rows.size):
        row, slot = rows[index], slots[index]
        begin = sum_row(run_sums, shift, mask, slot) * layers
        for layer in range(layers):
            kept[begin + layer] = sums[index, layer]
        block_sums[row] = totals[index]
        words[row, HOST_SLOT] = slot
        row_of_slot[slot] = row
        octets[row, FLAGS] = VISIBLE | TIER_HOST
        holds[slot] -= 1
    heat_up(board, rows, now_s, half_life_s)
    tell_ghosts(board, words_of_rows(at.records_of(board, at.RECORDS), rows), number_of(cls, at.SLOT_BYTES) >> 12)
    return int(rows.size)
