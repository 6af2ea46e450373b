"""Runs units of torture in turn, takes exceptions for findings, and leaves what a finding's replay needs."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.torture.parts import Part, Unit, seed_of
from tests.torture.state import State

Say = Callable[[str], None]


def run_parts(
    parts: Sequence[Part],
    state: State,
    seed: int,
    totals: dict[str, int],
    folder: Path,
    say: Say,
    end_s: float = math.inf,
) -> bool:
    """Run what is not done yet. A unit's findings are said, one line each, as soon as the unit is over.

    No unit begins at or after `end_s` (CLOCK_MONOTONIC). Returns whether all is done.
    """
    for part in parts:
        amounts = part.amounts(totals[part.name])
        for number in range(state.done[part.name], len(amounts)):
            begin_s = time.monotonic()
            if begin_s >= end_s:
                return False
            unit = Unit(part.name, number, amounts[number], seed_of(seed, part.name, number), folder)
            findings = run_unit(part, unit)
            for finding in findings:
                say(f"FINDING {finding}")
            state.finish_unit(part.name, findings)
            took_s = time.monotonic() - begin_s
            say(f"{part.name}: {sum(amounts[: number + 1])} of {sum(amounts)} {part.counts}, {took_s:.1f} s")
    return True


def run_unit(part: Part, unit: Unit) -> list[str]:
    """Findings of a unit, each with what replays it. Its folder is kept where there are any."""
    folder = unit.folder / f"{unit.part}-{unit.number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    inside = Unit(unit.part, unit.number, unit.amount, unit.seed, folder)
    findings = list(_found(part, inside))
    if not findings:
        shutil.rmtree(folder)
        return []
    # What is said is also beside what is left of the unit, for whoever looks at it later.
    (folder / "findings").write_text("\n".join(findings) + "\n")
    replay = f"replay: python -m tests.torture --replay {part.name}:{unit.number}:{unit.amount}:{unit.seed}"
    return [f"{part.name} unit {unit.number}: {finding} ({replay})" for finding in findings]


def _found(part: Part, unit: Unit) -> Iterator[str]:
    try:
        yield from part.run(unit)
    except Exception as error:  # noqa: BLE001 - whatever breaks under torture is what it is for
        (unit.folder / "traceback").write_text(traceback.format_exc())
        lines = str(error).splitlines() or [""]
        yield f"{type(error).__name__}: {lines[0]}"


def say(line: str) -> None:
    """One line on standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def environment() -> dict[str, str]:
    """The environment of a process that must find this very checkout, wherever it was started from."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
