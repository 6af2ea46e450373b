"""The thrash guard's state: no share makes it oscillate, and it always ends when the load does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.policy.thrash import PROTECT_NS_MAX, PROTECT_NS_MIN, SECOND_NS, Limits, ThrashGuard, judge

shares = st.floats(0, 1)
limits = st.tuples(shares, shares).map(lambda pair: Limits(begin=max(pair), end=min(pair)))
WINDOW = 40


@given(limits, shares, st.booleans())
def test_a_steady_share_changes_the_state_once_at_most(bounds, share, active):
    states = [active]
    for _ in range(5):
        states.append(judge(share, active=states[-1], limits=bounds))
    assert states[1:] == [states[1]] * 5


@given(limits, st.booleans(), st.lists(shares, max_size=50))
def test_shares_between_the_limits_change_nothing(bounds, active, noise):
    for share in noise:
        between = bounds.end + share * (bounds.begin - bounds.end)
        if bounds.end < between <= bounds.begin:
            assert judge(between, active=active, limits=bounds) == active


def window_of(guard: ThrashGuard, refetched: int, serial: int, now_ns: int) -> None:
    """One window of which so many blocks have just been evicted."""
    keys = (np.arange(WINDOW, dtype=np.uint64) + np.uint64(1000 * serial)) * np.uint64(0x9E3779B97F4A7C15)
    guard.evicted(keys[:refetched])
    guard.wanted(keys, now_ns)


@given(st.lists(st.tuples(st.integers(0, WINDOW), st.integers(0, 10**12)), max_size=60))
def test_an_episode_begins_only_above_one_limit_and_ends_only_below_the_other(windows):
    guard = ThrashGuard(1600, secret=1, limits=Limits(window=WINDOW / 1600, window_min=1))
    now_ns, episodes = 0, 0
    for serial, (refetched, gap_ns) in enumerate(windows):
        now_ns += gap_ns
        was = guard.active
        window_of(guard, refetched, serial, now_ns)
        if guard.active and not was:
            episodes += 1
            assert refetched / WINDOW > 0.5
        if was and not guard.active:
            assert refetched / WINDOW <= 0.25
        assert PROTECT_NS_MIN <= guard.protect_ns <= PROTECT_NS_MAX
        assert 10 <= guard.retry_after_ms(refetched + 1) <= 10_000
    assert guard.episodes == episodes


@given(st.lists(st.integers(0, WINDOW), min_size=1, max_size=30), st.integers(0, WINDOW - 1))
def test_without_a_load_it_always_ends(windows, rest):
    guard = ThrashGuard(1600, secret=1, limits=Limits(window=WINDOW / 1600, window_min=1))
    for serial, refetched in enumerate(windows):
        window_of(guard, refetched, serial, serial * SECOND_NS)
    keys = np.arange(rest, dtype=np.uint64) + np.uint64(1 << 40)
    guard.evicted(keys)
    guard.wanted(keys, len(windows) * SECOND_NS)
    now_ns = len(windows) * SECOND_NS
    for _ in range(2):  # the window under way, and one without anything
        now_ns += PROTECT_NS_MAX + 1
        guard.tick(now_ns)
    assert not guard.active
