"""What a router is told to be gone: what was told of and is no longer there, in whatever order the news come."""

from __future__ import annotations

import numpy as np

from kvtierd.connectors import vllm_announced
from kvtierd.connectors.vllm_announced import Announced


def keys(*numbers):
    return np.array([[number] * 32 for number in numbers], np.uint8).reshape(len(numbers), 32)


def raw(*numbers):
    return [key.tobytes() for key in keys(*numbers)]


def test_a_block_is_gone_when_it_is_on_one_rank():
    announced = Announced()
    announced.tell(["a", "b"], [keys(1, 2), keys(11, 12)])
    assert announced.take() == []
    announced.removed(raw(12))
    assert announced.take() == ["b"]
    announced.removed(raw(2))
    assert announced.take() == []


def test_blocks_that_nobody_was_told_of_are_not_told_to_be_gone():
    announced = Announced()
    announced.removed(raw(1, 2))
    assert announced.take() == []


def test_a_block_that_is_told_of_again_is_not_gone():
    announced = Announced()
    announced.tell(["a"], [keys(1)])
    announced.removed(raw(1))
    announced.stored(raw(1))
    announced.tell(["a"], [keys(1)])
    assert announced.take() == []
    assert announced.known(keys(1)) == 1


def test_a_block_that_was_removed_before_it_was_told_of_is_gone_at_once():
    announced = Announced()
    announced.stored(raw(1, 2))
    announced.removed(raw(2))
    announced.tell(["a", "b"], [keys(1, 2)])
    assert announced.take() == ["b"]
    assert announced.known(keys(1, 2)) == 1


def test_a_block_that_was_removed_and_stored_again_before_it_was_told_of_is_there():
    announced = Announced()
    announced.removed(raw(1))
    announced.stored(raw(1))
    announced.tell(["a"], [keys(1)])
    assert announced.take() == []


def test_in_doubt_all_are_gone_and_can_be_told_of_anew():
    announced = Announced()
    announced.tell(["a", "b"], [keys(1, 2)])
    announced.doubt()
    assert sorted(announced.take()) == ["a", "b"]
    assert announced.known(keys(1, 2)) == 0
    announced.tell(["b"], [keys(2)])
    announced.removed(raw(1))
    assert announced.take() == []


def test_the_oldest_count_as_gone_beyond_the_limit():
    announced = Announced(limit=2)
    announced.tell(["a", "b", "c"], [keys(1, 2, 3)])
    assert announced.take() == ["a"]
    announced.removed(raw(1))
    assert announced.take() == []
    assert announced.known(keys(2, 3)) == 2


def test_a_name_whose_block_has_another_key_now_follows_that_key():
    announced = Announced()
    announced.tell(["a"], [keys(1)])
    announced.tell(["a"], [keys(2)])
    announced.removed(raw(1))
    assert announced.take() == []
    announced.removed(raw(2))
    assert announced.take() == ["a"]


def test_a_key_that_got_another_name_takes_the_old_one_along():
    announced = Announced()
    announced.tell(["a"], [keys(1)])
    announced.tell(["b"], [keys(1)])
    assert announced.take() == ["a"]
    announced.removed(raw(1))
    assert announced.take() == ["b"]


def test_removals_that_are_kept_for_late_news_are_bounded(monkeypatch):
    monkeypatch.setattr(vllm_announced, "LATELY", 3)
    announced = Announced()
    announced.removed(raw(*range(1, 6)))
    announced.tell(list("abcde"), [keys(*range(1, 6))])
    assert announced.take() == ["c", "d", "e"]
