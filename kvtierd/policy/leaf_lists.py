"""The lists that leaves.py works on: a record for each slot, and lists of slots by class and level.

Links and ends are numbers plus one, so that zeroed memory is an empty list and a slot without a block, and is not
touched before it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import from_dtype, types

from kvtierd.index.intrinsics import lowest_bit
from kvtierd.index.jit import Word, helper
from kvtierd.policy.ages import elapsed
from kvtierd.policy.rates import LEVEL_MAX, Levels, level_of

SLOT = np.dtype(
    [
        ("colder", "i4"),  # neighbours in the list, as slot + 1; towards its front
        ("hotter", "i4"),
        ("parent", "i4"),  # slot of the block before this one, or -1
        ("children", "i4"),  # blocks that name this slot as parent
        ("at", "u4"),
        ("kind", "u2"),  # of the block, plus 1; 0 where the slot has none
        ("pace", "u1"),
        ("level", "u1"),  # list that it is on
        ("birth", "u2"),  # changes with each block, so that a stale parent is noticed
        ("parent_birth", "u2"),
        ("copied", "u1"),  # levels by which the block is worth less because another tier has a copy
        ("pad", "u1", 3),
    ]
)
assert SLOT.itemsize == 32

LISTS = 128
"""Lists of a class: levels 0..LEVEL_MAX, and one for those that were held."""
HELD = LEVEL_MAX + 1
OFFERED = 254
"""Level of a slot that was named as a victim, and has not gone yet."""
UNLISTED = 255

U64 = np.uint64
Rowset = Any
"""Array of SLOT: in compiled code its elements have fields, which no type checker knows."""
Ends = npt.NDArray[np.int32]
Marks = npt.NDArray[np.uint64]

SLOTS_TYPE = types.Array(from_dtype(SLOT), 1, "C")
ENDS_TYPE = types.int32[:, ::1]
"""Fronts, backs and lengths of the lists, [3, classes * LISTS]; ends as slot + 1."""
MARKS_TYPE = types.uint64[:, ::1]
"""Which lists of a class have slots, [classes, 2]."""
CURSORS_TYPE = types.int32[:, ::1]
"""List that is being looked through and the next slot of it, as slot + 1, [classes, 2]."""
LEVELS_TYPE = types.int16[:, ::1]
FRONT, BACK, LENGTH = 0, 1, 2
TO_BACK, TO_FRONT = 0, 1


@helper
def list_slot(slots: Rowset, ends: Ends, marks: Marks, cls: Word, slot: Word, level: Word, front: Word) -> None:
    """Put a slot that is on no list on the list of a level."""
    number = cls * LISTS + level
    row = slots[slot]
    row.level, row.colder, row.hotter = level, 0, 0
    if ends[LENGTH, number] == 0:
        ends[FRONT, number] = ends[BACK, number] = slot + 1
        marks[cls, level >> 6] |= U64(1) << U64(level & 63)
    elif front:
        row.hotter = ends[FRONT, number]
        slots[row.hotter - 1].colder = slot + 1
        ends[FRONT, number] = slot + 1
    else:
        row.colder = ends[BACK, number]
        slots[row.colder - 1].hotter = slot + 1
        ends[BACK, number] = slot + 1
    ends[LENGTH, number] += 1


@helper
def unlist(slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, cls: Word, slot: Word) -> None:
    """Take a slot off the list that it is on; a look-through that was to see it next goes on after it."""
    row = slots[slot]
    if cursors[cls, 1] == slot + 1:
        cursors[cls, 1] = row.hotter
    level = np.int64(row.level)
    number = cls * LISTS + level
    if row.colder > 0:
        slots[row.colder - 1].hotter = row.hotter
    else:
        ends[FRONT, number] = row.hotter
    if row.hotter > 0:
        slots[row.hotter - 1].colder = row.colder
    else:
        ends[BACK, number] = row.colder
    ends[LENGTH, number] -= 1
    if ends[LENGTH, number] == 0:
        marks[cls, level >> 6] &= ~(U64(1) << U64(level & 63))
    row.level = UNLISTED


@helper
def level_now(slots: Rowset, levels: Levels, slot: Word, now: Word) -> Word:
    """Level of the block in a slot at this time, 0..LEVEL_MAX."""
    row = slots[slot]
    level = level_of(levels, np.int64(row.kind) - 1, row.pace, elapsed(row.at, now))
    return max(0, level - np.int64(row.copied))


@helper
def has_parent(slots: Rowset, slot: Word) -> Word:
    """Whether the block before this one is still where it was said to be."""
    row = slots[slot]
    return row.parent >= 0 and slots[row.parent].kind > 0 and slots[row.parent].birth == row.parent_birth


@helper
def lowest_list(marks: Marks, cls: Word) -> Word:
    """The lowest level whose list has slots, or LISTS."""
    if marks[cls, 0]:
        return lowest_bit(marks[cls, 0])
    return 64 + lowest_bit(marks[cls, 1])


@helper
def next_list(marks: Marks, cls: Word, level: Word) -> Word:
    """The first level above `level` whose list has slots, going round; LISTS where there is none at all."""
    for step in range(2):
        word = ((level + 1) >> 6) + step
        if word < 2:
            shift = U64((level + 1) & 63) if step == 0 else U64(0)
            rest = marks[cls, word] >> shift << shift
            if rest:
                return 64 * word + lowest_bit(rest)
    return lowest_list(marks, cls)
