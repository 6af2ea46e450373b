"""`kvtierctl namespaces`: what the blocks belong to, the largest first."""

from __future__ import annotations

import argparse

from kvtierd.cli import operators, output
from kvtierd.core.units import format_bytes

_HEADS = ("blocks", "size", "block size", "dtype", "tenant", "model", "revision", "digest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many."""
    operators.add_arguments(parser)
    parser.add_argument(
        "-n", "--count", type=output.count, default=50, metavar="N", help="at most so many (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a table."""
    found = operators.ask(args, "/namespaces")["namespaces"]
    found.sort(key=lambda entry: entry["bytes"], reverse=True)
    shown = found[: max(0, args.count)]
    rows = [
        (
            entry["blocks"],
            format_bytes(entry["bytes"]),
            entry["block_size"],
            entry["dtype"],
            entry["tenant"],
            entry["model"],
            entry["revision"],
            entry["digest"][:16],
        )
        for entry in shown
    ]
    left = f"\n{len(found) - len(shown)} more" if len(found) > len(shown) else ""
    output.say(args, output.columns(_HEADS, rows) + left, shown)
    return 0
