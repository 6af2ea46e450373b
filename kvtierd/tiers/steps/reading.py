"""Lookup and Acquire of what lies in host: one compiled function each, from the keys to what goes over the wire.

They do what `reads.py` does step by step for the cases that they leave to it, and a test compares the two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index import probe
from kvtierd.index.board import BOARD, Words64, number_of
from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.layout import KEYS, ROW_NUMBERS, Keys, Rows
from kvtierd.protocol.messages import TIER_HOST, TIER_NVME
from kvtierd.tiers.blocks import PREFETCHED, RESIDENT, RETURNED, VISIBLE
from kvtierd.tiers.steps import places as at
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
from kvtierd.tiers.steps.records import FLAGS, HOST_SLOT, MARKS, NAMESPACE, NEXT_ROW

FOUND, AHEAD_USED, AHEAD_LATE, NOT_ON_NVME, NEXT = range(5)
"""Words of what `acquire` tells: blocks found, of those fetched ahead how many were there in time and how many not,
blocks without a copy on nvme, and whether a block behind them, in the window, is not in host."""

Bytes = npt.NDArray[np.uint8]
BYTES = types.uint8[::1]


@helper
def visible_prefix(board: Word, keys: Word, namespace: Word, rows: Word) -> Word:
    """Rows of the leading run of visible blocks; how many."""
    octets = at.octets_of(board, at.OCTETS)
    hit = probe.prefix(at.pages_of(board, at.PAGES), at.records_of(board, at.RECORDS), keys, namespace, rows)
    for index in range(hit):
        if octets[rows[index], FLAGS] & VISIBLE == 0:
            return index
    return hit


@helper
def row_of(board: Word, key: Word, namespace: Word) -> Word:
    """Row of one key, visible or not, or -1; `key` is [0 or 1, 32]."""
    if key.shape[0] == 0:
        return np.int32(-1)
    found = np.empty(1, np.int32)
    probe.lookup(at.pages_of(board, at.PAGES), at.records_of(board, at.RECORDS), key, namespace, found)
    return found[0]


@helper
def slot_of_row(board: Word, row: Word) -> Word:
    """Host slot of a visible block, or -1."""
    if row < 0 or at.octets_of(board, at.OCTETS)[row, FLAGS] & VISIBLE == 0:
        return np.int32(-1)
    return at.words_of(board, at.WORDS)[row, HOST_SLOT]


@helper
def slot_of(board: Word, key: Word, namespace: Word) -> Word:
    """Host slot of the block with one key, or -1; `key` is [0 or 1, 32]."""
    return slot_of_row(board, row_of(board, key, namespace))


@compiled(types.int64(BOARD, KEYS, types.int64, BYTES))
def lookup(board: Words64, keys: Keys, namespace: int, masks: Bytes) -> int:
    """Fill `masks` [n] with where the blocks of the leading run are; how many they are."""
    octets = at.octets_of(board, at.OCTETS)
    rows = np.empty(keys.shape[0], np.int32)
    hit = visible_prefix(board, keys, namespace, rows)
    for index in range(hit):
        masks[index] = octets[rows[index], FLAGS] & RESIDENT
    return int(hit)


@helper
def _missing_behind(board: Word, row: Word, namespace: Word, window: Word) -> Word:
    """Whether one of the next blocks of the sequence is not in host: then it is worth fetching ahead."""
    words, octets = at.words_of(board, at.WORDS), at.octets_of(board, at.OCTETS)
    for _ in range(window):
        row = words[row, NEXT_ROW]
        if row < 0 or (words[row, NAMESPACE] & 0xFFFF) != namespace or octets[row, FLAGS] & VISIBLE == 0:
            return False
        if octets[row, FLAGS] & TIER_HOST == 0:
            return True
    return False


@helper
def _mark_read(board: Word, rows: Word, sources: Word, told: Word) -> None:
    octets = at.octets_of(board, at.OCTETS)
    for index in range(rows.size):
        marks = octets[rows[index], MARKS]
        if marks & PREFETCHED:
            told[AHEAD_USED if sources[index] & TIER_HOST else AHEAD_LATE] += 1
        octets[rows[index], MARKS] = (marks | RETURNED) & np.uint8(0xFF - PREFETCHED)
        told[NOT_ON_NVME] += int(sources[index] & TIER_NVME == 0)


@compiled(
    types.int64(
        BOARD, BOARD, KEYS, KEYS, types.int64, types.int64, types.uint32, types.uint32, types.float64,
        types.uint16[::1], types.uint8[::1], types.int64[::1], ROW_NUMBERS, ROW_NUMBERS, types.uint8[:, ::1],
        types.uint64[:, ::1], types.int64[::1],
    )
)  # fmt: skip
def acquire(
    board: Words64, cls: Words64, keys: Keys, parent: Keys, namespace: int, window: int, now: int, now_s: int,
    half_life_s: float, kinds: npt.NDArray[np.uint16], paces: Bytes, story: npt.NDArray[np.int64], rows: Rows,
    slots: Rows, descriptors: Bytes, sums: npt.NDArray[np.uint64], told: Words64,
) -> int:  # fmt: skip
    """Hold the leading run of `keys` ([n, 32]) where all of it is in host: how many blocks, or -1, and nothing done.

    `parent` is the key before the first, [1, 32], or none, [0, 32]. Filled in are `kinds`, `paces` and `story`, as
    `observe` does; rows, slots, descriptors ([n, 24]) and layer sums ([n, layers]) of the blocks; and `told`.
    """
    words, octets = at.words_of(board, at.WORDS), at.octets_of(board, at.OCTETS)
    hit = visible_prefix(board, keys, namespace, rows)
    for index in range(hit):
        slots[index] = words[rows[index], HOST_SLOT]
        if slots[index] < 0:
            return -1
    told[:] = 0
    told[FOUND] = hit
    if hit == 0:
        return 0
    rows, slots = rows[:hit], slots[:hit]
    holds = at.column_i32(board, at.HOLDS)
    sources, where = np.empty(hit, np.uint8), np.arange(hit)
    for index in range(hit):
        holds[slots[index]] += 1
        sources[index] = octets[rows[index], FLAGS] & RESIDENT
    before = slot_of(board, parent, namespace)
    observe_request(board, words_of_keys(keys), hit, -1, story, kinds, paces, now)
    tell_policy(board, cls, slots, kinds, paces, before, now)
    _mark_read(board, rows, sources, told)
    heat_up(board, rows, now_s, half_life_s)
    tell_ghosts(board, words_of_rows(at.records_of(board, at.RECORDS), rows), number_of(cls, at.SLOT_BYTES) >> 12)
    told[NEXT] = int(_missing_behind(board, rows[hit - 1], namespace, window))
    describe(board, cls, slots, where, np.uint8(0), sources, descriptors)
    kept, layers = at.column_u64(cls, at.SUMS), number_of(cls, at.LAYERS)
    run_sums = at.column_i32(board, at.RUN_SUMS)
    shift, mask = number_of(board, at.SHIFT), number_of(board, at.MASK)
    for index in range(hit):
        begin = sum_row(run_sums, shift, mask, slots[index]) * layers
        for layer in range(layers):
            sums[index, layer] = kept[begin + layer]
    return int(hit)
