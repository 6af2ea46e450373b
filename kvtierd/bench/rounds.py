"""Alternating rounds: ours, reference, ours, reference …, so that a machine that drifts drifts for both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

Measure = Callable[[], float]
"""Runs once and returns its figure (a rate, or a time), in the unit of its row."""


def alternate(measures: Sequence[Measure], rounds: int, *, warmup: int = 1) -> list[float]:
    """Run every measure in turn for `rounds` rounds and return the median of each.

    The first `warmup` rounds are thrown away: they fault pages in and open sockets. Medians, because a stall of a
    shared machine must not decide.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    seen: list[list[float]] = [[] for _ in measures]
    for turn in range(warmup + rounds):
        for measure, figures in zip(measures, seen, strict=True):
            figure = measure()
            if turn >= warmup:
                figures.append(figure)
    return [statistics.median(figures) for figures in seen]


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
