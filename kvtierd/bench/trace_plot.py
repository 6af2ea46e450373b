"""Hit ratios over capacity as a drawing: SVG of our own, so that nothing is needed to write it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from kvtierd.bench.trace_file import Trace
from kvtierd.bench.trace_table import BOUND, MANAGER, OURS, Column, policies_of

WIDTH, HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 180, 50, 50
_TICKS = 5
_LEGEND_LINE = 20
_COLOURS = ("#7f7f7f", "#1f77b4", "#9467bd", "#8c564b", "#2ca02c", "#bcbd22", "#17becf", "#e377c2")
_EMPHASISED = {OURS: "#d62728", MANAGER: "#ff7f0e", BOUND: "#000000"}

Measured = tuple[Trace, Sequence[Column]]


def as_svg(measured: Sequence[Measured]) -> str:
    """One chart for each trace, below one another."""
    height = HEIGHT * len(measured)
    charts = "\n".join(
        f'<g transform="translate(0,{HEIGHT * place})">\n' + "\n".join(_chart(trace, columns)) + "\n</g>"
        for place, (trace, columns) in enumerate(measured)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{height}" fill="white"/>\n{charts}\n</svg>\n'
    )


class _Axes:
    """Where a capacity (logarithmic) and a ratio (from 0) lie on the chart."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.capacities = [column.capacity for column in columns]
        self._low, self._high = math.log(min(self.capacities)), math.log(max(self.capacities))
        highest = max(max(column.ratios.values()) for column in columns)
        self.step = _nice(highest / _TICKS)
        self.top = self.step * math.ceil(highest / self.step) if highest else self.step

    def x(self, capacity: int) -> float:
        share = (math.log(capacity) - self._low) / (self._high - self._low) if self._high > self._low else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, ratio: float) -> float:
        return HEIGHT - _BOTTOM - ratio / self.top * (HEIGHT - _TOP - _BOTTOM)


def _nice(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if step <= 0:
        return 0.1
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= step)


def _chart(trace: Trace, columns: Sequence[Column]) -> Iterator[str]:
    axes = _Axes(columns)
    yield _text(_LEFT, 24, f"{trace.name}: share of block accesses that are prefix hits", weight="bold")
    for number in range(round(axes.top / axes.step) + 1):
        ratio = number * axes.step
        yield _line([(_LEFT, axes.y(ratio)), (WIDTH - _RIGHT, axes.y(ratio))], "#dddddd", 1)
        yield _text(_LEFT - 8, axes.y(ratio) + 4, f"{ratio:.3g}", anchor="end")
    for capacity in axes.capacities:
        yield _text(axes.x(capacity), HEIGHT - _BOTTOM + 18, f"{capacity:,}", anchor="middle")
    yield _text((WIDTH - _RIGHT + _LEFT) / 2, HEIGHT - 10, "capacity, blocks", anchor="middle")
    for number, name in enumerate(policies_of(columns)):
        colour = _EMPHASISED.get(name, _COLOURS[number % len(_COLOURS)])
        width = 3 if name == OURS else 1.5
        points = [(axes.x(column.capacity), axes.y(column.ratios[name])) for column in columns if name in column.ratios]
        yield _line(points, colour, width, dashed=name in {BOUND, MANAGER})
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points)
        place = _TOP + _LEGEND_LINE * number
        yield _line([(WIDTH - _RIGHT + 15, place), (WIDTH - _RIGHT + 40, place)], colour, width)
        yield _text(WIDTH - _RIGHT + 46, place + 4, name)


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, *, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
