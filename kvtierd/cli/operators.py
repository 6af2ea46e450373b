"""The operators' socket: what only root and the daemon's own user may ask, over HTTP on a Unix socket."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kvtierd.cli import output
from kvtierd.cli.errors import CommandError, Failure
from kvtierd.core.folders import ADMIN_FOLDER
from kvtierd.protocol.endpoint import SOCKET_NAME, default_endpoint, path_of

TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--endpoint` and what says how to print."""
    parser.add_argument("--endpoint", metavar="ADDRESS", help=f"a tenant's address (else {default_endpoint()})")
    parser.add_argument(
        "--timeout", type=output.seconds, default=TIMEOUT_S, metavar="S", help="seconds to wait (%(default)s)"
    )
    output.add_arguments(parser)


def socket_of(endpoint: str | None) -> Path:
    """The operators' socket of the daemon that serves an endpoint; $KVTIERD_ADMIN_SOCKET names another one."""
    if (given := os.environ.get("KVTIERD_ADMIN_SOCKET")) and endpoint is None:
        return Path(given)
    try:
        return path_of(endpoint or default_endpoint()).parent.parent / ADMIN_FOLDER / SOCKET_NAME
    except ValueError as error:
        raise CommandError(Failure.USAGE, str(error)) from error


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the path in place of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.sock.close()
            raise


def ask(args: argparse.Namespace, path: str, method: str = "GET", **query: Any) -> Any:
    """The answer's JSON. Raises CommandError with what to do."""
    where = socket_of(args.endpoint)
    connection = _UnixConnection(where, args.timeout)
    target = f"{path}?{urlencode(query)}" if query else path
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        body = answer.read()
    except PermissionError as error:
        message = f"{where}: this is for root and for the user that runs kvtierd"
        raise CommandError(Failure.UNAVAILABLE, message) from error
    except (OSError, http.client.HTTPException) as error:
        message = f"{where}: nobody answers ({error}); is kvtierd running, and is --endpoint right?"
        raise CommandError(Failure.UNAVAILABLE, message) from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        failure = Failure.USAGE if answer.status == http.HTTPStatus.BAD_REQUEST else Failure.UNAVAILABLE
        raise CommandError(failure, body.decode(errors="replace").strip())
    return json.loads(body)
