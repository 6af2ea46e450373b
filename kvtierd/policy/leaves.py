"""Slots in the order in which their blocks should go: lists of leaves by level.

A *leaf* is a slot whose block no other block in the tier comes after: only leaves are victims, so that no choice made
here ever leaves a hole before a kept tail. Which block comes before which is told with each request; each slot counts
the blocks that come right after its own, and becomes a leaf when the last of them goes.

Leaves of a class of slots lie in lists, one for each level (rates.py), lowest to go first. Levels change as blocks age,
and lists only notice when they are looked at: a victim is judged again before it goes, and each use of blocks looks at
a few leaves in turn, which is enough to come round many times before the tier has been filled once more.
A slot that lists of victims came upon while it was held waits in a list of its own, so that it is not in the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import from_dtype, types

from kvtierd.index.intrinsics import lowest_bit
from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.layout import ROW_NUMBERS, Rows
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
        ("pad", "u4"),
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
Slots = Rows
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
_FRONT, _BACK, _LENGTH = 0, 1, 2
_TO_BACK, _TO_FRONT = 0, 1


@helper
def _list_slot(slots: Rowset, ends: Ends, marks: Marks, cls: Word, slot: Word, level: Word, front: Word) -> None:
    """Put a slot that is on no list on the list of a level."""
    number = cls * LISTS + level
    row = slots[slot]
    row.level, row.colder, row.hotter = level, 0, 0
    if ends[_LENGTH, number] == 0:
        ends[_FRONT, number] = ends[_BACK, number] = slot + 1
        marks[cls, level >> 6] |= U64(1) << U64(level & 63)
    elif front:
        row.hotter = ends[_FRONT, number]
        slots[row.hotter - 1].colder = slot + 1
        ends[_FRONT, number] = slot + 1
    else:
        row.colder = ends[_BACK, number]
        slots[row.colder - 1].hotter = slot + 1
        ends[_BACK, number] = slot + 1
    ends[_LENGTH, number] += 1


@helper
def _unlist(slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, cls: Word, slot: Word) -> None:
    row = slots[slot]
    if cursors[cls, 1] == slot + 1:
        cursors[cls, 1] = row.hotter
    level = np.int64(row.level)
    number = cls * LISTS + level
    if row.colder > 0:
        slots[row.colder - 1].hotter = row.hotter
    else:
        ends[_FRONT, number] = row.hotter
    if row.hotter > 0:
        slots[row.hotter - 1].colder = row.colder
    else:
        ends[_BACK, number] = row.colder
    ends[_LENGTH, number] -= 1
    if ends[_LENGTH, number] == 0:
        marks[cls, level >> 6] &= ~(U64(1) << U64(level & 63))
    row.level = UNLISTED


@helper
def _level_now(slots: Rowset, levels: Levels, slot: Word, now: Word) -> Word:
    row = slots[slot]
    return level_of(levels, np.int64(row.kind) - 1, row.pace, elapsed(row.at, now))


@helper
def _has_parent(slots: Rowset, slot: Word) -> Word:
    row = slots[slot]
    return row.parent >= 0 and slots[row.parent].kind > 0 and slots[row.parent].birth == row.parent_birth


@helper
def _leave_parent(slots: Rowset, ends: Ends, marks: Marks, levels: Levels, cls: Word, slot: Word, now: Word) -> None:
    """A block goes, or is seen to come after another one: its parent may be a leaf now, and next to go."""
    if _has_parent(slots, slot):
        parent = slots[slot].parent
        slots[parent].children -= 1
        if slots[parent].children == 0 and slots[parent].level == UNLISTED:
            _list_slot(slots, ends, marks, cls, parent, _level_now(slots, levels, parent, now), _TO_FRONT)


@helper
def _follow(
    slots: Rowset,
    ends: Ends,
    marks: Marks,
    cursors: Ends,
    levels: Levels,
    cls: Word,
    slot: Word,
    above: Word,
    now: Word,
) -> None:
    """The block in `slot` comes right after the one in `above`."""
    row = slots[slot]
    if _has_parent(slots, slot) and row.parent == above:
        return
    _leave_parent(slots, ends, marks, levels, cls, slot, now)
    row.parent, row.parent_birth = above, slots[above].birth
    slots[above].children += 1
    if slots[above].level < OFFERED:
        _unlist(slots, ends, marks, cursors, cls, above)


@helper
def _lowest_list(marks: Marks, cls: Word) -> Word:
    """The lowest level whose list has slots, or LISTS."""
    if marks[cls, 0]:
        return lowest_bit(marks[cls, 0])
    return 64 + lowest_bit(marks[cls, 1])


@helper
def _next_list(marks: Marks, cls: Word, level: Word) -> Word:
    """The first level above `level` whose list has slots, going round; LISTS where there is none at all."""
    for step in range(2):
        word = ((level + 1) >> 6) + step
        if word < 2:
            shift = U64((level + 1) & 63) if step == 0 else U64(0)
            rest = marks[cls, word] >> shift << shift
            if rest:
                return 64 * word + lowest_bit(rest)
    return _lowest_list(marks, cls)


@helper
def _sweep(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: Word, now: Word, steps: Word
) -> None:
    """Judge some leaves anew, list by list. Those whose level is still right keep their place."""
    for _ in range(steps):
        if cursors[cls, 1] == 0:
            level = _next_list(marks, cls, np.int64(cursors[cls, 0]))
            if level >= LISTS:
                return
            cursors[cls, 0], cursors[cls, 1] = level, ends[_FRONT, cls * LISTS + level]
        slot = cursors[cls, 1] - 1
        present = _level_now(slots, levels, slot, now)
        if present == slots[slot].level:
            cursors[cls, 1] = slots[slot].hotter
            continue
        _unlist(slots, ends, marks, cursors, cls, slot)
        _list_slot(slots, ends, marks, cls, slot, present, _TO_BACK)


SWEEP_STEPS = 2
"""Leaves judged anew for each block used."""


@compiled(
    types.void(
        SLOTS_TYPE, ENDS_TYPE, MARKS_TYPE, CURSORS_TYPE, LEVELS_TYPE, types.int64, types.uint32, ROW_NUMBERS,
        types.uint16[::1], types.uint8[::1], types.int64, types.boolean,
    )
)  # fmt: skip
def use_slots(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: int, now: int, used: Slots,
    kinds: npt.NDArray[np.uint16], paces: npt.NDArray[np.uint8], before: int, chained: bool,
) -> None:  # fmt: skip
    """The blocks of a request, of these kinds, are in the slots `used` [n] (-1: not in this tier), in prefix order.

    `before` is the slot of the block that comes before them, or -1. Without `chained` they are only known to come one
    after another in their prefix, not that nothing is between them.
    """
    above = before
    for index in range(used.size):
        slot = used[index]
        if slot < 0:
            above = -1
            continue
        row = slots[slot]
        if row.kind == 0:
            row.parent, row.children = -1, 0
        elif row.level < OFFERED:
            _unlist(slots, ends, marks, cursors, cls, slot)
        row.level = UNLISTED
        row.kind, row.pace, row.at = kinds[index] + 1, paces[index], now
        if chained and above >= 0 and slots[above].kind > 0:
            _follow(slots, ends, marks, cursors, levels, cls, slot, above, now)
        above = slot
    for index in range(used.size - 1, -1, -1):
        slot = used[index]
        if slot >= 0 and slots[slot].children == 0 and slots[slot].level == UNLISTED:
            _list_slot(slots, ends, marks, cls, slot, _level_now(slots, levels, slot, now), _TO_BACK)
    _sweep(slots, ends, marks, cursors, levels, cls, now, SWEEP_STEPS * used.size)


@compiled(
    types.void(SLOTS_TYPE, ENDS_TYPE, MARKS_TYPE, CURSORS_TYPE, LEVELS_TYPE, types.int64, types.uint32, ROW_NUMBERS)
)
def remove_slots(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: int, now: int, gone: Slots
) -> None:
    """The slots hold no blocks any more."""
    for slot in gone:
        row = slots[slot]
        if row.kind == 0:
            continue
        if row.level < OFFERED:
            _unlist(slots, ends, marks, cursors, cls, slot)
        if row.level != OFFERED:
            _leave_parent(slots, ends, marks, levels, cls, slot, now)
        row.kind, row.level = 0, UNLISTED
        row.birth += 1


@compiled(
    types.void(SLOTS_TYPE, ENDS_TYPE, MARKS_TYPE, CURSORS_TYPE, LEVELS_TYPE, types.int64, types.uint32, ROW_NUMBERS)
)
def take_back(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: int, now: int, offered: Slots
) -> None:
    """Those of the victims named last that have not gone are leaves again, or come before one."""
    for index in range(offered.size - 1, -1, -1):
        slot = offered[index]
        if slots[slot].level != OFFERED:
            continue
        slots[slot].level = UNLISTED
        if _has_parent(slots, slot):
            parent = slots[slot].parent
            slots[parent].children += 1
            if slots[parent].level < OFFERED:
                _unlist(slots, ends, marks, cursors, cls, parent)
        if slots[slot].children == 0:
            _list_slot(slots, ends, marks, cls, slot, _level_now(slots, levels, slot, now), _TO_FRONT)


@helper
def _offer(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: Word, slot: Word, now: Word
) -> None:
    _unlist(slots, ends, marks, cursors, cls, slot)
    _leave_parent(slots, ends, marks, levels, cls, slot, now)
    slots[slot].level = OFFERED


def _victims_of(holds: Any) -> Any:
    return types.int64(
        SLOTS_TYPE,
        ENDS_TYPE,
        MARKS_TYPE,
        CURSORS_TYPE,
        LEVELS_TYPE,
        types.int64,
        types.uint32,
        holds,
        types.int64,
        ROW_NUMBERS,
    )


@compiled(_victims_of(types.int32[::1]), _victims_of(types.uint16[::1]))
def name_victims(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: int, now: int, holds: npt.NDArray[Any],
    scan_max: int, out: Slots,
) -> int:  # fmt: skip
    """Fill `out` with unheld leaves, lowest level first, each followed by what it makes a leaf; how many were found.

    They count as gone until `take_back`. Looks at `scan_max` slots at most.
    """
    found, held = 0, ends[_LENGTH, cls * LISTS + HELD]
    for _ in range(scan_max):
        level = _lowest_list(marks, cls)
        if found == out.size or level >= LISTS or (level == HELD and held <= 0):
            break
        slot = ends[_FRONT, cls * LISTS + level] - 1
        if level == HELD:
            held -= 1
        if holds[slot] != 0:
            _unlist(slots, ends, marks, cursors, cls, slot)
            _list_slot(slots, ends, marks, cls, slot, HELD, _TO_BACK)
            continue
        present = _level_now(slots, levels, slot, now)
        if present > level or level == HELD:
            _unlist(slots, ends, marks, cursors, cls, slot)
            _list_slot(slots, ends, marks, cls, slot, present, _TO_BACK)
            continue
        _offer(slots, ends, marks, cursors, levels, cls, slot, now)
        out[found] = slot
        found += 1
    return found
