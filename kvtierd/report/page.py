"""The page: one file of HTML with its drawings in it, that fetches nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from kvtierd.bench.rows import Row
from kvtierd.report.charts import short
from kvtierd.report.records import Record
from kvtierd.report.sections import Section

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
svg { width: 100%; height: auto; background: #fff; font-family: inherit; }
table { border-collapse: collapse; width: 100%; font-size: 13px; } td, th { padding: .25rem .5rem; text-align: left; }
tr { border-bottom: 1px solid #d9dde2; } td.n { text-align: right; white-space: nowrap; }
code { background: #eef1f4; padding: 0 .25rem; } .by { color: #5b6773; font-size: 13px; } .no { color: #b3261e; }
"""


def as_html(records: Sequence[Record], parts: Sequence[Section]) -> str:
    """The whole page."""
    body = [
        "<h1>kvtierd: what was measured</h1>",
        f"<p>{_summary(records)}</p>",
        *(line for part in parts for line in _section(part)),
        "<h2>Every figure</h2>",
        *_tables(records),
    ]
    head = f'<meta charset="utf-8"><title>kvtierd: what was measured</title><style>{_STYLE}</style>'
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>\n"])


def _summary(records: Sequence[Record]) -> str:
    rows = [row for record in records for row in record.rows]
    goals = [row for row in rows if row.goal]
    met = sum(row.ok for row in goals)
    stresses = [record.stress for record in records if record.stress is not None]
    passed = sum(run.verdict == "pass" for run in stresses)
    told = f"{len(rows)} figures of {len(records)} runs; {met} of {len(goals)} goals met"
    return escape(f"{told}; {passed} of {len(stresses)} runs of the stress passed." if stresses else f"{told}.")


def _section(part: Section) -> Iterator[str]:
    yield f"<h2>{escape(part.title)}</h2>"
    yield f"<p>{escape(part.says)}</p>"
    if not part.svg:
        yield f'<p class="by">Not measured: <code>{escape(part.wants)}</code></p>'
        return
    yield f"<figure>{part.svg}</figure>"
    yield from _made_by(part.sources)


def _made_by(records: Iterable[Record]) -> Iterator[str]:
    for record in records:
        when = f", {escape(record.recorded)}" if record.recorded else ""
        yield f'<p class="by"><code>{escape(record.command)}</code> on {escape(record.machine)}{when}</p>'


def _tables(records: Sequence[Record]) -> Iterator[str]:
    for command, group in itertools.groupby(records, key=lambda record: record.command):
        runs = list(group)
        yield f"<h3><code>{escape(command)}</code></h3>"
        for record in runs:
            yield from _made_by([record])
            if record.failed:
                yield f'<p class="no">{escape(record.failed)}</p>'
            if record.stress is not None:
                yield f"<p>{escape(record.stress.what)}: {escape(record.stress.verdict)}</p>"
                yield from (f'<p class="no">{escape(finding)}</p>' for finding in record.stress.findings)
            if record.rows:
                yield _table(record.rows)


def _table(rows: Iterable[Row]) -> str:
    heads = ("metric", "value", "reference", "ratio", "goal", "", "measured against")
    lines = ["<table>", "<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for row in rows:
        reference = "" if row.reference is None else f"{short(row.reference)} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        cells = [f"<td>{escape(row.metric)}</td>"]
        figures = (f"{short(row.value)} {row.unit}", reference, ratio, row.goal)
        cells += [f'<td class="n">{escape(figure.strip())}</td>' for figure in figures]
        missed = row.goal and not row.ok
        cells.append(f'<td class="{"no" if missed else ""}">{("missed" if missed else "met") if row.goal else ""}</td>')
        cells.append(f"<td>{escape(row.reference_name)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])
