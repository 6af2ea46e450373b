"""`kvtierctl evict`: drop copies of blocks in gpu or host, where another copy remains."""

from __future__ import annotations

import argparse

from kvtierd.cli import operators, output, selection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which, and where."""
    selection.add_arguments(parser)
    parser.add_argument("--tier", choices=["gpu", "host"], required=True, help="which copies go")


def run(args: argparse.Namespace) -> int:
    """Evict. What is in use, or is nowhere else, stays; `kvtierctl flush` first brings the latter to disk."""
    found = operators.ask(args, "/evict", "POST", tier=args.tier, **selection.query_of(args))
    stay = f"; {found['kept']} stay: in use, or without another copy" if found["kept"] else ""
    output.say(args, f"{found['blocks']} copies evicted{stay}", found)
    return 0
