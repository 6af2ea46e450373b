"""Slot accounting: every slot is free or somebody's, whatever the order of slabs and classes."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.core.units import MIB
from kvtierd.gpu.slot_pool import SlotPool


def test_slots_start_at_the_beginning_of_a_slab_and_do_not_overlap():
    pool = SlotPool(MIB, 4)
    cls = pool.class_for(12_288, 3, "default")
    pool.add_slab(cls, 2)
    slots = pool.take(cls, 5)
    assert pool.slabs_of(slots).tolist() == [2] * 5
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


def test_a_pool_of_large_slots_touches_few_numbers():
    pool = SlotPool(64 * MIB, 8)
    cls = pool.class_for(4 * MIB + 4096, 1, "default")
    for slab in (5, 1, 7):
        pool.add_slab(cls, slab)
    slots = pool.take(cls, 45)
    assert slots.size == 45
    assert slots.max() < 48
    assert sorted(set(pool.slabs_of(slots).tolist())) == [1, 5, 7]
    assert [pool.place(int(slot)) for slot in slots] == list(
        zip(pool.slabs_of(slots).tolist(), pool.indices(slots).tolist(), strict=True)
    )


def test_numbers_of_a_slab_that_left_its_class_are_given_again():
    pool = SlotPool(MIB, 2)
    small, large = pool.class_for(4096, 1, "default"), pool.class_for(MIB // 4, 1, "default")
    before = pool.add_slab(small, 0)
    pool.remove_slab(0)
    assert set(pool.add_slab(large, 1)) <= set(before.tolist())
    after = pool.add_slab(small, 0)
    assert not set(after) & set(pool.slots_of(1).tolist())
    assert after.max() < pool.slots_max


def test_slabs_of_the_smallest_slots_fill_the_pool():
    for pages in (1, 3, 24, 40, 256):
        pool = SlotPool(pages * 4096, 3)
        cls = pool.class_for(4096, 1, "default")
        numbers = np.concatenate([pool.add_slab(cls, slab) for slab in range(3)])
        assert np.unique(numbers).size == pool.slots_max == 3 * pages


def test_sums_of_a_slab_that_left_are_given_to_the_next():
    pool = SlotPool(MIB, 3)
    cls = pool.class_for(MIB // 4, 1, "default")
    for slab in range(3):
        pool.add_slab(cls, slab)
    rows = [set(pool.sum_rows(pool.slots_of(slab)).tolist()) for slab in range(3)]
    assert set.union(*rows) == set(range(12))
    pool.remove_slab(1)
    pool.add_slab(cls, 1)
    assert set(pool.sum_rows(pool.slots_of(1)).tolist()) == rows[1]
