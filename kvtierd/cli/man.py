"""`kvtierctl man`: the manual pages, as roff.

Made of what --help shows. `kvtierctl man kvtierd | man -l -` reads one; `kvtierctl systemd install` installs all.
"""

from __future__ import annotations

import argparse

from kvtierd.cli.manual import MANUALS, manual


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which page."""
    parser.add_argument("page", nargs="?", choices=list(MANUALS), default="kvtierctl", help="which page (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    print(manual(args.page), end="")
    return 0
