from __future__ import annotations

import numpy as np
import pytest

from kvtierd.policy.eviction import EvictionPolicy
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import ReturnModel

SECOND = 1_000_000_000
HOLDS = np.zeros(64, np.int32)


class Rig:
    """One class of slots, a model, and prompts made of small numbers."""

    def __init__(self) -> None:
        self.model = ReturnModel(64, seed=1, records=256)
        self.policy = ReturnEviction(64, self.model, 4)
        self.now = 0

    def use(self, *slots: int, prompt: int = 1, step_s: int = 1) -> None:
        self.now += step_s * SECOND
        keys = np.arange(len(slots), dtype=np.uint64) + np.uint64(1000 * prompt)
        self.policy.used(2, np.array(slots, np.int32), self.model.observe(keys, 0, self.now))

    def victims(self, count: int = 64, scan: int = 999, holds: np.ndarray = HOLDS) -> list[int]:
        return self.policy.victims(2, holds, count, scan).tolist()

    def remove(self, *slots: int) -> None:
        self.policy.removed(2, np.array(slots, np.int32))


def held(*slots: int) -> np.ndarray:
    holds = np.zeros(64, np.uint16)
    holds[list(slots)] = 1
    return holds


def test_without_knowledge_the_prompt_used_longest_ago_goes_first_tail_first():
    rig = Rig()
    rig.use(3, 1, 2, prompt=1)
    rig.use(7, 8, prompt=2, step_s=60)
    assert rig.victims() == [2, 1, 3, 8, 7]
    assert rig.victims(2) == [2, 1]


def test_victims_that_stay_are_named_again():
    rig = Rig()
    rig.use(3, 1, 2, prompt=1)
    rig.use(7, 8, prompt=2, step_s=60)
    assert rig.victims(4) == [2, 1, 3, 8]
    rig.remove(2, 1)
    assert rig.victims(4) == [3, 8, 7]
    rig.use(3, prompt=1, step_s=600)
    assert rig.victims(4) == [8, 7, 3]


def test_a_block_that_others_come_after_stays_while_they_do():
    rig = Rig()
    rig.use(1, 2, 3, prompt=1)
    rig.use(1, 2, 4, prompt=1, step_s=60)
    rig.use(9, prompt=2, step_s=60)
    assert rig.victims(holds=held(4)) == [3, 9]
    rig.use(9, prompt=2)
    assert rig.victims() == [3, 4, 2, 1, 9]


def test_a_held_slot_keeps_its_whole_prefix():
    rig = Rig()
    rig.use(1, 2, 3, prompt=1)
    assert rig.victims(holds=held(3)) == []
    assert rig.victims(holds=held(2)) == [3]
    assert rig.victims() == [3, 2, 1]


def test_held_slots_are_not_in_the_way_of_later_searches():
    rig = Rig()
    for slot in range(40):
        rig.use(slot, prompt=slot + 1)
    busy = held(*range(30))
    assert rig.victims(1, scan=31, holds=busy) == [30]
    assert rig.victims(1, scan=1, holds=busy) == [30]
    assert sorted(rig.victims(99, scan=99)) == list(range(40))


def test_the_search_looks_at_as_many_slots_as_it_may():
    rig = Rig()
    for slot in range(20):
        rig.use(slot, prompt=slot + 1)
    assert len(rig.victims(scan=7)) == 7
    assert rig.victims(scan=0) == []
    assert rig.victims(count=0) == []


def test_what_lies_elsewhere_is_left_out():
    rig = Rig()
    rig.use(-1, 5, -1, 6, prompt=1)
    assert rig.victims() == [6, 5]


def test_pieces_of_a_request_join_where_the_slot_before_is_told():
    rig = Rig()
    usage = rig.model.observe(np.arange(4, dtype=np.uint64), 0, SECOND)
    rig.policy.used(2, np.array([4, 5], np.int32), usage)
    rig.policy.used(2, np.array([2, 3], np.int32), usage, first=2, before=5)
    assert rig.victims(holds=held(3)) == []
    assert rig.victims() == [3, 2, 5, 4]


def test_a_slot_that_changed_hands_is_nobodys_parent_any_more():
    rig = Rig()
    rig.use(1, 2, prompt=1)
    rig.remove(1)  # Its block was deleted; the one in slot 2 is still there.
    rig.use(1, prompt=2, step_s=60)
    assert rig.victims(1) == [2]
    rig.remove(2)
    assert rig.victims() == [1]
    rig.use(1, 2, prompt=2, step_s=60)
    assert rig.victims() == [2, 1]


def test_it_works_where_only_slots_are_told():
    rig = Rig()
    policy: EvictionPolicy = rig.policy
    policy.inserted(2, np.array([1, 2, 3], np.int32))
    policy.accessed(2, np.array([1, 9], np.int32))
    assert rig.victims() == [3, 2, 1]
    policy.removed(2, np.array([3, 9], np.int32))
    assert rig.victims() == [2, 1]


def test_classes_are_apart():
    rig = Rig()
    rig.use(1, 2, prompt=1)
    rig.policy.inserted(3, np.array([5], np.int32))
    assert rig.policy.victims(3, HOLDS, 9, 9).tolist() == [5]
    assert rig.policy.victims(0, HOLDS, 9, 9).tolist() == []
    assert (rig.policy.length(2), rig.policy.length(3)) == (1, 1)


@pytest.mark.parametrize("cls", [-1, 4])
def test_a_class_out_of_range_is_refused(cls):
    rig = Rig()
    with pytest.raises(ValueError, match=r"not in 0\.\.3"):
        rig.policy.inserted(cls, np.array([1], np.int32))


def test_limits_out_of_range_are_refused():
    with pytest.raises(ValueError, match="slots_max 0"):
        ReturnEviction(0, ReturnModel(1, 1, records=2), 1)


def test_a_block_with_a_copy_elsewhere_goes_before_an_older_one_without():
    rig = Rig()
    rig.use(1, prompt=1)
    rig.use(2, prompt=2, step_s=20)
    rig.use(9, prompt=9, step_s=100)
    assert rig.victims() == [1, 2, 9]
    rig.policy.copied(2, np.array([2, 40], np.int32))
    assert rig.victims() == [2, 1, 9]
    rig.policy.copied(2, np.array([2], np.int32), elsewhere=False)
    assert rig.victims() == [1, 2, 9]


def test_a_use_does_not_take_the_copy_away():
    rig = Rig()
    rig.use(1, prompt=1)
    rig.use(2, prompt=2)
    rig.policy.copied(2, np.array([2], np.int32))
    rig.use(1, prompt=1, step_s=100)
    rig.use(2, prompt=2)
    for _ in range(9):
        rig.use(9, prompt=9, step_s=30)
    assert rig.victims(2) == [2, 1]


def test_a_copy_does_not_outlive_the_block():
    rig = Rig()
    rig.use(1, prompt=1)
    rig.policy.copied(2, np.array([1], np.int32))
    rig.remove(1)
    rig.use(3, prompt=3)
    rig.use(1, prompt=2, step_s=20)
    rig.use(9, prompt=9, step_s=100)
    assert rig.victims() == [3, 1, 9]


@pytest.mark.parametrize("worth", [0, -1, 1.1])
def test_the_worth_of_a_copied_block_is_a_share(worth):
    with pytest.raises(ValueError, match="copied_worth"):
        ReturnEviction(4, ReturnModel(1, 1, records=2), 1, worth)
