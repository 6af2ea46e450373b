"""Clocks."""

from __future__ import annotations

import time

import pytest

from kvtierd.core.clock import Clock, ManualClock, SystemClock


def test_the_system_clock_is_the_kernels_monotonic_clock() -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    now = SystemClock().now_ns()
    assert before <= now <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def test_a_manual_clock_moves_only_when_told() -> None:
    clock: Clock = ManualClock(start_ns=5)
    assert isinstance(clock, ManualClock)
    assert [clock.now_ns(), clock.now_ns()] == [5, 5]
    clock.advance(1.5)
    assert clock.now_ns() == 1_500_000_005
    clock.advance(365 * 24 * 3600)
    assert clock.now_ns() == 31_536_001_500_000_005


def test_a_monotonic_clock_never_goes_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match=r"-0\.5 s"):
        clock.advance(-0.5)
    assert clock.now_ns() == 1
