"""`kvtierctl bench stress`: the stress's figures, over exact blocks and over FP8.

Both runs put the same context through the same tiers and check every byte and every answer (kvtierd.stress); a figure
of wrong blocks is none. Each measures its own references: copies, plain writes and reads, the generator and the kernel
alone. The last row has the two decode steps beside each other.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.stress import table
from kvtierd.stress.options import Options as StressOptions
from kvtierd.stress.rig import Found
from kvtierd.stress.run import run_stress

PHASES = ("ceilings", "ingest", "verify", "decode")


def rows(options: Options) -> Iterator[Row]:
    """The rows with a goal of both runs."""
    exact, lossy = _run(options, fp8=False), _run(options, fp8=True)
    yield from (row for row in table.rows(exact) if row.goal)
    yield from (row for row in table.rows(lossy) if row.goal and row.metric.startswith("FP8"))
    yield make_row(
        "stress",
        "decode step over FP8",
        lossy.figures["step"] * 1e3,
        "ms",
        reference=exact.figures["step"] * 1e3,
        reference_name="over exact blocks",
        goal="<= 0.65",
    )


def _run(options: Options, *, fp8: bool) -> Found:
    wanted = StressOptions(quick=options.quick, nvme=options.directory, fp8=fp8)
    found = run_stress(wanted, io.StringIO(), PHASES)
    if not found.passed:
        raise BenchError(f"the stress found: {'; '.join(found.findings)}")
    return found
