"""What a report runs: in pieces, part by part, and what it keeps of a run that fails or takes too long."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvtierd.bench.rows import as_json, make_row
from kvtierd.cli import report as command
from kvtierd.cli.errors import CommandError
from kvtierd.report import collect
from kvtierd.report.records import UNKNOWN, Record, as_line, latest
from tests.unit.report.test_report import MACHINE, ROWS, parsed


def test_a_run_in_pieces_goes_on_with_what_its_recording_has_not(tmp_path: Path, monkeypatch) -> None:
    asked: list[str] = []

    def run(words, _timeout_s):
        asked.append(words[1])
        failed = words[1] == "host" and asked.count("host") == 1
        return argparse.Namespace(stdout=as_json(ROWS[0]) + "\n", stderr="no room\n", returncode=64 * failed)

    monkeypatch.setattr(collect, "_run", run)
    page, saved = tmp_path / "page.html", tmp_path / "saved"
    words = ["--bench", "host", "--bench", "space", "--tokens", "none", "--output", str(page), "--save", str(saved)]
    assert command.run(parsed(*words, "--resume", "--for", "0")) == 75
    assert asked == [], "nothing begins when the time is over"
    assert command.run(parsed(*words, "--resume")) == 1
    assert command.run(parsed(*words, "--resume")) == 0, "the run that failed was not recorded whole"
    assert asked == ["host", "space", "host"]
    assert "no room" not in page.read_text(), "the later run of a command is shown, and the earlier is not"
    assert len(saved.read_text().splitlines()) == 3
    assert command.run(parsed(str(saved), "--output", str(page))) == 0
    with pytest.raises(CommandError, match="--save"):
        command.run(parsed("--resume"))


def test_of_runs_of_a_command_the_last_with_figures_is_shown_at_the_place_of_the_first() -> None:
    def ran(name: str, value: float, failed: str = "") -> Record:
        return Record(command=name, machine=MACHINE, rows=[make_row("host", "x", value, "s")], failed=failed)

    runs = [ran("a", 1.0), ran("b", 2.0, "it failed"), ran("a", 3.0), ran("a", 4.0, "it failed"), ran("b", 5.0)]
    assert [(run.command, run.rows[0].value) for run in latest(runs)] == [("a", 3.0), ("b", 5.0)]
    unknown = Record(command=UNKNOWN, machine=MACHINE)
    assert len(latest([unknown, unknown])) == 2


def test_each_trace_is_a_run_of_its_own_named_without_its_folder(tmp_path: Path, monkeypatch) -> None:
    asked: list[list[str]] = []

    def run(words, _timeout_s):
        asked.append(list(words))
        Path(words[words.index("--plot") + 1]).write_text("<svg/>")
        return argparse.Namespace(stdout="", stderr="", returncode=0)

    monkeypatch.setattr(collect, "_run", run)
    traces = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in traces:
        path.touch()
    found = list(collect.collect(collect.Wanted(benches=["trace"], contexts=[], traces=traces)))
    assert [words[2] for words in asked] == [str(path) for path in traces]
    assert [record and record.command for record in found] == [
        "kvtierctl bench trace a.jsonl --json", "kvtierctl bench trace b.jsonl --json"
    ]  # fmt: skip
    assert all(record and record.svg == "<svg/>" for record in found)
    with pytest.raises(CommandError, match=r"c\.jsonl is no file"):
        command.run(parsed("--trace", str(tmp_path / "c.jsonl")))


def test_benches_that_take_minutes_are_run_part_by_part() -> None:
    wanted = collect.Wanted(benches=["naive", "host"], contexts=["8k"], quick=True)
    assert [run.command for run in wanted.runs()] == [
        "kvtierctl bench naive --only residency --json --quick",
        "kvtierctl bench naive --only whole-context --json --quick",
        "kvtierctl bench naive --only growth --json --quick",
        "kvtierctl bench host --json --quick",
        "kvtierctl stress --json --tokens 8k --gpu 32M --host 128M",
    ]


def test_a_bench_that_takes_too_long_is_ended_and_what_it_printed_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(collect.sys, "executable", "/bin/sh")
    monkeypatch.setattr(collect, "_program", lambda _words: ["-c", "echo '{}'; sleep 60"])
    ended = collect._run(["bench", "host"], 0.5)
    assert ended.returncode == -15
    assert ended.stdout == "{}\n"
    assert "ended after 0.5 s" in ended.stderr


def test_a_real_command_is_run_and_its_last_word_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (record,) = collect.collect(collect.Wanted(benches=["peers"], contexts=[], quick=True))
    assert record is not None
    assert record.command == "kvtierctl bench peers --json --quick"
    assert "make bench-peers" in record.failed
    assert "load" in record.machine


def test_a_recording_is_measured_again_the_longest_last_and_what_cannot_be_is_kept(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    commands = [
        "kvtierctl stress --json --tokens 1M --gpu 32M --host 128M",
        "kvtierctl bench trace a.jsonl --json",
        "kvtierctl stress --json --tokens 128k --gpu 32M --host 128M",
        "kvtierctl bench naive --only growth --json",
        "kvtierctl bench host --json --quick",
        "kvtierctl bench host --json --quick",
        "somebody else's",
    ]
    saved, page = tmp_path / "saved", tmp_path / "page.html"
    records = [Record(command=each, machine=MACHINE, rows=ROWS) for each in commands]
    saved.write_text("".join(as_line(record) + "\n" for record in records))
    asked: list[tuple[str, ...]] = []

    def run(words, timeout_s):
        asked.append(tuple(words))
        assert timeout_s <= 180
        return argparse.Namespace(
            stdout=as_json(ROWS[0]) + "\n", stderr="ended late\n", returncode=words[0] == "stress"
        )

    monkeypatch.setattr(collect, "_run", run)
    words = ["--again", "--save", str(saved), "--output", str(page)]
    monkeypatch.setattr(
        collect, "from_stress", lambda told, machine, _: Record(command=told["command"], machine=machine)
    )
    assert command.run(parsed(*words, "--quick", "--bench", "host", "--bench", "space")) == 0
    assert [each[:4] for each in asked] == [
        ("bench", "naive", "--only", "growth"),
        ("bench", "host", "--json", "--quick"),
        ("bench", "space", "--json", "--quick"),
        ("stress", "--json", "--tokens", "128k"),
        ("stress", "--json", "--tokens", "1M"),
    ]
    assert len(saved.read_text().splitlines()) == len(commands) + 5
    told = capsys.readouterr().err
    assert "a.jsonl --json: kept as it is" in told
    assert "somebody else's: kept as it is" in told
    assert "at a load of" in told
    asked.clear()
    assert command.run(parsed(*words, "--for", "0")) == 75
    assert asked == []
    assert "no time was left" in capsys.readouterr().err
    with pytest.raises(CommandError, match="--save"):
        command.run(parsed("--again"))
