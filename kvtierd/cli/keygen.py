"""`kvtierctl keygen`: make a CURVE key pair, for the daemon's `server.tcp` or for a client of another machine.

The file holds the secret and is for its owner alone; the public key is printed. The daemon's is named in server.tcp_key
and its public key in $KVTIERD_SERVER_KEY of every client. A client's is named in $KVTIERD_KEY_FILE and its public key
below tenants.NAME.keys.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtierd.cli import output
from kvtierd.cli.errors import CommandError, Failure
from kvtierd.protocol.curve import KeyPair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write."""
    parser.add_argument("file", type=Path, metavar="FILE", help="file to write; it must not be there yet")
    parser.add_argument(
        "--show", action="store_true", help="write nothing; print the public key of a file that is there"
    )
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the pair and print the public key."""
    try:
        if args.show:
            pair = KeyPair.load(args.file)
        else:
            pair = KeyPair.new()
            pair.save(args.file)
    except FileExistsError as error:
        raise CommandError(Failure.USAGE, f"{args.file} is there already; keys are never overwritten") from error
    except OSError as error:
        raise CommandError(Failure.IO, f"{args.file}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(Failure.USAGE, str(error)) from error
    output.say(args, pair.public, {"public_key": pair.public, "file": str(args.file)})
    return 0
