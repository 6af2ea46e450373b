"""`kvtierctl watch`: requests and what becomes of blocks, as they happen, until interrupted.

The daemon keeps the last few thousand entries while somebody watches; what was more than that is counted and said. It
never waits for a watcher.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, get_args

from kvtierd.cli import operators, output
from kvtierd.cli.errors import CommandError, Failure
from kvtierd.protocol.messages import AnyRequest

EVERY_S = 0.2
KINDS = frozenset({"stored", "removed", *(str(kind.__struct_config__.tag) for kind in get_args(AnyRequest))})
"""What an entry can be of: a request's operation, or what became of blocks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to show, and when to stop."""
    operators.add_arguments(parser)
    parser.add_argument("--only", metavar="WHAT,...", default="", help="only these: get, lookup, stored, removed, ...")
    parser.add_argument("-n", "--count", type=output.count, default=0, metavar="N", help="stop after so many entries")


def run(args: argparse.Namespace) -> int:
    """Print entries until interrupted."""
    wanted = frozenset(filter(None, args.only.split(",")))
    if unknown := sorted(wanted - KINDS):
        raise CommandError(
            Failure.USAGE, f"nothing is called {', '.join(unknown)}; there are {', '.join(sorted(KINDS))}"
        )
    following, shown = -1, 0
    while True:
        found = operators.ask(args, "/watch", after=following)
        following = found["next"]
        if found["skipped"]:
            output.say(args, f"... {found['skipped']} entries were skipped", {"skipped": found["skipped"]})
        for entry in found["entries"]:
            if wanted and entry["what"] not in wanted:
                continue
            output.say(args, line(entry), entry)
            shown += 1
            if shown == args.count:
                return 0
        time.sleep(EVERY_S)


def line(entry: dict[str, Any]) -> str:
    """One entry as people read it."""
    rest = " ".join(f"{name}={value}" for name, value in entry.items() if name not in {"time", "what"} and value != "")
    return f"{entry['time']} {entry['what']:<8} {rest}"
