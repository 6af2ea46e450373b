"""Metrics in Prometheus' text format (version 0.0.4), and a histogram to count durations in.

Names follow https://prometheus.io/docs/practices/naming: one prefix, base units at the end, counters end in `_total`.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "kvtierd_"

Kind = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str]

NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its label values: `unit` is seconds, bytes, tokens, blocks, ratio, or "" for a number.

    `name` is without the prefix. Raises ValueError for one that breaks Prometheus' rules.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no metric name")
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name!r} is a {self.kind}: counters, and only they, end in _total")
        if self.unit in {"seconds", "bytes", "tokens", "blocks", "ratio"} and self.unit not in self.name.split("_"):
            raise ValueError(f"{self.name!r} does not name its unit, {self.unit}")

    @property
    def full_name(self) -> str:
        """As Prometheus sees it."""
        return PREFIX + self.name


class Histogram:
    """Counts of durations in buckets of fixed bounds. `add` is for a hot path: no allocation."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        self._bounds_ns = [round(bound * 1e9) for bound in bounds_s]
        self.counts = [0] * (len(self._bounds_ns) + 1)
        self.sum_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration; a bound belongs to the bucket below it."""
        self.counts[bisect.bisect_left(self._bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns

    @property
    def count(self) -> int:
        """Durations counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Seconds below which this share of the durations lies, as a bucket's upper bound; infinite in the last."""
        wanted, seen = share * self.count, 0
        for bound_s, count in zip((*self.bounds_s, math.inf), self.counts, strict=True):
            seen += count
            if seen >= wanted:
                return bound_s
        return math.inf


Value = float | int | Histogram
Samples = Iterable[tuple[Labels, Value]]


def render(families: Iterable[tuple[Family, Samples]]) -> str:
    """The text of a scrape; families without samples are left out."""
    lines: list[str] = []
    for family, samples in families:
        shown = [line for labels, value in samples for line in _sample(family.full_name, labels, value)]
        if shown:
            meaning = family.meaning.replace("\\", "\\\\").replace("\n", " ")
            lines += [f"# HELP {family.full_name} {meaning}", f"# TYPE {family.full_name} {family.kind}", *shown]
    return "\n".join(lines) + "\n"


def _sample(name: str, labels: Labels, value: Value) -> Iterator[str]:
    if not isinstance(value, Histogram):
        yield f"{name}{_labels(labels)} {_number(value)}"
        return
    total = 0
    for bound_s, count in zip((*value.bounds_s, math.inf), value.counts, strict=True):
        total += count
        yield f"{name}_bucket{_labels({**labels, 'le': _number(bound_s)})} {total}"
    yield f"{name}_sum{_labels(labels)} {_number(value.sum_ns / 1e9)}"
    yield f"{name}_count{_labels(labels)} {total}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value) if isinstance(value, float) else str(value)
