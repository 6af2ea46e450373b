"""One figure as a row: what was measured, what it was measured against, and whether the goal holds."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

import msgspec

from kvtierd.core.errors import KvtierdError

_GOAL = re.compile(r"\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class BenchError(KvtierdError):
    """A bench cannot run here: what is missing, and what to do, is in the text."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A figure. `value` and `reference` are in `unit`, medians of the same alternating rounds.

    The goal is about `ratio` (value over reference) where there is a reference, and about `value` where there is none.
    An empty goal is a figure to know, and is always ok.
    """

    bench: str
    metric: str
    value: float
    unit: str
    reference: float | None = None
    reference_name: str = ""
    ratio: float | None = None
    goal: str = ""
    ok: bool = True


def make_row(
    bench: str,
    metric: str,
    value: float,
    unit: str,
    *,
    reference: float | None = None,
    reference_name: str = "",
    goal: str = "",
) -> Row:
    """Make a row and judge it; ValueError for a goal that cannot be read or a reference that is not positive."""
    if reference is not None and not reference > 0:
        raise ValueError(f"{bench} {metric}: the reference is {reference}; it must be above 0")
    ratio = None if reference is None else value / reference
    return Row(
        bench=bench,
        metric=metric,
        value=value,
        unit=unit,
        reference=reference,
        reference_name=reference_name,
        ratio=ratio,
        goal=goal,
        ok=not goal or meets(goal, value if ratio is None else ratio),
    )


def meets(goal: str, figure: float) -> bool:
    """Whether a figure meets a goal such as `>= 0.5`; ValueError naming a goal that is none. NaN meets nothing."""
    match = _GOAL.fullmatch(goal)
    if match is None:
        raise ValueError(f"{goal!r} is not a goal; write it like >= 0.5")
    return _COMPARE[match[1]](figure, float(match[2]))


def as_json(row: Row) -> str:
    """The row as one line of JSON, every field present."""
    return msgspec.json.encode(row).decode()


def as_table(rows: Iterable[Row]) -> str:
    """The rows as an aligned table with a head."""
    head = ("bench", "metric", "value", "reference", "ratio", "goal", "ok", "measured against")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    reference = "-" if row.reference is None else f"{_digits(row.reference)} {row.unit}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    verdict = ("yes" if row.ok else "NO") if row.goal else ""
    value = f"{_digits(row.value)} {row.unit}"
    return (row.bench, row.metric, value, reference, ratio, row.goal, verdict, row.reference_name)


def _digits(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
