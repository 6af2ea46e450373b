"""`kvtierctl blocks`: which blocks there are, where, and how long ago they were used."""

from __future__ import annotations

import argparse

from kvtierd.cli import operators, output, selection
from kvtierd.core.units import format_bytes

_HEADS = ("key", "tiers", "size", "age s", "pins", "tenant", "model", "digest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which, and how many."""
    selection.add_arguments(parser)
    parser.add_argument("--tier", choices=["gpu", "host", "nvme"], help="only those with a copy there")
    parser.add_argument(
        "-n", "--count", type=output.count, default=50, metavar="N", help="at most so many (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a table."""
    tier = {"tier": args.tier} if args.tier else {}
    found = operators.ask(args, "/blocks", count=args.count, **tier, **selection.query_of(args))
    rows = [
        (
            block["key"][:32],
            "+".join(block["tiers"]),
            format_bytes(block["bytes"]),
            block["age_s"],
            block["pins"],
            block["tenant"],
            block["model"],
            block["digest"][:16],
        )
        for block in found["blocks"]
    ]
    more = found["total"] - len(rows)
    output.say(args, output.columns(_HEADS, rows) + (f"\n{more} more" if more else ""), found)
    return 0
