"""`kvtierctl flush`: wait until everything committed is on stable storage."""

from __future__ import annotations

import argparse
import time

from kvtierd.cli import connection, output
from kvtierd.cli.connection import connect

PATIENCE_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon; `--timeout` is how long it may take."""
    connection.add_arguments(parser)
    parser.set_defaults(timeout=PATIENCE_S)


def run(args: argparse.Namespace) -> int:
    """Flush; exit code 69 when it could not be done in time."""
    begin_s = time.monotonic()
    with connect(args) as client:
        client.ping(timeout_s=min(args.timeout, connection.TIMEOUT_S))  # a daemon that is away is told now, not then
        client.flush(timeout_s=args.timeout)
    seconds = time.monotonic() - begin_s
    output.say(args, f"everything committed is on stable storage ({seconds:.2f} s)", {"seconds": round(seconds, 3)})
    return 0
