from __future__ import annotations

import numpy as np
import pytest

from kvtierd.policy.heat import UNITS, heat_of, touch_heat

HOUR = 3600


def columns(rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(rows, np.uint16), np.zeros(rows, np.uint32)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_use_counts_one_and_half_of_it_after_a_half_life():
    heat, since = columns()
    touch_heat(heat, since, rows(2, 2, 5), 1000, HOUR)
    assert heat_of(heat, since, rows(2, 5, 0), 1000, HOUR).tolist() == [2, 1, 0]
    assert heat_of(heat, since, rows(2, 5, 0), 1000 + HOUR, HOUR).tolist() == [1, 0.5, 0]
    touch_heat(heat, since, rows(2), 1000 + HOUR, HOUR)
    assert heat_of(heat, since, rows(2), 1000 + HOUR, HOUR).tolist() == [2]


def test_looking_changes_nothing():
    heat, since = columns()
    touch_heat(heat, since, rows(1), 50, HOUR)
    before = heat.copy(), since.copy()
    heat_of(heat, since, rows(1), 99_999, HOUR)
    assert np.array_equal(heat, before[0])
    assert np.array_equal(since, before[1])


def test_steady_use_settles_at_what_the_sum_says():
    heat, since = columns()
    for step in range(200):
        touch_heat(heat, since, rows(3), step * HOUR, HOUR)
    assert heat_of(heat, since, rows(3), 199 * HOUR, HOUR)[0] == pytest.approx(2, abs=1 / UNITS)


def test_it_saturates_and_decays_to_nothing():
    heat, since = columns()
    touch_heat(heat, since, np.zeros(5000, np.int32), 0, HOUR)
    assert heat_of(heat, since, rows(0), 0, HOUR)[0] == pytest.approx(65535 / UNITS)
    assert heat_of(heat, since, rows(0), 4_000_000_000, HOUR)[0] == 0


def test_a_clock_read_out_of_order_makes_nothing_hot_or_cold():
    heat, since = columns()
    touch_heat(heat, since, rows(0), 100, HOUR)
    assert heat_of(heat, since, rows(0), 90, HOUR).tolist() == [1]


def test_columns_may_be_fields_of_records():
    records = np.zeros(4, np.dtype([("key", "u8"), ("heat", "u2"), ("since", "u4")]))
    touch_heat(records["heat"], records["since"], rows(1), 7, HOUR)
    assert records["heat"].tolist() == [0, UNITS, 0, 0]
    assert records["since"].tolist() == [0, 7, 0, 0]
