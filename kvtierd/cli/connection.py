"""The option that names a daemon, and a client of it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from kvtierd.cli import output
from kvtierd.cli.errors import CommandError, Failure
from kvtierd.core.errors import RequestError
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.endpoint import default_endpoint

TIMEOUT_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--endpoint`, `--timeout`, and what says how to print."""
    parser.add_argument("--endpoint", metavar="ADDRESS", help=f"the daemon's address (else {default_endpoint()})")
    parser.add_argument(
        "--timeout", type=output.seconds, default=TIMEOUT_S, metavar="S", help="seconds to wait (%(default)s)"
    )
    output.add_arguments(parser)


@contextlib.contextmanager
def connect(args: argparse.Namespace) -> Iterator[Client]:
    """A client; errors of the daemon become CommandError, with what to do."""
    try:
        with Client(args.endpoint, timeout_s=args.timeout, transfer_timeout_s=args.timeout, name="kvtierctl") as client:
            yield client
    except Unavailable as error:
        said = str(error)
        advice = "" if "is kvtierd running" in said else "; is kvtierd running, and is --endpoint right?"
        raise CommandError(Failure.UNAVAILABLE, said + advice) from error
    except (RequestError, ValueError) as error:
        raise CommandError(Failure.USAGE, str(error)) from error
