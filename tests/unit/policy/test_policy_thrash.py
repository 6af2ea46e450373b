from __future__ import annotations

import numpy as np
import pytest

from kvtierd.policy.thrash import Limits, ThrashGuard, judge


def keys(begin: int, end: int) -> np.ndarray:
    return np.arange(begin, end, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def cycle(guard: ThrashGuard, working_set: int, capacity: int, rounds: int) -> None:
    """Use a working set in turn through a tier that evicts the oldest."""
    for step in range(rounds * working_set // 8):
        begin = step * 8 % working_set
        guard.inserted(keys(begin, begin + 8))
        left = (begin - capacity) % working_set
        guard.evicted(keys(left, left + 8))


def test_a_working_set_over_capacity_is_thrashing_and_new_work_is_not():
    guard = ThrashGuard(800, secret=1)
    cycle(guard, working_set=1200, capacity=800, rounds=5)
    assert guard.active
    assert guard.episodes == 1
    assert guard.share > 0.9
    for begin in range(10_000, 20_000, 8):
        guard.inserted(keys(begin, begin + 8))
        guard.evicted(keys(begin, begin + 8))
    assert not guard.active
    assert guard.share == 0


def test_blocks_that_left_long_ago_are_no_sign_of_thrashing():
    guard = ThrashGuard(100, secret=1)
    guard.evicted(keys(0, 100))
    for begin in range(1000, 4000, 100):
        guard.evicted(keys(begin, begin + 100))
    assert guard.inserted(keys(0, 100)) == 0


def test_the_state_has_hysteresis():
    limits = Limits(begin=0.5, end=0.25)
    shares = (0.2, 0.4, 0.6)
    assert [judge(share, active=False, limits=limits) for share in shares] == [False, False, True]
    assert [judge(share, active=True, limits=limits) for share in shares] == [False, True, True]


def test_a_share_between_the_limits_never_oscillates():
    guard = ThrashGuard(64, secret=1, limits=Limits(window=0.125))
    guard.evicted(keys(0, 8))
    guard.inserted(keys(0, 8))
    assert guard.active
    for begin in range(100, 4100, 8):
        guard.evicted(keys(begin, begin + 3))
        guard.inserted(keys(begin, begin + 8))
        assert guard.share == 3 / 8
        assert guard.active
    assert guard.episodes == 1


def test_nothing_is_judged_before_a_window_is_full():
    guard = ThrashGuard(1000, secret=1)
    guard.evicted(keys(0, 100))
    guard.inserted(keys(0, 100))
    assert (guard.share, guard.active) == (0, False)


def test_when_to_ask_again_follows_the_tiers_speed():
    guard = ThrashGuard(10, secret=1)
    assert guard.retry_after_ms(1_000_000_000, 2e9) == 500
    assert guard.retry_after_ms(1, 2e9) == 10
    assert guard.retry_after_ms(1 << 50, 2e9) == 10_000
    assert guard.retry_after_ms(1, 0) == 1000


@pytest.mark.parametrize("limits", [Limits(begin=0.2, end=0.3), Limits(begin=1.1), Limits(window=0)])
def test_limits_out_of_order_are_refused(limits):
    with pytest.raises(ValueError, match="end <= begin"):
        ThrashGuard(10, 1, limits)
