"""`kvtierctl slowlog`: requests that took longer than metrics.slow_ms, the newest last."""

from __future__ import annotations

import argparse

from kvtierd.cli import operators, output

_HEADS = ("time", "ms", "request", "blocks", "outcome", "client", "pid", "namespace")
FIELDS = ("time", "ms", "what", "blocks", "outcome", "client", "pid", "namespace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many."""
    operators.add_arguments(parser)
    parser.add_argument(
        "-n", "--count", type=output.count, default=20, metavar="N", help="at most so many (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a table."""
    found = operators.ask(args, "/slowlog")
    entries = found["entries"][-args.count :] if args.count > 0 else []
    rows = [[entry[name] for name in FIELDS] for entry in entries]
    head = f"{found['next']} requests took over {found['slow_ms']} ms; {len(rows)} shown"
    output.say(args, f"{head}\n{output.columns(_HEADS, rows)}" if rows else head, {**found, "entries": entries})
    return 0
