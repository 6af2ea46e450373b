from __future__ import annotations

import numpy as np
import pytest

from kvtierd.policy.thrash import PROTECT_NS_MAX, PROTECT_NS_MIN, SECOND_NS, Limits, ThrashGuard, judge


def keys(begin: int, end: int) -> np.ndarray:
    return np.arange(begin, end, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def cycle(guard: ThrashGuard, working_set: int, capacity: int, rounds: int) -> None:
    """Use a working set in turn through a tier that evicts the oldest."""
    for step in range(rounds * working_set // 8):
        begin = step * 8 % working_set
        guard.wanted(keys(begin, begin + 8), step)
        left = (begin - capacity) % working_set
        guard.evicted(keys(left, left + 8))


def test_a_working_set_over_capacity_is_thrashing_and_new_work_is_not():
    guard = ThrashGuard(800, secret=1)
    cycle(guard, working_set=1200, capacity=800, rounds=5)
    assert guard.active
    assert guard.episodes == 1
    assert guard.share > 0.9
    for begin in range(10_000, 20_000, 8):
        guard.wanted(keys(begin, begin + 8), begin)
        guard.evicted(keys(begin, begin + 8))
    assert not guard.active
    assert guard.share == 0


def test_blocks_that_left_long_ago_are_no_sign_of_thrashing():
    guard = ThrashGuard(100, secret=1)
    guard.evicted(keys(0, 100))
    for begin in range(1000, 4000, 100):
        guard.evicted(keys(begin, begin + 100))
    assert guard.wanted(keys(0, 100), 0) == 0


def test_the_state_has_hysteresis():
    limits = Limits(begin=0.5, end=0.25)
    shares = (0.2, 0.4, 0.6)
    assert [judge(share, active=False, limits=limits) for share in shares] == [False, False, True]
    assert [judge(share, active=True, limits=limits) for share in shares] == [False, True, True]


def test_a_share_between_the_limits_never_oscillates():
    guard = ThrashGuard(64, secret=1, limits=Limits(window=0.125, window_min=8))
    guard.evicted(keys(0, 8))
    guard.wanted(keys(0, 8), 0)
    assert guard.active
    for begin in range(100, 4100, 8):
        guard.evicted(keys(begin, begin + 3))
        guard.wanted(keys(begin, begin + 8), begin)
        assert guard.share == 3 / 8
        assert guard.active
    assert guard.episodes == 1


def test_nothing_is_judged_before_a_window_is_full():
    guard = ThrashGuard(1000, secret=1)
    guard.evicted(keys(0, 100))
    guard.wanted(keys(0, 100), 0)
    assert (guard.share, guard.active) == (0, False)


def thrashing(capacity: int = 800, step_ns: int = SECOND_NS) -> ThrashGuard:
    """A guard that has just begun to be active, when a step of 8 blocks takes this long."""
    guard = ThrashGuard(capacity, secret=1)
    guard.evicted(keys(0, capacity))
    for step in range(capacity // 8):
        guard.wanted(keys(step * 8, step * 8 + 8), step * step_ns)
        if guard.active:
            return guard
    raise AssertionError("it never began")


def test_what_was_used_within_twice_the_residence_time_is_protected():
    assert thrashing(800).protect_ns == pytest.approx(200 * SECOND_NS, rel=0.1)
    assert thrashing(800, step_ns=1).protect_ns == PROTECT_NS_MIN
    assert thrashing(800, step_ns=1000 * SECOND_NS).protect_ns == PROTECT_NS_MAX


def test_a_few_blocks_say_nothing_of_a_small_tier():
    guard = ThrashGuard(4, secret=1)
    guard.evicted(keys(0, 4))
    for second in range(7):
        guard.wanted(keys(0, 4), second)
    assert not guard.active
    guard.wanted(keys(0, 4), 8)
    assert guard.active


def test_when_to_ask_again_follows_the_tiers_speed():
    guard = thrashing(800)
    assert guard.retry_after_ms(8) == pytest.approx(1000, rel=0.1)
    assert guard.retry_after_ms(800) == 10_000
    assert thrashing(800, step_ns=1).retry_after_ms(1) == 10


def test_a_guard_that_nobody_asks_leaves_by_itself():
    guard = thrashing(800)
    now_ns = guard.protect_ns
    guard.tick(now_ns)
    assert guard.active
    guard.tick(now_ns + 100 * SECOND_NS)
    assert not guard.active
    assert guard.episodes == 1


def test_a_load_that_is_refused_keeps_the_guard_active():
    guard = thrashing(800)
    for second in range(30, 3000):
        guard.wanted(keys(0, 8), second * SECOND_NS)
        guard.tick(second * SECOND_NS)
    assert guard.active


def test_a_tier_of_another_size_is_watched_by_its_size():
    guard = ThrashGuard(64, secret=1)
    guard.evicted(keys(0, 8))
    guard.resize(60)
    assert guard.wanted(keys(0, 8), 0) == 8
    guard.resize(6400)
    assert guard.wanted(keys(0, 8), 0) == 0
    assert guard.capacity == 6400


@pytest.mark.parametrize("limits", [Limits(begin=0.2, end=0.3), Limits(begin=1.1), Limits(window=0)])
def test_limits_out_of_order_are_refused(limits):
    with pytest.raises(ValueError, match="end <= begin"):
        ThrashGuard(10, 1, limits=limits)
