"""`kvtierctl ping`: does the daemon answer, and how fast?"""

from __future__ import annotations

import argparse
import statistics

from kvtierd.cli import connection, output
from kvtierd.cli.connection import connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon, and how many times."""
    connection.add_arguments(parser)
    parser.add_argument("-c", "--count", type=output.count, default=5, metavar="N", help="round trips (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print one line; exit code 69 when nobody answers."""
    with connect(args) as client:
        times_us = [client.ping() / 1000 for _ in range(max(1, args.count))]
        found = {"endpoint": client.endpoint, "count": len(times_us)}
        figures = {"median_us": round(statistics.median(times_us), 1), "max_us": round(max(times_us), 1)}
        text = f"{client.endpoint} answers; {len(times_us)} round trips: "
        text += f"median {figures['median_us']:.0f} us, max {figures['max_us']:.0f} us"
        output.say(args, text, found | figures)
    return 0
