"""`kvtierctl bench trace FILE`: hits of the default eviction policy on a trace, against others and the bound.

What is compared: the share of all block accesses that are prefix hits (only the leading run of a request counts), for
every capacity, against six policies of the literature replayed block by block, and MIN, which knows the future. The
default and LRU are replayed through the real manager too. Without a file it replays synthetic workloads; with `live`
it replays through a running daemon, with real bytes (trace_live).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row
from kvtierd.bench.trace_admission import HOST_BLOCKS, admission_rows
from kvtierd.bench.trace_costs import cost_rows
from kvtierd.bench.trace_file import Trace, read_traces
from kvtierd.bench.trace_live import live_rows
from kvtierd.bench.trace_manager import manager_rows, through_the_manager
from kvtierd.bench.trace_plot import Measured, as_svg
from kvtierd.bench.trace_synthetic import synthetic_traces
from kvtierd.bench.trace_table import as_text, capacities_for, judged, measure, scaled


def rows(options: Options) -> Iterator[Row]:
    """Replay every trace of the file, the first one through the manager too; tables go to standard error."""
    traces = read_traces(options.file) if options.file else synthetic_traces(options.rounds(6_000, 1_500))
    if options.live:
        yield from live_rows(options, traces[0])
        return
    measured: list[Measured] = []
    for trace in traces:
        yield from _replayed(options, trace, measured, managed=trace is traces[0])
    if options.plot:
        try:
            options.plot.write_text(as_svg(measured))
        except OSError as error:
            raise BenchError(f"--plot {options.plot}: {error.strerror or error}") from error
    yield from cost_rows(options)


def _replayed(options: Options, trace: Trace, measured: list[Measured], *, managed: bool) -> Iterator[Row]:
    capacities = options.tier_blocks or capacities_for(trace)
    columns = [measure(trace, capacity) for capacity in capacities[:: 2 if options.quick else 1]]
    replays = through_the_manager(trace, columns) if managed else []
    measured.append((trace, columns))
    print(as_text(trace, columns), file=sys.stderr)
    yield from judged(trace, columns)
    if replays:
        yield from manager_rows(trace, columns, replays)
    yield from admission_rows(trace, scaled(HOST_BLOCKS, trace))
