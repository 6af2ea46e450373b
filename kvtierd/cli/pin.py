"""`kvtierctl pin`: hold blocks in host, so that nothing evicts them, until `--undo` or the daemon's end."""

from __future__ import annotations

import argparse

from kvtierd.cli import operators, output, selection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which."""
    selection.add_arguments(parser)
    parser.add_argument("--undo", action="store_true", help="take pins of operators back")


def run(args: argparse.Namespace) -> int:
    """Pin, or unpin. Blocks that are not in host are brought there."""
    found = operators.ask(args, "/pin", "POST", undo=int(args.undo), **selection.query_of(args))
    output.say(args, f"{found['blocks']} blocks {'unpinned' if args.undo else 'pinned'}", found)
    return 0
