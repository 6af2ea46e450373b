from __future__ import annotations

import numpy as np
import pytest

from kvtierd.index.bitmap import HierarchicalBitmap


def at(*positions):
    return np.array(positions, np.int64)


def test_a_new_bitmap_is_clear_and_a_filled_one_ends_at_its_capacity():
    empty, full = HierarchicalBitmap(1000), HierarchicalBitmap(1000, filled=True)
    assert (empty.count(), empty.find_first(), empty.run_from(0)) == (0, -1, 0)
    assert (full.count(), full.find_first(), full.run_from(0), full.run_from(999)) == (1000, 0, 1000, 1)
    assert full.find_run(1000) == 0
    assert full.find_run(1001) == -1


def test_setting_says_how_many_changed():
    bits = HierarchicalBitmap(2000)
    assert bits.set(at(5, 700, 5, 1999)) == 3
    assert bits.set(at(5, 6)) == 1
    assert bits.clear(at(5, 7)) == 1
    assert bits.test(at(5, 6, 7, 700, 1999)).tolist() == [False, True, False, True, True]
    assert bits.count() == 3


@pytest.mark.parametrize("edge", [64, 512, 4096, 32768])
def test_runs_are_found_across_words_leaves_and_nodes(edge):
    bits = HierarchicalBitmap(70_000)
    bits.set_range(edge - 3, edge + 4)
    bits.set(at(1, 2, 3))
    assert bits.find_run(3) == 1
    assert bits.find_run(4) == edge - 3
    assert bits.find_run(7, 3) == edge - 3
    assert bits.find_run(7, edge - 2) == -1
    assert bits.find_run(6, edge - 2) == edge - 2
    assert bits.run_from(edge - 1) == 5
    assert bits.count(edge - 1, edge + 1) == 2


def test_the_first_run_is_found_and_not_a_longer_later_one():
    bits = HierarchicalBitmap(100_000)
    bits.set_range(90_000, 95_000)
    bits.set_range(510, 515)
    assert bits.find_run(5) == 510
    assert bits.find_run(6) == 90_000


def test_slots_next_to_each_other_can_be_taken_and_given_back():
    free = HierarchicalBitmap(5000, filled=True)
    taken = []
    while (begin := free.find_run(300)) >= 0:
        free.clear_range(begin, begin + 300)
        taken.append(begin)
    assert taken == list(range(0, 4800, 300))
    free.set_range(taken[3], taken[3] + 300)
    assert free.find_run(300) == taken[3]
    assert free.count() == 500


def test_taking_prefers_a_run_and_is_content_with_what_there_is():
    bits = HierarchicalBitmap(5000)
    bits.set(at(3, 9, 4500))
    bits.set_range(700, 740)
    assert bits.take(40).tolist() == list(range(700, 740))
    assert bits.take(2).tolist() == [3, 9]
    assert bits.take(0).tolist() == bits.take(-1).tolist() == []
    assert bits.take(10).tolist() == [4500]
    assert bits.count() == 0


@pytest.mark.parametrize("position", [-1, 100, 1 << 40])
def test_a_position_outside_changes_nothing(position):
    bits = HierarchicalBitmap(100)
    for call in (bits.set, bits.clear, bits.test):
        with pytest.raises(ValueError, match=r"are not all in 0\.\.99"):
            call(at(3, position))
    assert bits.count() == 0


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (5, 101), (6, 5)])
def test_a_range_outside_is_named(begin, end):
    bits = HierarchicalBitmap(100)
    for call in (bits.set_range, bits.clear_range, bits.count):
        with pytest.raises(ValueError, match=f"range {begin}..{end}"):
            call(begin, end)


def test_arguments_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="capacity is 0"):
        HierarchicalBitmap(0)
    with pytest.raises(ValueError, match="run of 0 positions"):
        HierarchicalBitmap(1).find_run(0)
