"""Which plots a report has, and where each takes its points from: only from what was measured, never from a default."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvtierd.bench.rows import Row
from kvtierd.core.units import MIB
from kvtierd.report.charts import Bar, Line, bar_chart, line_chart
from kvtierd.report.records import Record, Stress

_RECOVERY = re.compile(r"([\d,]+) blocks, (.+)")
_HITS = re.compile(r"(.+): prefix-hit ratio, ([\d,]+) blocks")
_BOUND = re.compile(r"the bound is (\d*\.\d+)")
_MEMORY = re.compile(r"daemon's memory after (\d+)k tokens")
_TIERS = ("stress", "host", "nvme", "codec", "attention")


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A plot with the runs that it shows. Without points `svg` is empty, and `wants` says which command makes some."""

    title: str
    says: str
    svg: str
    sources: list[Record]
    wants: str


def sections(records: Sequence[Record]) -> list[Section]:
    """Every plot of the report, in order."""
    makers: list[Callable[[Sequence[Record]], Section]] = [
        step_times,
        throughput,
        hit_ratios,
        memory,
        recovery,
        peers,
        use_of_memory,
    ]
    return [make(records) for make in makers]


def step_times(records: Sequence[Record]) -> Section:
    """Time of a decode step over the length of the context, beside what bounds it."""
    runs = _stresses(records, "step")
    curves = {
        "a decode step": "step",
        "plain reads of the same bytes": "disk_alone",
        "the kernel alone": "compute_alone",
    }
    lines = [
        Line(name, [(run.tokens, run.figures.get(figure, 0.0) * 1e3) for _, run in runs], dashed=figure != "step")
        for name, figure in curves.items()
    ]
    return Section(
        "Time of a decode step against the length of the context",
        "Attention of one query over the whole context, all its layers, through tiers much smaller than it.",
        line_chart(lines, "tokens of context", "ms a step") if runs else "",
        [record for record, _ in runs],
        "kvtierctl stress --json --tokens N",
    )


def throughput(records: Sequence[Record]) -> Section:
    """Bytes a second of each tier beside its ceiling of the same run."""
    found = _rows(records, lambda row: row.bench in _TIERS and row.unit == "GB/s" and row.reference is not None)
    return Section(
        "Throughput of each tier against its ceiling",
        "Grey is what the same machine does in the same run without us: plain copies, or fio.",
        _bars(found),
        _sources(found),
        "kvtierctl bench host --json, kvtierctl bench nvme --json",
    )


def hit_ratios(records: Sequence[Record]) -> Section:
    """Hit ratio over capacity: the bench's own drawing of all policies, or ours, the best other and the bound."""
    drawn = [record for record in records if record.svg]
    found = _rows(records, lambda row: row.bench == "trace" and bool(_HITS.fullmatch(row.metric)))
    svg = "\n".join(record.svg for record in drawn)
    if found and not drawn:
        curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
        trace = _HITS.fullmatch(found[0][1].metric)
        for _, row in found:
            match = _HITS.fullmatch(row.metric)
            if match is None or trace is None or match[1] != trace[1]:
                continue  # one trace a plot: the first
            capacity = float(match[2].replace(",", ""))
            curves["ours"].append((capacity, row.value))
            if row.reference is not None:
                curves["the best of six others"].append((capacity, row.reference))
            if bound := _BOUND.search(row.reference_name):
                curves["the bound"].append((capacity, float(bound[1])))
        lines = [Line(name, points, dashed=name == "the bound") for name, points in curves.items()]
        svg = line_chart(lines, f"capacity in blocks ({trace[1] if trace else ''})", "prefix-hit ratio")
    return Section(
        "Hit ratio against capacity",
        "Share of block accesses that are prefix hits, beside other policies and the bound that knows the future.",
        svg,
        drawn or _sources(found),
        "kvtierctl bench trace --json --plot FILE",
    )


def memory(records: Sequence[Record]) -> Section:
    """Resident memory over the length of the context, beside the budget."""
    runs = _stresses(records, "memory_peak")
    lines = []
    if runs:
        lines.append(Line("daemon and clients, peak", [(r.tokens, r.figures["memory_peak"] / MIB) for _, r in runs]))
        budget = [(r.tokens, r.figures["memory_budget"] / MIB) for _, r in runs]
        lines.append(Line("budget", budget, dashed=True))
        lines.append(Line("KV of the context", [(r.tokens, r.context_bytes / MIB) for _, r in runs], dashed=True))
    found = _rows(records, lambda row: bool(_MEMORY.fullmatch(row.metric)))
    points = [(float(match[1]) * 1024, row.value) for _, row in found if (match := _MEMORY.fullmatch(row.metric))]
    if points:
        lines.append(Line("daemon, bench attend", points))
    return Section(
        "Memory against tokens",
        "Proportional resident memory; the context's own size is there for comparison.",
        line_chart(lines, "tokens of context", "MiB") if lines else "",
        [record for record, _ in runs] + _sources(found),
        "kvtierctl stress --json",
    )


def recovery(records: Sequence[Record]) -> Section:
    """Time of a start over how many blocks it finds."""
    found = _rows(records, lambda row: row.bench == "recovery" and bool(_RECOVERY.fullmatch(row.metric)))
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _, row in found:
        if match := _RECOVERY.fullmatch(row.metric):
            curves[match[2]].append((float(match[1].replace(",", "")), row.value))
    lines = [Line(name, points) for name, points in curves.items()]
    return Section(
        "Recovery time against blocks",
        "From the start of the tier manager until the page table has every block; the page cache is dropped before.",
        line_chart(lines, "blocks in the store", "seconds") if lines else "",
        _sources(found),
        "kvtierctl bench recovery --json",
    )


def peers(records: Sequence[Record]) -> Section:
    """The same stores and loads by others."""
    found = _rows(records, lambda row: row.bench in {"peers", "naive"} and row.reference is not None)
    return Section(
        "Others in the same run",
        "Grey is the other system, in turns with ours on the same machine, with the same sizes.",
        _bars(found),
        _sources(found),
        "make bench-peers, kvtierctl bench naive --json",
    )


def use_of_memory(records: Sequence[Record]) -> Section:
    """Share of the memory taken that holds KV."""
    found = _rows(records, lambda row: row.bench == "memory")
    bars = [Bar(row.metric, row.value * 100, unit="%") for _, row in found]
    return Section(
        "Use of memory",
        "Share of the memory taken that holds KV of tokens, by contiguous allocation and in blocks.",
        bar_chart(bars) if bars else "",
        _sources(found),
        "kvtierctl bench memory --json",
    )


Found = list[tuple[Record, Row]]


def _rows(records: Iterable[Record], wanted: Callable[[Row], bool]) -> Found:
    return [(record, row) for record in records for row in record.rows if wanted(row)]


def _stresses(records: Iterable[Record], figure: str) -> list[tuple[Record, Stress]]:
    """Runs that came to a figure, plain ones only, by length of context."""
    found = [(r, r.stress) for r in records if r.stress is not None and figure in r.stress.figures]
    plain = [(record, run) for record, run in found if "FP8" not in run.what and "chaos" not in run.what]
    return sorted(plain, key=lambda pair: pair[1].tokens)


def _sources(found: Found) -> list[Record]:
    seen: list[Record] = []
    for record, _ in found:
        if record not in seen:
            seen.append(record)
    return seen


def _bars(found: Found) -> str:
    bars = [
        Bar(f"{row.bench}: {row.metric.strip()}", row.value, row.reference, row.reference_name, row.unit)
        for _, row in found
    ]
    return bar_chart(bars) if bars else ""
