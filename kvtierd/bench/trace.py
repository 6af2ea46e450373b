"""`kvtierctl bench trace FILE`: hits of the default eviction policy on a trace, against others and the bound.

What is compared: the share of all block accesses that are prefix hits (only the leading run of a request counts), for
every capacity, against six policies of the literature replayed block by block, and MIN, which knows the future. Without
a file it replays synthetic workloads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvtierd.bench.options import Options
from kvtierd.bench.rows import Row
from kvtierd.bench.trace_admission import admission_rows
from kvtierd.bench.trace_costs import cost_rows
from kvtierd.bench.trace_file import read_traces
from kvtierd.bench.trace_manager import manager_rows
from kvtierd.bench.trace_synthetic import synthetic_traces
from kvtierd.bench.trace_table import as_text, capacities_for, judged, measure


def rows(options: Options) -> Iterator[Row]:
    """Replay every trace of the file; tables go to standard error."""
    traces = read_traces(options.file) if options.file else synthetic_traces(options.rounds(6_000, 1_500))
    for trace in traces:
        capacities = options.tier_blocks or capacities_for(trace)
        columns = [measure(trace, capacity) for capacity in capacities[:: 2 if options.quick else 1]]
        print(as_text(trace, columns), file=sys.stderr)
        yield from judged(trace, columns)
        yield from admission_rows(trace, capacities[len(capacities) // 2])
    yield from manager_rows(options, traces[0])
    yield from cost_rows(options)
