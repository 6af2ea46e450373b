"""Whatever is asked: a run is admitted, what is there stays, and no 24 hours write more than the budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.policy.admission import DAY_NS, AdmitAll, Budgeted, SecondAccess, leading

BLOCK = 4096
DAILY = 50

blocks = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30)
gaps_ns = st.integers(0, DAY_NS // 3)
policies = st.sampled_from([AdmitAll(), SecondAccess(), SecondAccess(whole_share=1)])


def columns(pairs: list[tuple[bool, bool]]) -> tuple[np.ndarray, np.ndarray]:
    again, there = (np.array([pair[i] for pair in pairs], np.bool_) for i in (0, 1))
    return again, there


@given(policies, blocks)
def test_an_answer_is_a_run_that_keeps_what_is_there(policy, pairs):
    again, there = columns(pairs)
    admitted = policy.admit(again, there, BLOCK, 0)
    assert leading(there) <= admitted <= len(pairs)


@given(blocks)
def test_second_access_admits_what_was_used_before_and_never_less_for_more_uses(pairs):
    again, there = columns(pairs)
    admitted = SecondAccess().admit(again, there, BLOCK, 0)
    assert admitted >= leading(again | there)
    more = again.copy()
    more[: len(pairs) // 2] = True
    assert SecondAccess().admit(more, there, BLOCK, 0) >= admitted


@given(
    policies,
    st.one_of(st.none(), policies),
    st.floats(0.01, 0.99),
    st.lists(st.tuples(blocks, gaps_ns), max_size=40),
)
def test_no_24_hours_write_more_than_the_budget(policy, scarce, burst, requests):
    budget = Budgeted(policy, DAILY * BLOCK, 0, burst, scarce)
    now_ns, written = 0, []
    for pairs, gap_ns in requests:
        now_ns += gap_ns
        again, there = columns(pairs)
        admitted = budget.admit(again, there, BLOCK, now_ns)
        assert leading(there) <= admitted <= len(pairs)
        written.append((now_ns, int(np.count_nonzero(~there[:admitted]))))
    for begin_ns, _ in written:
        assert sum(count for when_ns, count in written if 0 <= when_ns - begin_ns < DAY_NS) <= DAILY
