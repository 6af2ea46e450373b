"""`kvtierctl info`: the daemon's state in sections.

Sections are host, gpu, nvme, server, daemon and clients; without one all are shown.
"""

from __future__ import annotations

import argparse

from kvtierd.cli import operators, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which section."""
    operators.add_arguments(parser)
    parser.add_argument("section", nargs="?", default="", metavar="SECTION", help="one section (else all)")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    found = operators.ask(args, "/info", **({"section": args.section} if args.section else {}))
    parts = [f"# {name}\n{output.values(values)}" for name, values in found["sections"].items()]
    output.say(args, "\n\n".join([f"# {found['status']}", *parts]), found)
    return 0
