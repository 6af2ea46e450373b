"""What the scheduler's half plans: what to load, what to save, and when pages may go. Lookups are answered by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvtierd.connectors.vllm_announcements import Announcements
from kvtierd.connectors.vllm_keys import RequestKeys
from kvtierd.connectors.vllm_lookups import Found
from kvtierd.connectors.vllm_plan import ModelFacts
from kvtierd.connectors.vllm_scheduler import SchedulerSide, cacheable
from kvtierd.core.keys import block_keys
from kvtierd.testing.vllm_requests import FakeRequest, fake_step

FACTS = ModelFacts(model="m", revision="r")
DIGEST = bytes(32)


class Asked:
    """A lookup under way, answered when the test says so."""

    def __init__(self, question):
        self.question = question
        self.pending = True
        self.answer = None
        self.about_to_come = None

    def reply(self, blocks):
        keys = RequestKeys([DIGEST], 4)
        keys.grow(self.question.tokens, self.question.blocks)
        self.pending, self.answer = False, Found(self.question.facts(), keys, blocks)

    def wait(self):
        if self.about_to_come is not None:
            self.reply(self.about_to_come)

    def found(self):
        return self.answer


class ByHand:
    def __init__(self):
        self.asked = []

    def begin(self, question):
        self.asked.append(Asked(question))
        return self.asked[-1]


class Base:
    def __init__(self):
        self.renewed = 0

    def facts(self, adapter):
        assert adapter is None
        return FACTS

    def renew(self):
        self.renewed += 1


@pytest.fixture
def lookups():
    return ByHand()


@pytest.fixture
def side(lookups):
    return SchedulerSide(lookups, Base(), 4)


def keys_of(request, begin, end):
    return block_keys(DIGEST, request.all_token_ids, 4)[begin:end]


def test_the_engine_is_told_to_ask_again_until_there_is_an_answer(side, lookups):
    request = FakeRequest("r", list(range(18)))
    side.add(request)
    assert side.matched(request, 0) == (None, False)
    lookups.asked[0].reply(3)
    assert side.matched(request, 0) == (12, True)


def test_an_answer_that_is_about_to_come_costs_no_step(side, lookups):
    request = FakeRequest("r", list(range(18)))
    side.add(request)
    lookups.asked[0].about_to_come = 3
    assert side.matched(request, 0) == (12, True)


def test_a_lookup_past_its_deadline_is_a_miss(side, lookups):
    request = FakeRequest("r", list(range(18)))
    side.add(request)
    lookups.asked[0].pending = False
    assert side.matched(request, 0) == (0, False)


@pytest.mark.parametrize(
    ("tokens", "found", "computed", "matched"),
    [(18, 4, 0, 16), (16, 4, 0, 12), (17, 4, 0, 16), (18, 4, 8, 8), (18, 2, 8, 0), (18, 2, 12, 0), (3, 0, 0, 0)],
)
def test_whole_blocks_behind_what_the_engine_has_and_before_the_last_token(
    side, lookups, tokens, found, computed, matched
):
    request = FakeRequest("r", list(range(tokens)))
    side.add(request)
    lookups.asked[0].reply(found)
    assert side.matched(request, computed) == (matched, bool(matched))


def test_a_load_names_the_pages_behind_what_the_engine_has(side, lookups):
    request = FakeRequest("r", list(range(18)))
    side.add(request)
    lookups.asked[0].reply(4)
    side.matched(request, 4)
    side.allocated(request, [50, 51, 52, 53, 54], 12)
    (load,) = side.plan(fake_step({}, {})).loads
    assert (load.request_id, load.pages, load.facts) == ("r", (51, 52, 53), FACTS)
    assert np.array_equal(load.keys[0], keys_of(request, 1, 4))
    assert load.parents[0] == keys_of(request, 0, 1).tobytes()
    assert side.plan(fake_step({}, {})).loads == []


def test_blocks_are_saved_with_the_step_that_completes_them(side, lookups):
    request = FakeRequest("r", list(range(10)))
    pages = {"r": [7, 8, 9]}
    side.add(request)
    lookups.asked[0].reply(0)
    side.matched(request, 0)
    (save,) = side.plan(fake_step({"r": 9}, pages)).saves
    assert save.pages == (7, 8)
    assert np.array_equal(save.keys[0], keys_of(request, 0, 2))
    request.num_computed_tokens = 9
    assert side.plan(fake_step({"r": 1}, pages)).saves == []
    request.all_token_ids += [99, 98]
    request.num_computed_tokens = 11
    (save,) = side.plan(fake_step({"r": 1}, pages)).saves
    assert save.pages == (9,)
    assert np.array_equal(save.keys[0], keys_of(request, 2, 3))
    assert save.parents[0] == keys_of(request, 1, 2).tobytes()


def test_tokens_that_are_not_known_yet_are_not_saved(side, lookups):
    """Steps that are scheduled ahead, and drafts, count tokens that no request has yet."""
    request = FakeRequest("r", list(range(7)))
    side.add(request)
    lookups.asked[0].reply(0)
    (save,) = side.plan(fake_step({"r": 12}, {"r": [1, 2, 3]})).saves
    assert save.pages == (1,)


def test_what_is_stored_is_not_saved_again(side, lookups):
    request = FakeRequest("r", list(range(18)))
    side.add(request)
    lookups.asked[0].reply(3)
    (save,) = side.plan(fake_step({"r": 18}, {"r": [1, 2, 3, 4]})).saves
    assert save.pages == (4,)


def test_nothing_is_saved_before_the_lookup_has_answered_and_all_of_it_afterwards(side, lookups):
    request = FakeRequest("r", list(range(18)))
    pages = {"r": [1, 2, 3, 4]}
    side.add(request)
    lookups.asked[0].pending = False
    assert side.plan(fake_step({"r": 18}, pages)).saves == []
    lookups.asked[0].reply(1)
    request.num_computed_tokens = 18
    (save,) = side.plan(fake_step({"r": 1}, pages)).saves
    assert save.pages == (2, 3, 4)


def test_pages_are_kept_while_saves_may_read_them(side, lookups):
    saved, unsaved = FakeRequest("a", list(range(9))), FakeRequest("b", [1, 2])
    for request in (saved, unsaved):
        side.add(request)
    for asked in lookups.asked:
        asked.reply(0)
    side.plan(fake_step({"a": 9, "b": 2}, {"a": [1, 2, 3], "b": [4]}))
    assert side.finished(saved)
    assert not side.finished(unsaved)
    assert side.plan(fake_step({}, {})).finished == {"a"}
    assert not side.finished(saved)


def test_a_request_aborted_while_it_is_loaded_is_left_to_the_engine(side, lookups):
    request = FakeRequest("r", list(range(18)))
    side.add(request)
    lookups.asked[0].reply(4)
    side.matched(request, 0)
    side.allocated(request, [1, 2, 3, 4, 5], 16)
    assert not side.finished(request)
    side.received({"r"}, set())


def test_blocks_that_could_not_be_loaded_are_saved_again_and_not_loaded_again(side, lookups):
    request = FakeRequest("r", list(range(18)))
    pages = [1, 2, 3, 4, 5]
    side.add(request)
    lookups.asked[0].reply(4)
    side.matched(request, 0)
    side.allocated(request, pages, 16)
    side.received({"r"}, {3, 4})
    assert side.matched(request, 0) == (0, False)
    request.num_computed_tokens = 8
    (save,) = side.plan(fake_step({"r": 10}, {"r": pages})).saves
    assert save.pages == (3, 4)


def test_a_preempted_request_starts_over(side, lookups):
    request = FakeRequest("r", list(range(9)))
    side.add(request)
    lookups.asked[0].reply(0)
    side.plan(fake_step({"r": 9}, {"r": [1, 2, 3]}))
    request.all_token_ids += [90, 91, 92]
    request.num_computed_tokens = 0
    plan = side.plan(fake_step({}, {}, preempted={"r"}))
    assert plan.preempted == {"r"}
    assert side.matched(request, 0) == (None, False)
    lookups.asked[1].reply(2)
    assert list(lookups.asked[1].question.tokens) == request.all_token_ids
    assert side.matched(request, 0) == (8, True)
    side.allocated(request, [4, 5, 6], 8)
    (load,) = side.plan(fake_step({}, {})).loads
    assert load.pages == (4, 5)
    assert not side.finished(request)  # the saves from before were given up


@pytest.mark.parametrize("change", [{"prompt_embeds": object()}, {"resumable": True}, {"prompt_token_ids": None}])
def test_requests_whose_tokens_do_not_tell_all_are_left_alone(side, lookups, change):
    request = FakeRequest("r", **{"prompt_token_ids": list(range(18)), **change})
    assert not cacheable(request)
    side.add(request)
    assert lookups.asked == []
    assert side.matched(request, 0) == (0, False)
    assert side.plan(fake_step({"r": 18}, {"r": [1, 2, 3, 4]})).saves == []
    assert not side.finished(request)


def test_a_request_that_skips_the_cache_loads_nothing_and_saves(side, lookups):
    request = FakeRequest("r", list(range(9)), skip_reading_prefix_cache=True)
    side.add(request)
    lookups.asked[0].reply(2)
    assert side.matched(request, 0) == (0, False)


def test_after_a_reset_waiting_requests_are_looked_up_anew_and_running_ones_left_alone(side, lookups):
    waiting, running = FakeRequest("w", list(range(9))), FakeRequest("r", list(range(9)), num_computed_tokens=0)
    for request in (waiting, running):
        side.add(request)
    for asked in lookups.asked:
        asked.reply(1)
    running.num_computed_tokens = 4
    side.reset()
    assert [asked.question.tokens for asked in lookups.asked[2:]] == [waiting.prompt_token_ids]
    assert side.matched(waiting, 0) == (None, False)
    assert side.plan(fake_step({"r": 5}, {"r": [1, 2, 3]})).saves == []


def test_a_token_that_cannot_be_hashed_ends_the_saving_and_not_the_engine(side, lookups):
    request = FakeRequest("r", list(range(8)))
    side.add(request)
    lookups.asked[0].reply(2)
    request.all_token_ids += [-1, 1, 2, 3]
    assert side.plan(fake_step({"r": 12}, {"r": [1, 2, 3]})).saves == []
    assert side.plan(fake_step({"r": 12}, {"r": [1, 2, 3]})).saves == []


def told(request, begin, end):
    hashes = [(tuple(request.all_token_ids[: 4 * (block + 1)])) for block in range(begin, end)]
    return SimpleNamespace(request_id=request.request_id, begin=begin, end=end, block_hashes=hashes)


def events_of(side):
    return [(event.request_id, event.begin, event.end) for event in side.take_events()]


def test_blocks_that_all_ranks_have_stored_are_announced(lookups):
    side = SchedulerSide(lookups, Base(), 4, Announcements(2, told, list))
    first, second = FakeRequest("a", list(range(12))), FakeRequest("b", list(range(20, 32)))
    for request in (first, second):
        side.add(request)
        lookups.asked[-1].reply(0)
        side.matched(request, 0)
    saves = side.plan(fake_step({"a": 12, "b": 12}, {"a": [1, 2, 3], "b": [4, 5, 6]})).saves
    numbers = [save.number for save in saves]
    assert len({0, *numbers}) == 3
    side.saved({numbers[0]: [3]})
    assert side.take_events() == []  # one rank is none
    side.finished(first)
    side.saved({numbers[0]: [2], numbers[1]: [0, 3]})
    assert events_of(side) == [("a", 0, 2)]
    assert side.take_events() == []
    side.saved({99: [1, 1]})
    assert side.take_events() == []


def test_blocks_that_are_found_are_announced_once_and_again_after_they_were_gone(lookups):
    announcements = Announcements(1, told, lambda names: ("gone", names))
    side = SchedulerSide(lookups, Base(), 4, announcements)

    def comes(name, blocks):
        request = FakeRequest(name, list(range(18)))
        side.add(request)
        lookups.asked[-1].reply(blocks)
        side.matched(request, 0)
        return request

    request = comes("a", 2)
    assert events_of(side) == [("a", 0, 2)]
    comes("b", 4)
    assert events_of(side) == [("b", 2, 4)]
    comes("c", 4)
    assert side.take_events() == []
    announcements.announced.removed([keys_of(request, 3, 4).tobytes()])
    assert side.take_events() == [("gone", [tuple(range(16))])]
    announcements.announced.stored([keys_of(request, 3, 4).tobytes()])
    comes("d", 4)
    assert events_of(side) == [("d", 3, 4)]


def test_what_was_announced_is_gone_when_the_weights_change(lookups):
    side = SchedulerSide(lookups, Base(), 4, Announcements(1, told, lambda names: ("gone", names)))
    request = FakeRequest("a", list(range(10)))
    side.add(request)
    lookups.asked[-1].reply(1)
    side.matched(request, 0)
    assert events_of(side) == [("a", 0, 1)]
    side.reset()
    assert side.take_events() == [("gone", [(0, 1, 2, 3)])]


def test_saves_have_no_number_where_nobody_wants_events(side, lookups):
    request = FakeRequest("r", list(range(8)))
    side.add(request)
    lookups.asked[0].reply(0)
    (save,) = side.plan(fake_step({"r": 8}, {"r": [1, 2]})).saves
    assert save.number == 0
    assert side.take_events() == []


def test_workers_are_told_of_steps_that_compute_nothing(side, lookups):
    request = FakeRequest("r", list(range(10)))
    side.add(request)
    lookups.asked[0].reply(0)
    side.matched(request, 0)
    assert not side.plan(fake_step({"r": 9}, {"r": [7, 8, 9]})).idle
    assert side.plan(fake_step({}, {})).idle
