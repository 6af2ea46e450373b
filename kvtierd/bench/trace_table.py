"""Hit ratios by policy and capacity, as a table and as the figures that are judged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.trace_arc import arc_hits
from kvtierd.bench.trace_bound import bound_hits
from kvtierd.bench.trace_file import Trace
from kvtierd.bench.trace_queues import fifo_hits, lru_hits, s3fifo_hits, sieve_hits
from kvtierd.bench.trace_replay import return_hits
from kvtierd.bench.trace_tinylfu import tinylfu_hits

REFERENCES: dict[str, Callable[..., int]] = {
    "FIFO": fifo_hits,
    "LRU": lru_hits,
    "ARC": arc_hits,
    "SIEVE": sieve_hits,
    "S3-FIFO": s3fifo_hits,
    "W-TinyLFU": tinylfu_hits,
}
OURS, BOUND = "ours", "MIN"
MANAGER, MANAGER_LRU = "ours, tiers", "LRU, tiers"
"""The same two through the real manager."""

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 100_000)
UNIQUE = 182_790
"""Distinct blocks of the trace for which these capacities were chosen."""
CAPACITY_MIN = 8

GAP_MIN = 0.01
"""A gap between the best reference and the bound that is worth closing."""
SHORTFALL_MAX = 0.005
GAP_SHARE_MIN = 0.05


def capacities_for(trace: Trace) -> tuple[int, ...]:
    """The table's capacities, or the same shares of the distinct blocks of a smaller trace."""
    return tuple(sorted({scaled(capacity, trace) for capacity in CAPACITIES}))


def scaled(capacity: int, trace: Trace) -> int:
    """A capacity for the table's trace, or the same share of the distinct blocks of a smaller one."""
    return max(CAPACITY_MIN, round(capacity * min(1.0, trace.unique / UNIQUE)))


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """Hit ratios of one trace at one capacity, by policy."""

    capacity: int
    ratios: dict[str, float]

    @property
    def best(self) -> str:
        """The best reference."""
        return max(REFERENCES, key=lambda name: self.ratios[name])

    def gain(self, name: str = OURS) -> float:
        """What ours, or another policy, has over the best reference."""
        return self.ratios[name] - self.ratios[self.best]

    @property
    def gap(self) -> float:
        """What the bound has over the best reference."""
        return self.ratios[BOUND] - self.ratios[self.best]


def measure(trace: Trace, capacity: int) -> Column:
    """Replay a trace through everything at one capacity."""
    replays = {**REFERENCES, BOUND: bound_hits}
    ratios = {
        name: replay(trace.blocks, trace.starts, trace.unique, capacity) / trace.accesses
        for name, replay in replays.items()
    }
    ratios[OURS] = return_hits(trace, capacity) / trace.accesses
    return Column(capacity, ratios)


def policies_of(columns: Sequence[Column]) -> list[str]:
    """Names of what was measured, in the order of the table."""
    seen = {name for column in columns for name in column.ratios}
    return [name for name in [*REFERENCES, MANAGER_LRU, OURS, MANAGER, BOUND] if name in seen]


def as_text(trace: Trace, columns: Sequence[Column]) -> str:
    """The table, a line a policy."""
    head = f"{trace.name}: {trace.requests:,} requests, {trace.accesses:,} block accesses, {trace.unique:,} blocks"
    capacities = "".join([" " * 13, *(f"{column.capacity:>10,}" for column in columns)])
    body = (
        "".join([f"  {name:<11}", *(f"{column.ratios.get(name, math.nan):>10.4f}" for column in columns)])
        for name in policies_of(columns)
    )
    return "\n".join([head, capacities, *body])


def judged(trace: Trace, columns: Sequence[Column]) -> Iterator[Row]:
    """The figures: ours against the best reference at each capacity, and over all of them."""
    for column in columns:
        best = column.ratios[column.best]
        yield make_row(
            "trace",
            f"{trace.name}: prefix-hit ratio, {column.capacity:,} blocks",
            column.ratios[OURS],
            "",
            reference=best if best > 0 else None,
            reference_name=f"{column.best}, the best of six; the bound is {column.ratios[BOUND]:.4f}",
        )
    yield from against_the_best(trace.name, columns, OURS)


def against_the_best(name: str, columns: Sequence[Column], policy: str) -> Iterator[Row]:
    """The two figures with goals, of a policy."""
    shortfall = max(-column.gain(policy) for column in columns)
    yield make_row("trace", f"{name}: most below the best", shortfall, "", goal=f"<= {SHORTFALL_MAX}")
    gaps = [column for column in columns if column.gap > GAP_MIN]
    if gaps:
        share = sum(column.gain(policy) for column in gaps) / sum(column.gap for column in gaps)
        yield make_row("trace", f"{name}: share of the gap closed", share, "", goal=f">= {GAP_SHARE_MIN}")
