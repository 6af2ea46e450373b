"""The driver of `make torture`: it goes on where it was ended, and tells everything, once, in a line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.torture import __main__ as command
from tests.torture.driver import run_parts
from tests.torture.parts import Part, Unit
from tests.torture.state import OtherRunError, State

TOTALS = {"a": 5, "b": 2}


class Recorder:
    """Two parts that note what they are asked to do; `trouble` is what a unit of a does."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.trouble: dict[int, BaseException | str] = {}
        self.lines: list[str] = []
        self.parts = [Part("a", "things", 5, 1, 2, self.run), Part("b", "others", 2, 1, 1, self.run)]

    def run(self, unit: Unit):
        self.units.append(unit)
        trouble = self.trouble.get(unit.number) if unit.part == "a" else None
        if isinstance(trouble, BaseException):
            raise trouble
        if trouble:
            yield trouble

    def go(self, folder: Path, seed: int = 7) -> State:
        state = State(folder / "state.json", seed, TOTALS)
        run_parts(self.parts, state, seed, TOTALS, folder, self.lines.append)
        return state


def test_units_are_as_large_as_asked_for_and_seeded_apart(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.go(tmp_path)
    assert [(unit.part, unit.amount) for unit in recorder.units] == [("a", 2), ("a", 2), ("a", 1), ("b", 1), ("b", 1)]
    assert len({unit.seed for unit in recorder.units}) == 5
    again = Recorder()
    again.go(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path)
    assert [unit.seed for unit in again.units] == [unit.seed for unit in recorder.units]


def test_a_run_that_was_ended_goes_on_with_the_unit_that_was_not_done(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.trouble = {0: "a bad thing", 1: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        recorder.go(tmp_path)
    broken_off = recorder.units[-1]
    later = Recorder()
    state = later.go(tmp_path)
    assert later.units[0] == broken_off
    assert len(later.units) == 4
    assert len(state.findings) == 1


def test_an_exception_is_a_finding_with_its_traceback_and_the_others_go_on(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.trouble = {1: ValueError("it broke\nin two lines")}
    state = recorder.go(tmp_path)
    assert len(recorder.units) == 5
    (finding,) = state.findings
    assert finding.startswith("a unit 1: ValueError: it broke (replay: ")
    assert "in two lines" in (tmp_path / "a-1" / "traceback").read_text()
    assert not (tmp_path / "a-0").exists(), "what found nothing leaves nothing"
    assert [line for line in recorder.lines if line.startswith("FINDING")] == [f"FINDING {finding}"]


def test_a_finding_names_what_replays_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    recorder = Recorder()
    recorder.trouble = {2: "a bad thing"}
    (finding,) = recorder.go(tmp_path).findings
    match = re.search(r"--replay (\S+)\)", finding)
    assert match is not None
    monkeypatch.setattr(command, "PARTS", {part.name: part for part in recorder.parts})
    again = ["--folder", str(tmp_path), "--replay", match[1]]
    assert command.main(again) == 1
    assert recorder.units[-1].seed == recorder.units[2].seed
    assert "a bad thing" in capsys.readouterr().out


def test_another_seed_does_not_go_on_with_this_run(tmp_path: Path) -> None:
    State(tmp_path / "state.json", 7, TOTALS).finish_unit("a", [])
    with pytest.raises(OtherRunError, match="seed 7, and this one has 8"):
        State(tmp_path / "state.json", 8, TOTALS)
    with pytest.raises(OtherRunError, match="--fresh"):
        State(tmp_path / "state.json", 7, {"a": 6, "b": 2})


def test_the_command_counts_findings_and_forgets_a_run_that_is_over(tmp_path, monkeypatch, capsys) -> None:
    recorder = Recorder()
    recorder.trouble = {0: "a bad thing"}
    monkeypatch.setattr(command, "PARTS", {part.name: part for part in recorder.parts})
    assert command.main(["--folder", str(tmp_path), "--a", "1", "--b", "0"]) == 1
    assert "torture: 1 findings" in capsys.readouterr().out
    assert not (tmp_path / "state.json").exists()
    assert command.main(["--folder", str(tmp_path), "--only", "b"]) == 0
    (tmp_path / "state.json").write_text(json.dumps({"seed": 3, "totals": {}, "done": {}, "findings": []}))
    assert command.main(["--folder", str(tmp_path), "--only", "b"]) == 64
    assert command.main(["--folder", str(tmp_path), "--only", "b", "--fresh"]) == 0


def test_a_run_in_pieces_says_that_it_is_not_done_and_keeps_what_was_found(tmp_path, monkeypatch, capsys) -> None:
    recorder = Recorder()
    recorder.trouble = {0: "a bad thing"}
    monkeypatch.setattr(command, "PARTS", {part.name: part for part in recorder.parts})
    piece = ["--folder", str(tmp_path), "--a", "3", "--b", "0", "--for"]
    assert command.main([*piece, "0"]) == 75
    assert not recorder.units, "no unit begins when the time is over"
    State(tmp_path / "state.json", 1, {"a": 3, "b": 0}).finish_unit("a", ["a bad thing"])
    assert command.main([*piece, "60"]) == 1, "what an earlier piece found counts at the end"
    assert [unit.number for unit in recorder.units] == [1]
    assert "torture: 1 findings" in capsys.readouterr().out
