from __future__ import annotations

import pytest

from kvtierd.policy.watermarks import to_free


def test_nothing_is_freed_below_the_high_mark():
    assert to_free(80, 100, 0.8, 0.75, active=False) == (0, False)


def test_above_the_high_mark_it_frees_down_to_the_low_one():
    assert to_free(81, 100, 0.8, 0.75, active=False) == (6, True)


def test_it_goes_on_between_the_marks_until_the_low_one():
    assert to_free(78, 100, 0.8, 0.75, active=True) == (3, True)
    assert to_free(75, 100, 0.8, 0.75, active=True) == (0, False)


def test_an_empty_or_absent_tier_frees_nothing():
    assert to_free(0, 0, 0.8, 0.75, active=False) == (0, False)
    assert to_free(0, 100, 0.0, 0.0, active=True) == (0, False)


def test_a_tier_that_shrank_below_its_content_frees():
    assert to_free(10, 0, 0.8, 0.7, active=False) == (10, True)


@pytest.mark.parametrize(("high", "low"), [(0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (float("nan"), 0.1)])
def test_marks_out_of_order_are_named(high, low):
    with pytest.raises(ValueError, match="watermarks are low"):
        to_free(1, 2, high, low, active=False)


def test_negative_counts_are_named():
    with pytest.raises(ValueError, match="used is -1"):
        to_free(-1, 2, 0.8, 0.7, active=False)
