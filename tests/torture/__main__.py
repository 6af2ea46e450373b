"""`python -m tests.torture`: long random runs with faults, resumable and seeded, one line for each finding.

It goes on where it was ended; `--fresh` begins anew. Exit code 1 where anything was found, 75 where `--for` ended it
before all was done: the same command goes on.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.torture import cycles, faults, frames, kills, soak, stalls, suites
from tests.torture.driver import run_parts, run_unit, say
from tests.torture.parts import Part, Unit
from tests.torture.state import OtherRunError, State

PARTS: dict[str, Part] = {
    part.name: part for part in (suites.PART, kills.PART, frames.PART, faults.PART, stalls.PART, cycles.PART, soak.PART)
}
FOLDER = Path(".torture")
EXIT_NOT_DONE = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit code."""
    args = _parser().parse_args(argv)
    logging.getLogger().addHandler(logging.NullHandler())  # what fails on purpose is not worth a line
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    if args.replay:
        findings = run_unit(*_named(args.replay, folder))
        for finding in findings:
            say(f"FINDING {finding}")
        return _verdict(findings)
    chosen = [PARTS[name] for name in (args.only or PARTS)]
    totals = {part.name: _total(args, part) for part in chosen}
    path = folder / "state.json"
    if args.fresh:
        path.unlink(missing_ok=True)
    try:
        state = State(path, args.seed, totals)
    except OtherRunError as error:
        say(f"torture: {error}")
        return 64
    for finding in state.findings:
        say(f"FINDING {finding}")  # of the run that this one goes on with
    end_s = time.monotonic() + args.seconds
    if not run_parts(chosen, state, args.seed, totals, folder, say, end_s):
        say("torture: not done yet; the same command goes on")
        return EXIT_NOT_DONE
    state.remove()
    return _verdict(state.findings)


def _verdict(findings: list[str]) -> int:
    say(f"torture: {len(findings)} findings")
    return 1 if findings else 0


def _total(args: argparse.Namespace, part: Part) -> int:
    given: int | None = getattr(args, part.name)
    return given if given is not None else part.small if args.small else part.full


def _named(text: str, folder: Path) -> tuple[Part, Unit]:
    name, number, amount, seed = text.split(":")
    return PARTS[name], Unit(name, int(number), int(amount), int(seed), folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="everything random is made from it")
    parser.add_argument("--small", action="store_true", help="the small form of every part, a minute or two in all")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever an earlier run has done")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="one part; may be given several times")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="state, and what findings leave behind")
    parser.add_argument("--replay", metavar="PART:UNIT:AMOUNT:SEED", help="one unit again, as a finding names it")
    parser.add_argument(
        "--for", type=float, default=math.inf, dest="seconds", metavar="S", help="begin no unit after so many seconds"
    )
    for part in PARTS.values():
        parser.add_argument(f"--{part.name}", type=int, metavar="N", help=f"{part.counts}, {part.full:,} by default")
    return parser


if __name__ == "__main__":
    sys.exit(main())
