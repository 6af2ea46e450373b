from __future__ import annotations

import numpy as np

from kvtierd.policy.eviction import EvictionPolicy, LruEviction

HOLDS = np.zeros(16, np.int32)


def slots(*numbers):
    return np.array(numbers, np.int32)


def test_lru_evicts_the_prefix_used_longest_ago_tail_first():
    policy: EvictionPolicy = LruEviction(16)
    policy.inserted(3, slots(0, 1, 2))
    policy.inserted(3, slots(4, 5))
    policy.accessed(3, slots(0, 1))
    assert policy.victims(3, HOLDS, 9, 99).tolist() == [2, 5, 4, 1, 0]
    policy.removed(3, slots(2, 5))
    assert policy.victims(3, HOLDS, 9, 99).tolist() == [4, 1, 0]


def test_held_slots_are_no_victims():
    policy: EvictionPolicy = LruEviction(16)
    policy.inserted(0, slots(0, 1, 2))
    holds = HOLDS.copy()
    holds[[1, 2]] = 1
    assert policy.victims(0, holds, 9, 99).tolist() == [0]
