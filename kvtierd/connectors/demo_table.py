"""What the demonstration shows: one line a generation, and the same lines as bench rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from kvtierd.bench.rows import Row, make_row
from kvtierd.core.units import format_bytes

GOALS = {"host": "<= 0.15", "nvme after a restart": "<= 0.3"}
"""Time to first token over that of the cold prefill, by where the prefix was served from."""

HEAD = ("served from", "first token", "of cold", "tokens found", "bytes moved", "tokens equal")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A generation as it was served. `tier` is where its prefix was to come from ("" for the cold one).

    `sources` counts blocks by the tier where they were found; `equal` says whether all generated tokens are the cold
    ones.
    """

    tier: str
    restarted: bool
    first_token_s: float
    cold_s: float
    tokens_found: int = 0
    payload_bytes: int = 0
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)
    equal: bool = True

    @property
    def name(self) -> str:
        """What is served, as the table and the bench name it."""
        return f"{self.tier} after a restart" if self.restarted else self.tier or "cold prefill"

    @property
    def as_placed(self) -> bool:
        """Whether every block came from the tier it was to come from, and there were any."""
        return not self.tier or set(self.sources) == {self.tier}

    @property
    def ok(self) -> bool:
        """Whether the right tier served and the answer is the cold one."""
        return self.equal and self.as_placed


def as_table(lines: Iterable[Line]) -> str:
    """The lines aligned under a head; a tier that did not serve is named with what did."""
    cells = [HEAD, *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    return "\n".join("  ".join(_aligned(row, widths)).rstrip() for row in cells)


def bench_row(line: Line) -> Row:
    """The line as a figure: its time to first token over the cold one's. A wrong answer is never ok."""
    row = make_row(
        "demo",
        f"time to first token from {line.name}",
        line.first_token_s * 1e3,
        "ms",
        reference=line.cold_s * 1e3,
        reference_name="cold prefill",
        goal=GOALS.get(line.name, ""),
    )
    return row if line.ok else _failed(row)


def _failed(row: Row) -> Row:
    return Row(**{name: getattr(row, name) for name in row.__struct_fields__ if name != "ok"}, ok=False)


def _cells(line: Line) -> tuple[str, ...]:
    name = line.name if line.as_placed else f"{line.name} ({_found(line.sources)})"
    if not line.tier:
        return (name, f"{line.first_token_s:.2f} s", "1", "0", "-", "")
    ratio = line.first_token_s / line.cold_s
    moved = format_bytes(line.payload_bytes)
    return (name, f"{line.first_token_s:.2f} s", f"{ratio:.3f}", f"{line.tokens_found:,}", moved, _yes(line.equal))


def _found(sources: Mapping[str, int]) -> str:
    parts = [f"{count} blocks from {tier}" for tier, count in sorted(sources.items())]
    return "NOT SERVED: " + (", ".join(parts) or "nothing found")


def _yes(answer: bool) -> str:
    return "yes" if answer else "NO"


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    name, *figures = row
    return [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True))]
