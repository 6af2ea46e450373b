"""Slots in the order in which their blocks should go: leaves by level.

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
from numba import types

from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.layout import ROW_NUMBERS, Rows
from kvtierd.policy.leaf_lists import (
    CURSORS_TYPE,
    ENDS_TYPE,
    FRONT,
    HELD,
    LENGTH,
    LEVELS_TYPE,
    LISTS,
    MARKS_TYPE,
    OFFERED,
    SLOTS_TYPE,
    TO_BACK,
    TO_FRONT,
    UNLISTED,
    Ends,
    Marks,
    Rowset,
    has_parent,
    level_now,
    list_slot,
    lowest_list,
    next_list,
    unlist,
)  # fmt: skip
from kvtierd.policy.rates import Levels

Slots = Rows


@helper
def _leave_parent(slots: Rowset, ends: Ends, marks: Marks, levels: Levels, cls: Word, slot: Word, now: Word) -> None:
    """A block goes, or is seen to come after another one: its parent may be a leaf now, and next to go."""
    if has_parent(slots, slot):
        parent = slots[slot].parent
        slots[parent].children -= 1
        if slots[parent].children == 0 and slots[parent].level == UNLISTED:
            list_slot(slots, ends, marks, cls, parent, level_now(slots, levels, parent, now), TO_FRONT)


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
    if has_parent(slots, slot) and row.parent == above:
        return
    _leave_parent(slots, ends, marks, levels, cls, slot, now)
    row.parent, row.parent_birth = above, slots[above].birth
    slots[above].children += 1
    if slots[above].level < OFFERED:
        unlist(slots, ends, marks, cursors, cls, above)


@helper
def _sweep(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: Word, now: Word, steps: Word
) -> None:
    """Judge some leaves anew, list by list. Those whose level is still right keep their place."""
    for _ in range(steps):
        if cursors[cls, 1] == 0:
            level = next_list(marks, cls, np.int64(cursors[cls, 0]))
            if level >= LISTS:
                return
            cursors[cls, 0], cursors[cls, 1] = level, ends[FRONT, cls * LISTS + level]
        slot = cursors[cls, 1] - 1
        present = level_now(slots, levels, slot, now)
        if present == slots[slot].level:
            cursors[cls, 1] = slots[slot].hotter
            continue
        unlist(slots, ends, marks, cursors, cls, slot)
        list_slot(slots, ends, marks, cls, slot, present, TO_BACK)


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
            row.parent, row.children, row.copied = -1, 0, 0
        elif row.level < OFFERED:
            unlist(slots, ends, marks, cursors, cls, slot)
        row.level = UNLISTED
        row.kind, row.pace, row.at = kinds[index] + 1, paces[index], now
        if chained and above >= 0 and slots[above].kind > 0:
            _follow(slots, ends, marks, cursors, levels, cls, slot, above, now)
        above = slot
    for index in range(used.size - 1, -1, -1):
        slot = used[index]
        if slot >= 0 and slots[slot].children == 0 and slots[slot].level == UNLISTED:
            list_slot(slots, ends, marks, cls, slot, level_now(slots, levels, slot, now), TO_BACK)
    _sweep(slots, ends, marks, cursors, levels, cls, now, SWEEP_STEPS * used.size)


@compiled(
    types.void(
        SLOTS_TYPE, ENDS_TYPE, MARKS_TYPE, CURSORS_TYPE, LEVELS_TYPE, types.int64, types.uint32, ROW_NUMBERS,
        ROW_NUMBERS,
    )
)  # fmt: skip
def chain_slots(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: int, now: int, chain: Slots,
    before: Slots,
) -> None:  # fmt: skip
    """The block in slot `chain[i]` comes right after the one in slot `before[i]` (-1: not in this tier)."""
    for index in range(chain.size):
        slot, above = chain[index], before[index]
        if above >= 0 and slots[slot].kind > 0 and slots[above].kind > 0:
            _follow(slots, ends, marks, cursors, levels, cls, slot, above, now)


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
            unlist(slots, ends, marks, cursors, cls, slot)
        if row.level != OFFERED:
            _leave_parent(slots, ends, marks, levels, cls, slot, now)
        row.kind, row.level = 0, UNLISTED
        row.birth += 1


@compiled(
    types.void(
        SLOTS_TYPE,
        ENDS_TYPE,
        MARKS_TYPE,
        CURSORS_TYPE,
        LEVELS_TYPE,
        types.int64,
        types.uint32,
        ROW_NUMBERS,
        types.uint8,
    )
)
def mark_copied(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: int, now: int, copied: Slots, less: int
) -> None:
    """Another tier has a copy of the blocks in these slots (`less` levels are taken off), or has none (0)."""
    for slot in copied:
        row = slots[slot]
        if row.kind == 0 or row.copied == less:
            continue
        row.copied = less
        if row.level < OFFERED:
            unlist(slots, ends, marks, cursors, cls, slot)
            list_slot(slots, ends, marks, cls, slot, level_now(slots, levels, slot, now), TO_BACK)


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
        if has_parent(slots, slot):
            parent = slots[slot].parent
            slots[parent].children += 1
            if slots[parent].level < OFFERED:
                unlist(slots, ends, marks, cursors, cls, parent)
        if slots[slot].children == 0:
            list_slot(slots, ends, marks, cls, slot, level_now(slots, levels, slot, now), TO_FRONT)


@helper
def _offer(
    slots: Rowset, ends: Ends, marks: Marks, cursors: Ends, levels: Levels, cls: Word, slot: Word, now: Word
) -> None:
    unlist(slots, ends, marks, cursors, cls, slot)
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
    found, held = 0, ends[LENGTH, cls * LISTS + HELD]
    for _ in range(scan_max):
        level = lowest_list(marks, cls)
        if found == out.size or level >= LISTS or (level == HELD and held <= 0):
            break
        slot = ends[FRONT, cls * LISTS + level] - 1
        if level == HELD:
            held -= 1
        if holds[slot] != 0:
            unlist(slots, ends, marks, cursors, cls, slot)
            list_slot(slots, ends, marks, cls, slot, HELD, TO_BACK)
            continue
        present = level_now(slots, levels, slot, now)
        if present > level or level == HELD:
            unlist(slots, ends, marks, cursors, cls, slot)
            list_slot(slots, ends, marks, cls, slot, present, TO_BACK)
            continue
        _offer(slots, ends, marks, cursors, levels, cls, slot, now)
        out[found] = slot
        found += 1
    return found
