"""The model of returns: what it distinguishes, remembers and concludes."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.index.jit import compiled
from kvtierd.policy import history, kinds
from kvtierd.policy.ages import BINS, RELATIVE_ONE, TICK_SHIFT, age_bin, bin_widths, elapsed, relative_bin, ticks
from kvtierd.policy.history import MATCHED, PAUSE, TURN
from kvtierd.policy.rates import LEVEL_MAX, LEVELS_AN_OCTAVE, PACE_LEVELS, level_of
from kvtierd.policy.returns import RECORDS_MIN, ReturnModel

SECOND = 1_000_000_000


@compiled("int64(int64)")
def bin_of(age: int) -> int:
    return age_bin(age)


@compiled("int64(int64, int64)")
def relative_bin_of(age: int, pace: int) -> int:
    return relative_bin(age, pace)


@compiled("int64(uint32, uint32)")
def elapsed_between(since: int, now: int) -> int:
    return elapsed(since, now)


@compiled("int64(int16[:, ::1], int64, int64, int64)")
def level(levels, kind: int, pace: int, age: int) -> int:
    return level_of(levels, kind, pace, age)


def keys(*names: int) -> np.ndarray:
    return np.array([name * 0x9E3779B97F4A7C15 % (1 << 64) for name in names], np.uint64)


def model(records: int = 4096) -> ReturnModel:
    return ReturnModel(100, seed=7, records=records)


def _fit_now(model: ReturnModel) -> None:
    """Make the levels from all that was observed, due or not."""
    model._state[history.DUE] = 0
    model._fit_if_due()


def test_bins_of_age_are_half_octaves():
    edges = np.concatenate([[0], np.cumsum(bin_widths()[0])])
    for age in [*range(200), 10_000, 65_535, 65_536, 2**31, 2**32 - 1]:
        expected = min(BINS - 1, int(np.searchsorted(edges, age, side="right")) - 1) if age else 0
        assert bin_of(age) == expected, age


def test_a_relative_bin_is_that_of_one_where_age_and_pace_are_equal():
    for age in (3, 1000, 2**30):
        assert relative_bin_of(age, bin_of(age)) == RELATIVE_ONE
        assert relative_bin_of(2 * age, bin_of(age)) == RELATIVE_ONE + 2
    assert relative_bin_of(0, 63) == 0
    assert relative_bin_of(2**32 - 1, 0) == BINS - 1


def test_ages_survive_the_wrap_of_time():
    late = ticks((1 << (32 + TICK_SHIFT)) - 1)
    assert late == 0xFFFFFFFF
    assert elapsed_between(late, ticks((1 << (32 + TICK_SHIFT)) + (9 << TICK_SHIFT))) == 10


def test_every_kind_has_a_coarser_one_above_it_up_to_its_familys_root():
    parents = kinds.parents()
    assert ((parents > np.arange(kinds.NODES)) | (parents == kinds.NO_PARENT)).all()
    for kind in range(kinds.KINDS):
        path = [kind]
        while parents[path[-1]] != kinds.NO_PARENT:
            path.append(int(parents[path[-1]]))
        assert len(path) == (4 if kind < kinds.SHARED else 3)
        assert (path[-1] == kinds.ANY_SHARED) == (kind >= kinds.SHARED)


def test_a_conversation_that_goes_on_has_a_turn_and_a_pause():
    known = model()
    first = known.observe(keys(1, 2, 3), 0, 0)
    assert first.story[[TURN, PAUSE, MATCHED]].tolist() == [0, 0, 0]
    second = known.observe(keys(1, 2, 3, 4), 3, 100 * SECOND)
    third = known.observe(keys(1, 2, 3, 4, 5, 6), 4, 300 * SECOND)
    assert [usage.story[TURN] for usage in (first, second, third)] == [0, 1, 2]
    assert third.story[MATCHED] == 4
    pauses = [ticks(100 * SECOND), (ticks(100 * SECOND) + ticks(300 * SECOND) - ticks(100 * SECOND)) // 2]
    assert [usage.story[PAUSE] for usage in (second, third)] == pauses


def test_the_last_block_may_differ_where_it_was_not_full():
    known = model()
    known.observe(keys(1, 2, 100), 0, 0)
    assert known.observe(keys(1, 2, 3, 101), 2, SECOND).story[TURN] == 1


def test_prompts_that_share_a_beginning_are_no_turns_of_each_other():
    known = model()
    known.observe(keys(1, 2, 3, 4, 5), 0, 0)
    usage = known.observe(keys(1, 2, 13, 14), 2, SECOND)
    assert usage.story[[TURN, MATCHED]].tolist() == [0, 2]
    assert (usage.kinds[:2] >= kinds.SHARED).all()
    assert (usage.kinds[2:] < kinds.SHARED).all()
    # Two questions about one document: the second does not go on where the first did.
    known.observe(keys(21, 22, 23), 0, SECOND)
    assert known.observe(keys(21, 22, 24), 2, 2 * SECOND).story[TURN] == 1
    assert known.observe(keys(21, 22, 25), 2, 3 * SECOND).story[TURN] == 0


def test_a_prompt_that_is_repeated_is_shared_with_its_mean_interval_as_pace():
    known = model()
    for time in (0, 10, 50, 90):
        usage = known.observe(keys(1, 2), 0, time * SECOND)
    assert (usage.kinds >= kinds.SHARED).all()
    assert usage.paces.tolist() == [bin_of(ticks(30 * SECOND))] * 2


def test_a_request_told_of_again_with_its_answer_counts_once():
    known = model()
    known.observe(keys(1, 2, 3), 0, 0)
    asked = known.observe(keys(1, 2, 3, 4), 3, 100 * SECOND)
    closed = known._returned.sum()
    answered = known.observe(keys(1, 2, 3, 4, 5), 3, 120 * SECOND, again=asked)
    assert known._returned.sum() == closed
    assert answered.story[TURN] == asked.story[TURN] == 1
    assert known.observe(keys(1, 2, 3, 4, 5, 6), 5, 200 * SECOND).story[TURN] == 2


def test_the_oldest_observations_are_forgotten():
    known = model(records=16)
    known.observe(keys(1, 2, 3), 0, 0)
    for name in range(100, 120):
        known.observe(keys(name, name + 1000), 0, SECOND)
    assert known.observe(keys(1, 2, 3, 4), 0, 2 * SECOND).story[MATCHED] == 0
    assert known.observe(keys(119, 1119, 5), 0, 2 * SECOND).story[TURN] == 1


def test_before_anything_is_known_the_older_block_goes_first():
    levels = model().levels
    for kind in (0, kinds.SHARED - 1, kinds.SHARED, kinds.KINDS - 1):
        by_age = [level(levels, kind, 20, 1 << shift) for shift in range(2, 31)]
        assert by_age == sorted(by_age, reverse=True)
        assert by_age[0] > by_age[-1]


def test_levels_tell_how_soon_blocks_of_a_kind_return():
    """Pairs that return after 60 s beside prompts that never do: the first are worth waiting for."""
    known = model(records=1 << 14)
    for round_ in range(400):
        now = round_ * 7 * SECOND
        known.observe(keys(*(1_000_000 + 10 * round_ + i for i in range(9))), 0, now)
        known.observe(keys(10 * round_ + 1, 10 * round_ + 2), 0, now)
        if round_ >= 9:
            begun = 10 * (round_ - 9)
            known.observe(keys(begun + 1, begun + 2, begun + 3), 2, now)
    _fit_now(known)
    once = known.observe(keys(*range(7_000_001, 7_000_010)), 0, 400 * 7 * SECOND).kinds[4]
    pair = known.observe(keys(8_000_001, 8_000_002), 0, 400 * 7 * SECOND).kinds[0]
    fresh, waiting, late = (ticks(seconds * SECOND) for seconds in (1, 50, 900))
    assert level(known.levels, pair, 0, fresh) > level(known.levels, once, 0, fresh)
    assert level(known.levels, pair, 0, waiting) > level(known.levels, pair, 0, fresh), "the return is near"
    assert level(known.levels, pair, 0, late) < level(known.levels, pair, 0, fresh), "it has not come"


def test_a_shared_kinds_level_is_relative_to_the_blocks_own_pace():
    levels = model().levels
    quick, slow = bin_of(2**12), bin_of(2**20)
    at_pace = [level(levels, kinds.SHARED, pace, 2**shift) for pace, shift in ((quick, 12), (slow, 20))]
    assert at_pace[0] - at_pace[1] == PACE_LEVELS * (slow - quick) == 8 * LEVELS_AN_OCTAVE


def test_levels_are_in_range_whatever_was_observed():
    known = model(records=256)
    rng = np.random.default_rng(3)
    now = 0
    for _ in range(300):
        now += int(rng.choice([0, 1, SECOND, 100_000 * SECOND]))
        known.observe(rng.integers(0, 40, rng.integers(1, 9)).astype(np.uint64), 0, now)
    _fit_now(known)
    for kind in range(kinds.KINDS):
        assert 0 <= level(known.levels, kind, int(rng.integers(64)), int(rng.integers(1 << 32))) <= LEVEL_MAX


def test_the_same_requests_give_the_same_model():
    made = []
    for _ in range(2):
        known, rng = model(records=512), np.random.default_rng(5)
        for number in range(500):
            known.observe(rng.integers(0, 50, rng.integers(1, 20)).astype(np.uint64), 0, number * SECOND)
        made.append(known.levels.copy())
    assert np.array_equal(made[0], made[1])


def test_a_prompt_that_names_a_block_twice_does_no_harm():
    known = model(records=64)
    for number in range(50):
        usage = known.observe(keys(1, 1, 2, 1, 2, 2), 0, number * SECOND)
    assert usage.kinds.size == 6


def test_an_empty_request_is_nothing():
    known = model()
    assert known.observe(np.empty(0, np.uint64), 0, SECOND).kinds.size == 0


@pytest.mark.parametrize(
    ("wrong", "hits"), [(np.zeros(3, np.int64), 0), (np.zeros((2, 2), np.uint64), 0), (keys(1, 2), 3), (keys(1), -1)]
)
def test_what_is_no_request_is_refused(wrong, hits):
    with pytest.raises(ValueError, match=r"keys are|hits"):
        model().observe(wrong, hits, 0)


def test_a_model_needs_room():
    with pytest.raises(ValueError, match="records is 1"):
        ReturnModel(10, 1, records=1)
    assert ReturnModel(10, 1).bytes_used() < RECORDS_MIN * 80
