"""BENCHMARKS.md: the same figures as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtierd.bench.rows import Row
from kvtierd.report.charts import short
from kvtierd.report.records import Record

_HEAD = """# Benchmarks
Written by `kvtierctl report --markdown`; do not edit. Each figure stands beside a reference that was measured in the
same run on the same machine; goals are about the ratio where there is one. Figures of a machine that others use at the
same time (its load is told) are lower than those of a quiet one.
"""


def as_markdown(records: Sequence[Record]) -> str:
    """The document; machines are told once, and referred to by number."""
    # How busy a machine was belongs to the run.
    machines = list(dict.fromkeys(record.machine.partition(", load")[0] for record in records))
    lines = [_HEAD, "## Machines"]
    lines += [f"{number}. {machine}" for number, machine in enumerate(machines, 1)]
    for record in records:
        lines += ["", *_run(record, machines.index(record.machine.partition(", load")[0]) + 1)]
    return "\n".join(lines) + "\n"


def _run(record: Record, machine: int) -> Iterator[str]:
    yield f"## `{record.command}`"
    _, _, load = record.machine.partition(", load ")
    busy = f", at a load of {load} by others and itself" if load else ""
    yield f"Machine {machine}{f', {record.recorded}' if record.recorded else ''}{busy}."
    if record.failed:
        yield f"\nNot whole: {record.failed}"
    if record.stress is not None:
        yield f"\n{record.stress.what}: **{record.stress.verdict}**"
        yield from (f"- {finding}" for finding in record.stress.findings)
    if record.rows:
        yield "\n| metric | value | reference | ratio | goal | | measured against |"
        yield "|---|---|---|---|---|---|---|"
        yield from map(_line, record.rows)


def _line(row: Row) -> str:
    reference = "" if row.reference is None else f"{short(row.reference)} {row.unit}".strip()
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    verdict = ("met" if row.ok else "**missed**") if row.goal else ""
    cells = (row.metric, f"{short(row.value)} {row.unit}".strip(), reference, ratio, row.goal, verdict,
             row.reference_name)  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|").strip() for cell in cells) + " |"
