"""Alternation and medians."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtierd.bench.rounds import alternate, timed


def script(name: str, figures: list[float], calls: list[str]) -> Callable[[], float]:
    left = iter(figures)

    def measure() -> float:
        calls.append(name)
        return next(left)

    return measure


def test_rounds_alternate_and_medians_leave_the_warm_up_out() -> None:
    calls: list[str] = []
    ours = script("ours", [999.0, 3.0, 1.0, 50.0], calls)
    reference = script("reference", [0.0, 10.0, 30.0, 20.0], calls)
    assert alternate([ours, reference], 3) == [3.0, 20.0]
    assert calls == ["ours", "reference"] * 4


def test_no_warm_up_takes_every_round() -> None:
    assert alternate([script("ours", [1.0, 2.0], [])], 2, warmup=0) == [1.5]


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds is 0"):
        alternate([lambda: 1.0], 0)


def test_time_is_taken_around_one_call() -> None:
    calls: list[int] = []
    assert timed(lambda: calls.append(1)) >= 0
    assert calls == [1]
