"""Counters and gauges: every one is a row with name, type and meaning, and a number that can be read at any time.

Names end in their unit. The loop owns the numbers, so adding needs no lock; worker threads report to the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One row. A counter only grows while the daemon lives; a gauge goes up and down."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str


class Counters:
    """The numbers behind a table of metrics; a name that has no row is a bug and raises KeyError."""

    def __init__(self, table: Iterable[Metric]) -> None:
        self.table = {metric.name: metric for metric in table}
        self._values = dict.fromkeys(self.table, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Count up."""
        self._values[name] += amount

    def set(self, name: str, value: int) -> None:
        """Set a gauge. Raises ValueError for a counter, which nobody may turn back."""
        if self.table[name].kind != "gauge":
            raise ValueError(f"{name} is a counter; add to it")
        self._values[name] = value

    def read(self) -> dict[str, int]:
        """All values by name."""
        return dict(self._values)
