from __future__ import annotations

import numpy as np
import pytest

from kvtierd.index.lru import LruLists


def slots(*numbers):
    return np.array(numbers, np.int32)


NO_HOLDS = np.zeros(20, np.int32)


def test_the_tail_of_a_prefix_goes_before_its_head():
    lists = LruLists(20, 2)
    lists.push(0, slots(1, 2, 3))
    assert lists.victims(0, NO_HOLDS, 9, 99).tolist() == [3, 2, 1]
    lists.push(0, slots(4, 5))
    lists.touch(0, slots(1, 2))
    assert lists.victims(0, NO_HOLDS, 9, 99).tolist() == [3, 5, 4, 2, 1]


def test_victims_stay_until_they_are_removed():
    lists = LruLists(20, 1)
    lists.push(0, slots(1, 2, 3))
    assert lists.victims(0, NO_HOLDS, 2, 99).tolist() == [3, 2]
    assert lists.remove(0, slots(3)) == 1
    assert lists.victims(0, NO_HOLDS, 2, 99).tolist() == [2, 1]
    assert lists.length(0) == 2


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_held_slots_are_passed_over_and_out_of_the_way_next_time(dtype):
    lists = LruLists(20, 1)
    lists.push(0, slots(*range(10)))
    holds = np.zeros(20, dtype)
    holds[5:10] = 1
    assert lists.victims(0, holds, 3, 5).tolist() == []
    assert lists.victims(0, holds, 3, 5).tolist() == [4, 3, 2]
    holds[:] = 0
    assert lists.victims(0, holds, 99, 99).tolist() == [4, 3, 2, 1, 0, 9, 8, 7, 6, 5]


def test_a_search_looks_at_no_more_than_it_may():
    lists = LruLists(20, 1)
    lists.push(0, slots(*range(10)))
    assert lists.victims(0, np.ones(20, np.int32), 10, 99).tolist() == []
    assert len(lists.victims(0, NO_HOLDS, 10, 4)) == 4
    assert len(lists.victims(0, NO_HOLDS, 0, 4)) == 0


def test_lists_of_classes_are_apart():
    lists = LruLists(20, 3)
    lists.push(0, slots(1))
    lists.push(2, slots(2))
    assert lists.victims(0, NO_HOLDS, 9, 9).tolist() == [1]
    assert lists.victims(1, NO_HOLDS, 9, 9).tolist() == []
    assert lists.victims(2, NO_HOLDS, 9, 9).tolist() == [2]


def test_slots_on_no_list_are_left_alone():
    lists = LruLists(20, 1)
    assert lists.touch(0, slots(1, 2)) == 0
    assert lists.remove(0, slots(1)) == 0
    lists.push(0, slots(1))
    assert lists.remove(0, slots(1, 1, 2)) == 1
    assert lists.length(0) == 0


def test_pushing_twice_moves():
    lists = LruLists(20, 1)
    lists.push(0, slots(1, 2))
    lists.push(0, slots(2))
    assert lists.length(0) == 2
    assert lists.victims(0, NO_HOLDS, 9, 9).tolist() == [1, 2]


def test_limits_and_classes_out_of_range_are_named():
    with pytest.raises(ValueError, match="slots_max 0"):
        LruLists(0, 1)
    lists = LruLists(20, 2)
    for call in (lambda: lists.push(2, slots(1)), lambda: lists.touch(-1, slots(1)), lambda: lists.length(2)):
        with pytest.raises(ValueError, match=r"class -?\d is not in 0\.\.1"):
            call()
