"""What is written to nvme: per prefix, at the second use, within a budget."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.policy.admission import DAY_NS, Admission, AdmitAll, Budgeted, SecondAccess
from kvtierd.policy.key_filter import WAYS, KeyFilter


def keys(*names: int) -> np.ndarray:
    return np.array(names, np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def prefix(begin: int, end: int) -> np.ndarray:
    return keys(*range(begin, end))


def test_admit_all_admits_all():
    assert AdmitAll().admit(prefix(0, 5), 2, 4096, 0) == 5


def test_case_29_a_prefix_used_once_is_not_written():
    admission = SecondAccess(1000, secret=3)
    assert admission.admit(prefix(0, 9), 0, 4096, 0) == 0
    assert admission.admit(prefix(0, 9), 0, 4096, 0) == 9


def test_a_leading_run_is_admitted_and_never_a_block_behind_a_hole():
    admission = SecondAccess(1000, secret=3, whole_share=1)
    admission.admit(prefix(0, 4), 0, 4096, 0)
    assert admission.admit(keys(0, 1, 77, 2, 3), 0, 4096, 0) == 2


def test_most_of_a_request_used_before_takes_the_rest_along():
    admission = SecondAccess(1000, secret=3)
    admission.admit(prefix(0, 6), 0, 4096, 0)
    assert admission.admit(prefix(0, 10), 0, 4096, 0) == 10
    assert admission.admit(np.concatenate([prefix(0, 2), prefix(50, 60)]), 0, 4096, 0) == 2


def test_what_is_on_nvme_stays_admitted_whatever_the_filter_knows():
    assert SecondAccess(1000, secret=3).admit(prefix(0, 9), 2, 4096, 0) == 2


def test_case_29_a_daily_budget_bounds_what_is_written():
    day = Budgeted(AdmitAll(), bytes_per_day=1000 * 4096, now_ns=0, burst=0.1)
    written = 0
    for hour in range(24 * 4):
        written += day.admit(prefix(100 * hour, 100 * hour + 60), 0, 4096, hour * DAY_NS // 24)
    assert 4000 - 60 <= written <= 4000 + 100 + 60
    assert day.refused_blocks == 24 * 4 * 60 - written


def test_a_budget_takes_a_prefix_whole_or_not_at_all():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=0, burst=0.1)
    assert budget.admit(prefix(0, 7), 0, 4096, 0) == 7
    assert budget.admit(prefix(10, 17), 0, 4096, 0) == 0
    assert budget.admit(prefix(10, 17), 4, 4096, 0) == 7
    assert budget.refused_blocks == 7


def test_a_prefix_larger_than_the_full_budget_gets_the_part_that_it_can_pay():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=0, burst=0.1)
    assert budget.admit(prefix(0, 30), 0, 4096, 0) == 10
    assert budget.admit(prefix(0, 30), 10, 4096, 0) == 10


def test_time_that_stands_still_or_goes_back_brings_nothing():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=DAY_NS, burst=0.1)
    assert budget.admit(prefix(0, 10), 0, 4096, DAY_NS) == 10
    assert budget.admit(prefix(10, 11), 0, 4096, 0) == 0


@pytest.mark.parametrize(("daily", "burst"), [(0, 0.5), (-1, 0.5), (1, 0), (1, 1.5)])
def test_a_budget_out_of_range_is_refused(daily, burst):
    with pytest.raises(ValueError, match="bytes_per_day"):
        Budgeted(AdmitAll(), daily, 0, burst)


def test_blocks_without_bytes_and_shares_out_of_range_are_refused():
    with pytest.raises(ValueError, match="block_bytes"):
        Budgeted(AdmitAll(), 1, 0).admit(prefix(0, 1), 0, 0, 0)
    with pytest.raises(ValueError, match="whole_share"):
        SecondAccess(10, 1, whole_share=0)


def test_all_are_admissions():
    policies: list[Admission] = [AdmitAll(), SecondAccess(10, 1), Budgeted(AdmitAll(), 1, 0)]
    assert all(policy.admit(prefix(0, 0), 0, 1, 0) == 0 for policy in policies)


def test_a_filter_remembers_about_as_many_keys_as_it_was_made_for():
    known = KeyFilter(1024, secret=5)
    rng = np.random.default_rng(1)
    stream = rng.integers(0, 1 << 64, 5000, np.uint64)
    assert not known.add(stream).any()
    assert known.contains(stream[-256:]).mean() > 0.95
    assert not known.contains(stream[:2000]).any()
    assert known.capacity == 1024


def test_a_key_seen_again_is_young_again():
    known = KeyFilter(WAYS, secret=5)
    known.add(keys(1))
    for name in range(2, 40):
        known.add(keys(name))
        assert known.add(keys(1)).tolist() == [True]
    assert known.contains(keys(1, 39, 3)).tolist() == [True, True, False]


def test_another_secret_is_another_filter():
    stream = np.random.default_rng(2).integers(0, 1 << 64, 64, np.uint64)
    first, second = KeyFilter(64, secret=1), KeyFilter(64, secret=2)
    first.add(stream)
    second.add(stream)
    assert not np.array_equal(first._cells, second._cells)


@pytest.mark.parametrize("size", [0, -3, 1 << 31])
def test_a_filter_of_no_size_is_refused(size):
    with pytest.raises(ValueError, match="keys_max"):
        KeyFilter(size, 1)
