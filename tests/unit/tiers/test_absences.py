"""How long blocks stay away from host is noted when they come back, once."""

from __future__ import annotations

import numpy as np

from kvtierd.core.clock import ManualClock
from kvtierd.tiers.absences import Absences


def _rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_time_from_eviction_to_next_use_is_counted_once() -> None:
    clock = ManualClock()
    absences = Absences(1024, clock)
    absences.left(_rows(1, 2, 3))
    clock.advance(5)
    absences.back(_rows(2, 3, 7))
    absences.back(_rows(2, 3, 7))
    assert absences.seconds.count == 2
    assert absences.seconds.quantile(1) == 10.0
    assert absences.seconds.sum_ns == 10_000_000_000
    clock.advance(3600)
    absences.back(_rows(1))
    assert absences.seconds.counts[absences.seconds.bounds_s.index(7200.0)] == 1


def test_block_that_leaves_again_is_away_since_then() -> None:
    clock = ManualClock()
    absences = Absences(1024, clock)
    absences.left(_rows(1))
    clock.advance(100)
    absences.left(_rows(1))
    clock.advance(0.05)
    absences.back(_rows(1))
    assert absences.seconds.quantile(1) == 0.1
