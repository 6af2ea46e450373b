"""What is written to nvme: per prefix, at the second use, within a budget."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.policy.admission import DAY_NS, Admission, AdmitAll, Budgeted, SecondAccess
from kvtierd.policy.key_filter import WAYS, KeyFilter


def keys(*names: int) -> np.ndarray:
    return np.array(names, np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def marks(text: str) -> np.ndarray:
    return np.array([letter == "+" for letter in text], np.bool_)


def nothing(count: int) -> np.ndarray:
    return np.zeros(count, np.bool_)


def admit(admission: Admission, again: str, there: str = "", block_bytes: int = 4096, now_ns: int = 0) -> int:
    return admission.admit(marks(again), marks(there or "-" * len(again)), block_bytes, now_ns)


def test_admit_all_admits_all():
    assert admit(AdmitAll(), "-----") == 5


def test_case_29_a_prefix_used_once_is_not_written():
    assert admit(SecondAccess(), "---------") == 0
    assert admit(SecondAccess(), "+++++++++") == 9


def test_a_leading_run_is_admitted_and_never_a_block_behind_a_hole():
    assert admit(SecondAccess(whole_share=1), "++-++") == 2


def test_most_of_a_request_used_before_takes_the_rest_along():
    assert admit(SecondAccess(), "++++++----") == 10
    assert admit(SecondAccess(), "++--------") == 2


def test_what_is_on_nvme_stays_admitted_whatever_was_seen_of_it():
    assert admit(SecondAccess(), "---------", "++-------") == 2
    assert admit(SecondAccess(), "--+------", "++-------") == 3


def most_in_a_day(written: list[tuple[int, int]]) -> int:
    return max(sum(n for when, n in written if 0 <= when - begin < DAY_NS) for begin, _ in written)


@pytest.mark.parametrize("burst", [0.05, 0.25, 0.9])
def test_case_29_a_daily_budget_bounds_what_is_written_in_any_24_hours(burst):
    rng = np.random.default_rng(3)
    day = Budgeted(AdmitAll(), bytes_per_day=1000 * 4096, now_ns=0, burst=burst)
    written = []
    for step in np.sort(rng.integers(0, 6 * 24 * 60, 1500)).tolist():
        now_ns, asked = step * DAY_NS // (24 * 60), int(rng.integers(1, 40))
        written.append((now_ns, day.admit(nothing(asked), nothing(asked), 4096, now_ns)))
    assert most_in_a_day(written) <= 1000
    assert sum(n for _, n in written) > 6 * 900 * (1 - burst)


def test_a_budget_takes_a_prefix_whole_or_not_at_all():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=0, burst=0.1)
    assert admit(budget, "-------") == 7
    assert admit(budget, "-------") == 0
    assert admit(budget, "-------", "++++---") == 7
    assert budget.refused_blocks == 7


def test_a_hole_is_paid_for_by_its_blocks_alone():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=0, burst=0.1)
    assert admit(budget, "-" * 20, "++-+++++++++++++++++") == 20
    assert budget.level_bytes(0) == 9 * 4096
    assert admit(budget, "-" * 20, "++-+++++++++--------") == 20
    assert admit(budget, "-" * 20, "++-+++++++++++++++++") == 2


def test_a_prefix_larger_than_the_full_budget_gets_the_part_that_it_can_pay():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=0, burst=0.1)
    assert admit(budget, "-" * 30) == 10
    assert admit(budget, "-" * 30, "+" * 10 + "-" * 20) == 10


def test_where_the_budget_is_short_only_what_is_used_again_is_written():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=0, burst=0.1, scarce=SecondAccess())
    assert admit(budget, "-" * 6) == 6
    assert admit(budget, "--") == 0
    assert admit(budget, "++") == 2


def test_what_else_is_written_has_to_be_made_up_for():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=0, burst=0.5)
    budget.charge(60 * 4096)
    assert admit(budget, "-") == 0
    assert admit(budget, "-", "+") == 1
    assert admit(budget, "-", now_ns=DAY_NS // 5) == 0
    assert admit(budget, "-", now_ns=DAY_NS // 4) == 1


def test_time_that_stands_still_or_goes_back_brings_nothing():
    budget = Budgeted(AdmitAll(), bytes_per_day=100 * 4096, now_ns=DAY_NS, burst=0.1)
    assert admit(budget, "-" * 10, now_ns=DAY_NS) == 10
    assert admit(budget, "-", now_ns=0) == 0


@pytest.mark.parametrize(("daily", "burst"), [(0, 0.5), (-1, 0.5), (1, 0), (1, 1)])
def test_a_budget_out_of_range_is_refused(daily, burst):
    with pytest.raises(ValueError, match="bytes_per_day"):
        Budgeted(AdmitAll(), daily, 0, burst)


def test_blocks_without_bytes_and_shares_out_of_range_are_refused():
    with pytest.raises(ValueError, match="block_bytes"):
        admit(Budgeted(AdmitAll(), 1, 0), "-", block_bytes=0)
    with pytest.raises(ValueError, match="whole_share"):
        SecondAccess(whole_share=0)


def test_all_are_admissions_and_admit_nothing_of_nothing():
    policies: list[Admission] = [AdmitAll(), SecondAccess(), Budgeted(AdmitAll(), 1, 0)]
    assert all(policy.admit(nothing(0), nothing(0), 1, 0) == 0 for policy in policies)


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
