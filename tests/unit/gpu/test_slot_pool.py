"""Slot accounting: every slot is free or somebody's, whatever the order of slabs and classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.units import MIB
from kvtierd.gpu.slot_pool import NO_SLOT, SlotPool


def free_slots(pool, cls):
    every = np.arange(pool.row.size)
    return every[cls.free.test(every)]


def test_slots_start_at_the_beginning_of_a_slab_and_do_not_overlap():
    pool = SlotPool(MIB, 4)
    cls = pool.class_for(12_288, 3, "default")
    pool.add_slab(cls, 2)
    slots = pool.take(cls, 5)
    assert pool.slab_of(slots).tolist() == [2] * 5
    assert pool.offsets(cls, slots).tolist() == [0, 12_288, 24_576, 36_864, 49_152]
    assert cls.used == 5
    assert cls.total == MIB // 12_288


def test_take_gives_what_there_is():
    pool = SlotPool(MIB, 1)
    cls = pool.class_for(MIB // 2, 1, "default")
    assert pool.take(cls, 3).size == 0
    pool.add_slab(cls, 0)
    assert pool.take(cls, 3).size == 2


def test_a_held_slot_cannot_be_freed():
    pool = SlotPool(MIB, 1)
    cls = pool.class_for(4096, 1, "default")
    pool.add_slab(cls, 0)
    slots = pool.take(cls, 2)
    pool.hold(slots)
    pool.hold(slots[:1])
    with pytest.raises(AssertionError, match="held"):
        pool.give(cls, slots)
    pool.unhold(np.concatenate([slots, slots[:1]]))
    pool.give(cls, slots)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.unhold(slots)


def test_sums_survive_the_growth_of_their_class():
    pool = SlotPool(MIB, 3)
    cls = pool.class_for(MIB // 4, 2, "default")
    pool.add_slab(cls, 0)
    first = pool.take(cls, 4)
    cls.sums[pool.sum_rows(first)] = np.arange(8, dtype=np.uint64).reshape(4, 2)
    pool.add_slab(cls, 2)
    second = pool.take(cls, 4)
    cls.sums[pool.sum_rows(second)] = 99
    assert cls.sums[pool.sum_rows(first)].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take", "give"]), st.integers(0, 7)), max_size=60))
def test_accounts_agree_after_any_order_of_calls(steps):
    pool = SlotPool(64 * 4096, 4)
    classes = [pool.class_for(4096 * size, 1, "default") for size in (1, 3)]
    owner: dict[int, int] = {}
    taken: dict[int, list[int]] = {0: [], 1: []}
    for action, number in steps:
        cls, slab = classes[number % 2], number // 2
        if action == "add" and slab not in owner:
            pool.add_slab(cls, slab)
            owner[slab] = cls.id
        elif action == "remove" and slab in owner:
            if not any(slot // pool.stride == slab for slot in taken[owner[slab]]):
                pool.remove_slab(slab)
                del owner[slab]
        elif action == "take":
            slots = pool.take(cls, number)
            pool.row[slots] = 1
            taken[cls.id] += slots.tolist()
        elif action == "give" and taken[cls.id]:
            slots = np.array(taken[cls.id][: number + 1], np.int32)
            pool.give(cls, slots)
            taken[cls.id] = taken[cls.id][number + 1 :]
        for each in classes:
            assert each.used == len(taken[each.id])
            assert len(set(taken[each.id])) == each.used
            assert (pool.row[free_slots(pool, each)] == NO_SLOT).all()
