"""`kvtierctl purge`: forget blocks in every tier, for good: they do not come back after a crash either."""

from __future__ import annotations

import argparse

from kvtierd.cli import operators, output, selection
from kvtierd.cli.errors import CommandError, Failure

PATIENCE_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which."""
    selection.add_arguments(parser)
    parser.add_argument("--all", action="store_true", help="everything; without it something must be named")
    parser.set_defaults(timeout=PATIENCE_S)


def run(args: argparse.Namespace) -> int:
    """Purge. What a client is just storing is not there yet, and may come."""
    query = selection.query_of(args)
    if bool(query) == args.all:
        raise CommandError(Failure.USAGE, "name what to purge (--namespace, --tenant, --key, --older-than), or --all")
    found = operators.ask(args, "/purge", "POST", all=int(args.all), **query)
    output.say(args, f"{found['blocks']} blocks purged", found)
    return 0
