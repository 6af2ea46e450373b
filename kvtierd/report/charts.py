"""Drawings in SVG of our own, so that a page needs nothing beside it: lines over numbers, and bars beside bars."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 840, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 260, 24, 52
_BAR, _GAP = 16, 14
_TICKS = 5
_COLOURS = ("#0b6e99", "#d1495b", "#6a994e", "#7d5ba6", "#e09f3e", "#577590", "#9a6b4b")
_DIGITS_FROM = 100

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A named curve; `dashed` is for what bounds or is asked for."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A figure, and what it is measured against beneath it."""

    name: str
    value: float
    reference: float | None = None
    reference_name: str = ""
    unit: str = ""


def short(value: float) -> str:
    """A figure in few digits."""
    return f"{value:,.0f}" if abs(value) >= _DIGITS_FROM else f"{value:.3g}"


def tokens(value: float) -> str:
    """A number of tokens or blocks as people say it."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= size and value % size == 0:
            return f"{value / size:.0f}{unit}"
    return f"{value:,.0f}"


def line_chart(lines: Sequence[Line], x_name: str, y_name: str) -> str:
    """Curves over a logarithmic x axis, y from 0. Raises ValueError where there is no point, or an x of 0 or less."""
    xs = sorted({x for line in lines for x, _ in line.points})
    if not xs or xs[0] <= 0:
        raise ValueError(f"{y_name} over {x_name}: a chart needs points, at x above 0")
    axes = _Axes(xs, max(y for line in lines for _, y in line.points))
    return _svg(HEIGHT, [*_grid(axes, x_name, y_name), *_curves(axes, lines)])


def bar_chart(bars: Sequence[Bar]) -> str:
    """Bars one below the other, each with its reference beneath; bars of a unit share a scale. ValueError for none."""
    if not bars:
        raise ValueError("a chart needs bars")
    tops = {
        unit: max(max(bar.value, bar.reference or 0.0) for bar in bars if bar.unit == unit) or 1.0
        for unit in {bar.unit for bar in bars}
    }
    parts: list[str] = []
    y = float(_TOP)
    for bar in bars:
        parts.append(_text(10, y - 5, bar.name, weight="bold"))
        drawn = [(bar.value, _COLOURS[0], "")]
        if bar.reference is not None:
            drawn.append((bar.reference, "#b8bec6", bar.reference_name))
        for value, colour, name in drawn:
            length = max(1.0, value / tops[bar.unit] * (WIDTH - 330))
            parts.append(f'<rect x="10" y="{y:.1f}" width="{length:.1f}" height="{_BAR}" fill="{colour}"/>')
            parts.append(_text(length + 16, y + 12, f"{short(value)} {bar.unit} {name}".strip()))
            y += _BAR + 2
        y += _GAP + 10
    return _svg(math.ceil(y), parts)


class _Axes:
    def __init__(self, xs: Sequence[float], highest: float) -> None:
        self.xs = xs
        self._low, self._high = math.log(xs[0]), math.log(xs[-1])
        self.step = _nice(highest / _TICKS)
        self.top = max(self.step, self.step * math.ceil(highest / self.step - 1e-9))

    def x(self, value: float) -> float:
        share = (math.log(value) - self._low) / (self._high - self._low) if self._high > self._low else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - value / self.top * (HEIGHT - _TOP - _BOTTOM)


def _nice(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= step * (1 - 1e-9))


def _grid(axes: _Axes, x_name: str, y_name: str) -> Iterator[str]:
    for number in range(round(axes.top / axes.step) + 1):
        value = number * axes.step
        yield _polyline([(_LEFT, axes.y(value)), (WIDTH - _RIGHT, axes.y(value))], "#d9dde2", 1)
        yield _text(_LEFT - 8, axes.y(value) + 4, short(value), anchor="end")
    for value in _apart(axes):
        yield _text(axes.x(value), HEIGHT - _BOTTOM + 18, tokens(value), anchor="middle")
    yield _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 12, x_name, anchor="middle")
    yield _text(8, 14, y_name)


def _apart(axes: _Axes) -> Iterator[float]:
    """Values of x whose labels do not touch."""
    last = -math.inf
    for value in axes.xs:
        if axes.x(value) - last > 48:
            last = axes.x(value)
            yield value


def _curves(axes: _Axes, lines: Iterable[Line]) -> Iterator[str]:
    for number, (line, colour) in enumerate(zip(lines, itertools.cycle(_COLOURS), strict=False)):
        points = [(axes.x(x), axes.y(y)) for x, y in sorted(line.points)]
        yield _polyline(points, colour, 2, dashed=line.dashed)
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
        place = _TOP + 10 + 20 * number
        yield _polyline([(WIDTH - _RIGHT + 14, place), (WIDTH - _RIGHT + 38, place)], colour, 2, dashed=line.dashed)
        yield _text(WIDTH - _RIGHT + 44, place + 4, line.name)


def _polyline(points: Sequence[Point], colour: str, width: float, *, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _svg(height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-size="12">'
    return "\n".join([head, *parts, "</svg>"])
