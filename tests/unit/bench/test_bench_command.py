"""`kvtierctl bench`: what it prints and how it ends."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.bench import demo
from kvtierd.bench.catalogue import BENCHES, run_bench
from kvtierd.bench.options import Options, busy_note
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.cli import bench as command

ROWS = {
    "protocol": [make_row("protocol", "rate", 2.0, "1/s", reference=1.0, reference_name="echo", goal=">= 0.5")],
    "host": [make_row("host", "copy", 1.0, "GB/s", reference=2.0, reference_name="copies", goal=">= 0.85")],
}


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, options: Options) -> Iterator[Row]:
        assert options == Options(quick=True, directory=Path("/"))
        if name not in ROWS:
            raise BenchError(f"{name} wants what is not here")
        yield from ROWS[name]

    monkeypatch.setattr(command, "run_bench", run)


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="kvtierctl bench")
    command.add_arguments(parser)
    return command.run(parser.parse_args([*arguments, "--quick", "--directory", "/"]))


@pytest.mark.usefixtures("_scripted")
def test_json_is_one_object_a_line_and_a_missed_goal_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("host", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["ok"] for line in lines] == [False]


@pytest.mark.usefixtures("_scripted")
def test_strict_fails_on_a_missed_goal_only() -> None:
    assert call("host", "--strict") == 1
    assert call("protocol", "--strict") == 0


@pytest.mark.usefixtures("_scripted")
def test_without_json_there_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("protocol") == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith("bench")
    assert line.startswith("protocol")


@pytest.mark.usefixtures("_scripted")
def test_a_bench_that_cannot_run_is_named_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("all", "--json") == 69
    output = capsys.readouterr()
    assert [json.loads(line)["bench"] for line in output.out.splitlines()] == ["protocol", "host"]
    assert "kvtierctl bench nvme: nvme wants what is not here" in output.err


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("nonsense")
    assert "nonsense" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'nonsense' is no bench"):
        run_bench("nonsense", Options())


def test_parts_that_a_bench_has_not_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("host", "--only", "growth") == 64
    assert "--only growth is no part of host (naive: residency whole-context growth" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'nonsense' is no part of bench naive, which has residency"):
        run_bench("naive", Options(only=("nonsense",)))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    missing = tmp_path / "missing"
    assert command.run(parser.parse_args(["host", "--directory", str(missing)])) == 64
    assert f"{missing} is no folder" in capsys.readouterr().err


def test_a_busy_machine_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    assert "load of this machine is 1000.0" in busy_note()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert not busy_note()


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_in_the_catalogue_can_be_loaded(name: str) -> None:
    rows = run_bench(name, Options(quick=True))
    assert iter(rows) is rows


def test_the_demo_names_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_NEEDED", ("torch_that_is_not_there",))
    with pytest.raises(BenchError, match=r"torch_that_is_not_there: pip install 'kvtierd\[demo\]'"):
        list(demo.rows(Options()))
