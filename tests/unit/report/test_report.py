"""`kvtierctl report` from recorded rows: what a page shows, what it says is missing, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvtierd.bench.rows import as_json, make_row
from kvtierd.cli import report as command
from kvtierd.cli.errors import CommandError
from kvtierd.report import collect
from kvtierd.report.charts import Bar, Line, bar_chart, line_chart
from kvtierd.report.machine import describe
from kvtierd.report.markdown import as_markdown
from kvtierd.report.page import as_html
from kvtierd.report.records import UNKNOWN, Record, RecordError, as_line, latest, read_records
from kvtierd.report.sections import sections

MACHINE = "EPYC <9>, 2 CPUs, load 0.1"


def stress(tokens: int, verdict: str = "pass", what: str = "") -> dict[str, object]:
    """What `kvtierctl stress --json` prints."""
    figures = {"step": tokens * 1e-6, "disk_alone": tokens * 9e-7, "compute_alone": tokens * 2e-7}
    figures |= {"memory_peak": 500 << 20, "memory_budget": 600 << 20}
    return {
        "verdict": verdict,
        "command": f"kvtierctl stress --json --tokens {tokens}",
        "machine": "somehost",
        "what": what or f"{tokens:,} tokens",
        "tokens": tokens,
        "context_bytes": tokens * 8192,
        "findings": [] if verdict == "pass" else ["block 7 has other bytes"],
        "ended_at": "",
        "rows": [
            json.loads(as_json(make_row("stress", "ingest", 1.0, "GB/s", reference=2.0, reference_name="copies")))
        ],
        "figures": figures,
        "counts": {},
    }


ROWS = [
    make_row("host", "store", 5.0, "GB/s", reference=8.0, reference_name="plain copies", goal=">= 0.4"),
    make_row("host", "acquire", 1.0, "GB/s", reference=8.0, reference_name="plain copies", goal=">= 0.85"),
    make_row("recovery", "100,000 blocks, clean checkpoint", 0.3, "s", goal="<= 0.5"),
    make_row("recovery", "10,000 blocks, clean checkpoint", 0.1, "s"),
    make_row("memory", "16 requests: blocks of 128 tokens", 0.97, "", goal=">= 0.96"),
    make_row("peers", "lookup of 4,096 tokens", 0.4, "ms", reference=53.0, reference_name="LMCache", goal="<= 0.05"),
    make_row("attend", "daemon's memory after 256k tokens", 400.0, "MiB", reference=399.0, reference_name="half"),
    make_row("trace", "chat: prefix-hit ratio, 1,000 blocks", 0.1, "", reference=0.09,
             reference_name="ARC, the best of six; the bound is 0.2000"),
    make_row("trace", "chat: prefix-hit ratio, 4,000 blocks", 0.2, "", reference=0.19,
             reference_name="LRU, the best of six; the bound is 0.3000"),
]  # fmt: skip


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recorded"
    record = Record(command="kvtierctl bench all --json", machine=MACHINE, recorded="2026-11-30", rows=ROWS)
    lines = [as_line(record), *(json.dumps(stress(tokens)) for tokens in (8192, 1 << 20, 131072))]
    path.write_text("\n".join(lines) + "\n")
    return path


def drawings(html: str) -> list[ET.Element]:
    """Every SVG of a page, which must be well formed."""
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


class Page(HTMLParser):
    """Collects what would be fetched, and the tags that are open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "link", "img", "iframe", "object"}:
            self.fetched.append(tag)
        self.fetched += [value for name, value in attrs if name in {"src", "href"} and value]
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_has_every_plot_and_fetches_nothing(recording: Path) -> None:
    records = read_records([recording])
    html = as_html(records, sections(records))
    assert len(drawings(html)) == 7
    page = Page(html)
    assert page.fetched == []
    assert page.open == []
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "EPYC &lt;9&gt;" in html
    assert "somehost" not in html, "whose machine it is does not belong into a report"


def test_each_plot_names_the_command_and_the_machine_that_made_it(recording: Path) -> None:
    for part in sections(read_records([recording])):
        assert part.sources, part.title
        for record in part.sources:
            html = as_html([record], [part])
            assert record.command in html
            assert record.machine.partition(" ")[0] in html


def test_steps_are_drawn_over_the_length_of_the_context(recording: Path) -> None:
    part = sections(read_records([recording]))[0]
    (drawing,) = drawings(part.svg)
    texts = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert {"8k", "128k", "1M", "a decode step", "the kernel alone"} <= set(texts)
    curves = [element for element in drawing.iter() if element.tag.endswith("circle")]
    assert len(curves) == 3 * 3


def test_fp8_and_chaos_are_in_no_curve_of_plain_runs() -> None:
    records = [from_line(json.dumps(stress(8192, what="8,192 tokens, seed 1, FP8")))]
    assert not sections(records)[0].svg
    assert not sections(records)[3].svg


def from_line(line: str) -> Record:
    path = Path("-")

    class Lines(type(path)):  # a file that is a line
        def read_text(self, *_: object, **__: object) -> str:
            return line

    return read_records([Lines("-")])[0]


def test_what_was_not_measured_is_said_with_the_command_that_measures_it() -> None:
    html = as_html([], sections([]))
    assert html.count("Not measured:") == 7
    assert "kvtierctl bench recovery --json" in html
    assert not drawings(html)


def test_the_benchs_own_drawing_of_hit_ratios_is_taken_as_it_is() -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><text>all policies</text></svg>'
    record = Record(command="kvtierctl bench trace --json", machine=MACHINE, rows=ROWS, svg=svg)
    part = sections([record])[2]
    assert part.svg == svg
    assert part.sources == [record]


def test_rows_of_a_bench_are_one_run_and_their_machine_is_not_made_up(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("\n".join(as_json(row) for row in ROWS))
    records = read_records([path])
    assert [len(record.rows) for record in records] == [2, 2, 1, 1, 1, 2]
    assert {record.machine for record in records} == {UNKNOWN}
    assert records[0].command == "kvtierctl bench host --json"


@pytest.mark.parametrize("line", ["no json", "[]", '{"bench": "host"}', '{"command": 1}', '{"verdict": "pass"}', "7"])
def test_what_is_no_recording_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows"
    path.write_text(as_json(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(RecordError, match=r"rows:2: "):
        read_records([path])
    with pytest.raises(RecordError, match="missing"):
        read_records([tmp_path / "missing"])


def test_markdown_has_every_figure_and_every_missed_goal(recording: Path) -> None:
    text = as_markdown(read_records([recording]))
    assert text.count("\n| ") == len(ROWS) + 3 + 4  # the rows of the stress, and four heads
    assert "| acquire | 1 GB/s | 8 GB/s | 0.12 | >= 0.85 | **missed** | plain copies |" in text
    assert "1. EPYC <9>, 2 CPUs\n" in text
    assert "at a load of 0.1" in text
    assert "**pass**" in text


def test_findings_of_the_stress_are_in_both() -> None:
    record = from_line(json.dumps(stress(8192, "fail")))
    assert "block 7 has other bytes" in as_markdown([record])
    assert "block 7 has other bytes" in as_html([record], [])


def test_charts_refuse_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="needs points"):
        line_chart([Line("x", [])], "a", "b")
    with pytest.raises(ValueError, match="above 0"):
        line_chart([Line("x", [(0.0, 1.0)])], "a", "b")
    with pytest.raises(ValueError, match="needs bars"):
        bar_chart([])


def test_bars_are_as_long_as_their_figures() -> None:
    drawing = ET.fromstring(bar_chart([Bar("a", 2.0, 4.0, "b", "GB/s"), Bar("c", 50.0, unit="%")]))
    widths = [float(element.attrib["width"]) for element in drawing.iter() if element.tag.endswith("rect")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert widths[2] == widths[1]


def test_one_length_of_context_is_a_plot_too() -> None:
    drawing = ET.fromstring(line_chart([Line("x", [(8192, 0.0)])], "tokens", "ms"))
    assert [element for element in drawing.iter() if element.tag.endswith("circle")]


def test_a_machine_is_described_without_names() -> None:
    text = describe()
    assert re.search(r"\d+ CPUs", text)
    assert "load" in text
    import platform

    assert platform.node() not in text or len(platform.node()) < 3


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_writes_both_from_recorded_files(recording: Path, tmp_path: Path, capsys) -> None:
    page, table = tmp_path / "page.html", tmp_path / "table.md"
    assert command.run(parsed(str(recording), "--output", str(page), "--markdown", str(table))) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert drawings(page.read_text())
    assert "# Benchmarks" in table.read_text()


def test_the_command_fails_where_something_was_found(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_text(json.dumps(stress(8192, "fail")))
    assert command.run(parsed(str(path), "--output", str(tmp_path / "page.html"))) == 1


def test_what_cannot_be_written_or_run_is_one_line(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        command.run(parsed(str(recording), "--output", str(tmp_path / "none" / "page.html")))
    with pytest.raises(CommandError, match="'nonsense' is no bench"):
        command.run(parsed("--bench", "nonsense"))


def test_what_is_run_now_is_recorded_and_makes_the_same_page_again(tmp_path: Path, monkeypatch) -> None:
    asked: list[list[str]] = []

    def run(words, _timeout_s):
        asked.append(list(words))
        out = json.dumps(stress(8192)) if words[0] == "stress" else "\n".join(as_json(row) for row in ROWS[:2])
        return argparse.Namespace(stdout=out + "\n", stderr="", returncode=0)

    monkeypatch.setattr(collect, "_run", run)
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    saved = tmp_path / "saved"
    words = ["--bench", "host", "--tokens", "8k", "--quick", "--output", str(pages[0]), "--save", str(saved)]
    assert command.run(parsed(*words)) == 0
    assert [words[:2] for words in asked] == [["bench", "host"], ["stress", "--json"]]
    assert command.run(parsed(str(saved), "--output", str(pages[1]))) == 0
    assert pages[0].read_text() == pages[1].read_text()


def test_a_bench_that_cannot_run_is_in_the_report_and_stops_no_other(tmp_path: Path, monkeypatch) -> None:
    def run(words, _timeout_s):
        failed = words[1] == "peers"
        out = "" if failed else as_json(ROWS[0]) + "\n"
        return argparse.Namespace(stdout=out, stderr="kvtierctl bench peers: no peer\n", returncode=69 * failed)

    monkeypatch.setattr(collect, "_run", run)
    words = ["--bench", "peers", "--bench", "host", "--tokens", "none", "--output", str(tmp_path / "page.html")]
    assert command.run(parsed(*words)) == 1
    html = (tmp_path / "page.html").read_text()
    assert "it ended with 69: kvtierctl bench peers: no peer" in html
    assert "plain copies" in html


def test_benchmarks_md_is_made_of_the_recording_beside_it() -> None:
    root = Path(__file__).parents[3]
    made = as_markdown(latest(read_records([root / "docs/benchmarks.jsonl"])))
    assert (root / "BENCHMARKS.md").read_text() == made, (
        "kvtierctl report docs/benchmarks.jsonl --markdown BENCHMARKS.md"
    )
