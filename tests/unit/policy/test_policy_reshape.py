"""What the policy of extents decides, from uses alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.policy.reshape import Decision, Evidence, Shape, decide


def asked(*blocks, shape=Shape.WHOLE):
    return decide(np.array(blocks, np.uint32), [shape] * len(blocks))


@pytest.mark.parametrize(
    ("uses", "parts"),
    [
        ([0, 0, 0, 0, 0, 20, 0, 0], (4, 1, 1, 2)),
        ([20, 20, 0, 0, 0, 0, 0, 0], (2, 2, 4)),
        ([0, 0, 0, 0, 9, 20, 20, 9], (4, 4)),
        ([20, 1, 1, 0], (1, 1, 2)),
        ([0, 20, 0], (1, 1, 1)),
        ([20, 0], (1, 1)),
    ],
)
def test_a_block_whose_uses_are_concentrated_is_split_around_them(uses, parts):
    assert asked(uses) == Decision(1, parts)


@pytest.mark.parametrize("uses", [[20, 0, 0, 20], [15, 0, 0, 0], [20, 10, 10, 10], [0, 0, 0, 0], [0, 20, 20, 0]])
def test_a_block_without_evidence_stays(uses):
    """Spread over it, too few, not concentrated enough, or across what would be the ends of extents."""
    assert asked(uses) is None


def test_neighbours_that_are_used_together_are_merged():
    assert asked([20, 20], [20, 20]) == Decision(2, (4,))
    assert asked([20, 20], [20, 19], [20, 20], [20, 20]) == Decision(4, (8,))
    assert asked([20, 20], [20, 20], [20, 20]) == Decision(2, (4,))
    assert asked([20] * 8, [20] * 8) is None
    assert asked([20, 20], [9, 9]) is None
    assert decide(np.full((2, 2), 20, np.uint32), [Shape.WHOLE, Shape.SPLIT]) is None


def test_what_no_longer_holds_is_undone():
    assert asked([20, 20, 20, 20], shape=Shape.SPLIT) == Decision(1, (4,))
    assert asked([20, 0, 0, 0], shape=Shape.SPLIT) is None
    assert asked([20, 20], [20, 20], shape=Shape.MERGED) is None
    assert asked([3, 3], [20, 20], shape=Shape.MERGED) == Decision(2, (2, 2))
    assert asked([3, 3], [9, 9], shape=Shape.MERGED) is None


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=2), st.integers(1, 30))
def test_decisions_cover_their_blocks_and_need_their_evidence(uses, least):
    decision = decide(np.array(uses, np.uint32), [Shape.WHOLE] * len(uses), Evidence(uses_min=least))
    if decision is None:
        return
    assert max(uses[0]) >= least
    assert sum(decision.parts) == 4 * decision.blocks
    assert all(part in (1, 2, 4, 8) for part in decision.parts)
    begin = 0
    for part in decision.parts:
        assert begin % part == 0
        begin += part


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=8))
def test_a_decision_is_stable_without_new_uses(uses):
    """After a change uses are forgotten: nothing more is decided until there are as many again."""
    assert decide(np.zeros((1, 8), np.uint32), [Shape.SPLIT]) is None
    first = asked(uses)
    assert first == asked(uses)
