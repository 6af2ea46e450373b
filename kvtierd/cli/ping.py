"""`kvtierctl ping`: does the daemon answer, and how fast?"""

from __future__ import annotations

import argparse
import statistics

from kvtierd.cli import connection
from kvtierd.cli.connection import connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon, and how many times."""
    connection.add_arguments(parser)
    parser.add_argument("-c", "--count", type=int, default=5, metavar="N", help="round trips (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print one line; exit code 69 when nobody answers."""
    with connect(args) as client:
        times_us = [client.ping() / 1000 for _ in range(max(1, args.count))]
        print(
            f"{client.endpoint} answers; {len(times_us)} round trips: "
            f"median {statistics.median(times_us):.0f} us, max {max(times_us):.0f} us"
        )
    return 0
