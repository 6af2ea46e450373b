"""`kvtierctl drain`: take no more stores and write what is dirty, while reads go on; before maintenance.

/readyz says no from then on. `--undo` takes stores again; so does a restart.
"""

from __future__ import annotations

import argparse
import time

from kvtierd.cli import operators, output
from kvtierd.cli.errors import CommandError, Failure
from kvtierd.core.units import format_bytes

EVERY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to wait."""
    operators.add_arguments(parser)
    parser.add_argument("--undo", action="store_true", help="take stores again")
    parser.add_argument(
        "--wait", type=output.seconds_or_none, default=600.0, metavar="S", help="for the backlog; 0: not (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Drain, or end it. Exit code 69 when the backlog is not written in time."""
    found = operators.ask(args, "/drain", "POST", undo=int(args.undo))
    deadline_s = time.monotonic() + args.wait
    while not args.undo and args.wait and found["backlog_bytes"]:
        if time.monotonic() > deadline_s:
            left = format_bytes(found["backlog_bytes"])
            raise CommandError(Failure.UNAVAILABLE, f"{left} are not written after {args.wait:.0f} s; it goes on")
        time.sleep(EVERY_S)
        found = operators.ask(args, "/drain")
        if not found["draining"]:
            raise CommandError(Failure.UNAVAILABLE, "somebody had stores taken again before all was written")
    output.say(args, found["status"], found)
    return 0
