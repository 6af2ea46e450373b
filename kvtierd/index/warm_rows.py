"""Rows that describe the slots of the arena to the daemon's next life: written, withdrawn and checked in one pass.

A row is 64 bytes, eight words u64:

    0..3   the block's key; of a lent slot: process, reservation, and the session's token
    4      namespace number (lower half) and what the row is: BLOCK or LENT (upper half)
    5      checksum of the block
    6      when it was written, a running number: blocks of a prefix follow each other in it
    7      checksum of the row, over its words, the generation of its slot and the first word of its namespace's digest

A row is true only if its checksum is. The generation in it makes that of a slot which changed hands wrong, whatever
was interrupted when; a checksum of 0 is never right.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.block_table import RECORD
from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.layout import ROW_NUMBERS, Rows

Words64 = npt.NDArray[np.uint64]
Words32 = npt.NDArray[np.int32]
Octets = npt.NDArray[np.uint8]

WORDS: Final = 8
"""Words of a row."""
BLOCK: Final = 1
LENT: Final = 2
_WHAT, _SUM, _WHEN, _CHECK = 4, 5, 6, 7

assert RECORD.fields is not None
_NAMESPACE_AT = RECORD.fields["namespace"][1] // 4
_MARKS_AT = RECORD.fields["marks"][1]
assert RECORD.fields["key"][1] == 0
assert RECORD.fields["namespace"][1] % 4 == 0

_TABLE = types.uint64[:, ::1]
_COLUMN = types.uint64[::1]
_RUNS = types.int32[::1]


@helper
def _checksum(table: Words64, place: Word, generation: Word, digest: Word) -> Word:
    """Mix as splitmix64 does (Steele, Lea, Flood 2014): it is against what was torn, not against a forger."""
    mixed = generation ^ (digest * np.uint64(0x9E3779B97F4A7C15))
    for word in range(_CHECK):
        mixed = (mixed ^ table[place, word]) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed | np.uint64(1)


@helper
def _place(run_slab: Rows, run_first: Rows, shift: Word, stride: Word, slot: Word) -> Word:
    """Row of a slot: slabs have `stride` rows each."""
    run = slot >> shift
    return np.int64(run_slab[run]) * stride + run_first[run] + (slot & ((1 << shift) - 1))


@compiled(
    types.int64(_TABLE, _RUNS, _RUNS, types.int64, types.int64, _COLUMN, _COLUMN, types.uint64[:, ::1],
    types.int32[:, ::1], types.uint8[:, ::1], _COLUMN, types.int64, types.int64, ROW_NUMBERS, ROW_NUMBERS)
)  # fmt: skip
def publish(
    table: Words64, run_slab: Rows, run_first: Rows, shift: int, stride: int, generations: Words64, digests: Words64,
    records: Words64, words: Words32, octets: Octets, sums: Words64, skip_mark: int, when: int, slots: Rows, rows: Rows,
) -> int:  # fmt: skip
    """Slots hold the whole blocks of these rows of the block table (its records as u64, i32 and u8, and block sums).

    Rows with a mark of `skip_mark`, and those of namespaces whose word in `digests` is 0, are left out: their places
    are made invalid. Returns how many places were looked at, which is what `when` moves on by.
    """
    for index, slot in enumerate(slots):
        place, row = _place(run_slab, run_first, shift, stride, slot), rows[index]
        namespace = words[row, _NAMESPACE_AT] & 0xFFFF
        table[place, _CHECK] = 0
        if octets[row, _MARKS_AT] & skip_mark or digests[namespace] == 0:
            continue
        for word in range(_WHAT):
            table[place, word] = records[row, word]
        table[place, _WHAT] = np.uint64(namespace) | (np.uint64(BLOCK) << np.uint64(32))
        table[place, _SUM] = sums[row]
        table[place, _WHEN] = np.uint64(when + index)
        table[place, _CHECK] = _checksum(table, place, generations[slot], digests[namespace])
    return int(slots.size)


@compiled(
    types.void(_TABLE, _RUNS, _RUNS, types.int64, types.int64, _COLUMN, _COLUMN, ROW_NUMBERS)
)  # fmt: skip
def lend(
    table: Words64, run_slab: Rows, run_first: Rows, shift: int, stride: int, generations: Words64, owner: Words64,
    slots: Rows,
) -> None:  # fmt: skip
    """Slots are written by the client that `owner` ([4] u64) names."""
    for slot in slots:
        place = _place(run_slab, run_first, shift, stride, slot)
        table[place, _CHECK] = 0
        for word in range(_WHAT):
            table[place, word] = owner[word]
        table[place, _WHAT] = np.uint64(LENT) << np.uint64(32)
        table[place, _SUM] = 0
        table[place, _WHEN] = 0
        table[place, _CHECK] = _checksum(table, place, generations[slot], np.uint64(0))


@compiled(types.void(_TABLE, _RUNS, _RUNS, types.int64, types.int64, ROW_NUMBERS))
def withdraw(table: Words64, run_slab: Rows, run_first: Rows, shift: int, stride: int, slots: Rows) -> None:
    """Make the rows of slots invalid."""
    for slot in slots:
        table[_place(run_slab, run_first, shift, stride, slot), _CHECK] = 0


@compiled(types.int64(_TABLE, types.int64, _COLUMN, _COLUMN, types.uint8[::1]))
def check(table: Words64, first: int, generations: Words64, digests: Words64, kinds: Octets) -> int:
    """What the rows from `first` on are, one for each of `generations`: BLOCK, LENT, or 0 for one that is not true.

    `digests` has a word for each namespace number, 0 for one that is not known. Returns how many are something.
    """
    found = 0
    for index in range(generations.size):
        place = first + index
        kinds[index] = 0
        kind = table[place, _WHAT] >> np.uint64(32)
        namespace = table[place, _WHAT] & np.uint64(0xFFFFFFFF)
        digest = np.uint64(0)
        if kind == BLOCK:
            if namespace >= digests.size or digests[namespace] == 0:
                continue
            digest = digests[namespace]
        elif kind != LENT:
            continue
        if table[place, _CHECK] == _checksum(table, place, generations[index], digest):
            kinds[index] = np.uint8(kind)
            found += 1
    return found
