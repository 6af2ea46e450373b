"""A small HTTP/1.1 server for machines that ask now and then: metrics on loopback, operators on a Unix socket.

It knows GET, HEAD and POST without a body, answers one request a connection, and has a limit on everything: request
line and headers, time, connections. A framework would be more code than these pages, and more to keep an eye on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from kvtierd.core.errors import ExitCode, StartupError

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8 << 10
HEAD_TIMEOUT_S = 5.0
"""For a client to send its request, and again to take its answer."""
MAX_CONNECTIONS = 32
METHODS = frozenset({"GET", "HEAD", "POST"})
SOCKET_MODE = 0o600
LOCAL = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?")
"""Hosts that a request may name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request: `query` holds the last value of each name."""

    method: str
    path: str
    query: Mapping[str, str]


Handler = Callable[[Asked], Awaitable[Page]]
"""Answers one request; ValueError is the client's mistake and becomes 400 with its text."""


class BadRequestError(Exception):
    """What arrived is no request that is served here."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class HttpServer:
    """Serves `routes`, by method and path. POST is only for what changes something."""

    def __init__(self, routes: Mapping[tuple[str, str], Handler]) -> None:
        self._routes = routes
        self._open: set[asyncio.Task[None]] = set()
        self._asking: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Of these, those whose request is not whole yet, oldest first."""
        self._server: asyncio.Server | None = None
        self._path: Path | None = None

    async def listen_tcp(self, address: str) -> None:
        """Listen on HOST:PORT. Raises StartupError (74) naming the setting."""
        host, _, port = address.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._connected, host.strip("[]"), int(port), limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            message = f"metrics.listen: {address} cannot be used: {os.strerror(error.errno) if error.errno else error}"
            raise StartupError(ExitCode.IO, message) from error

    async def listen_unix(self, path: Path) -> None:
        """Listen on a socket for this user and root; the caller holds the folder's lock, so a leftover is replaced."""
        try:
            path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._connected, path, limit=MAX_HEAD_BYTES)
            path.chmod(SOCKET_MODE)
            self._path = path
        except OSError as error:
            raise StartupError(ExitCode.IO, f"cannot listen on {path}: {error.strerror}") from error

    @property
    def port(self) -> int:
        """Where it listens, once `listen_tcp` has returned."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end what is open."""
        if self._server is None:
            return
        self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
        await asyncio.sleep(0)  # an aborted transport closes its socket in the next turn of the loop

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS and not self._hang_up_on_slowest():
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="http")
        self._open.add(task)
        self._asking[task] = writer
        task.add_done_callback(self._ended)

    def _hang_up_on_slowest(self) -> bool:
        """End the connection that has been at its request for longest; False where all are being answered.

        Otherwise half-sent requests, which cost their sender nothing, would keep everybody else out for seconds.
        """
        for task, writer in self._asking.items():
            del self._asking[task]
            self._open.discard(task)
            writer.transport.abort()
            task.cancel()
            return True
        return False

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._asking.pop(task, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                asked, page = await self._answer(reader)
                async with asyncio.timeout(HEAD_TIMEOUT_S):
                    writer.write(_encode(page, head=asked == "HEAD"))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Page]:
        """The method asked with, and the page."""
        method = ""
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                asked = parse(await _head(reader))
            if (task := asyncio.current_task()) is not None:
                self._asking.pop(task, None)
            method = asked.method
            return method, await self._route(asked)
        except BadRequestError as error:
            return method, Page(f"{error}\n".encode(), status=error.status)
        except ValueError as error:
            return method, Page(f"{error}\n".encode(), status=HTTPStatus.BAD_REQUEST)
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            log.exception("a page failed")
            return method, Page(b"this is a bug; the log has it\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _route(self, asked: Asked) -> Page:
        handler = self._routes.get(("GET" if asked.method == "HEAD" else asked.method, asked.path))
        if handler is not None:
            return await handler(asked)
        if any(path == asked.path for _method, path in self._routes):
            raise BadRequestError(HTTPStatus.METHOD_NOT_ALLOWED, f"{asked.path} is not for {asked.method}")
        known = ", ".join(sorted({path for _method, path in self._routes}))
        raise BadRequestError(HTTPStatus.NOT_FOUND, f"there is no {asked.path}; there are {known}")


def parse(head: bytes) -> Asked:
    """Read a request line; of the headers only the host matters, and that no body comes. Raises BadRequestError."""
    lines = head.split(b"\r\n")
    try:
        method, target, version = lines[0].decode("ascii").split(" ")
    except ValueError:
        raise BadRequestError(HTTPStatus.BAD_REQUEST, "this is no HTTP request line") from None
    if not version.startswith("HTTP/1."):
        raise BadRequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 is spoken here")
    if method not in METHODS:
        raise BadRequestError(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not served; use GET, HEAD or POST")
    if not target.startswith("/"):
        raise BadRequestError(HTTPStatus.BAD_REQUEST, "the target must be a path")
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"host" and not LOCAL.fullmatch(value.strip()):
            # A website whose name was made to lead here (DNS rebinding) could read these pages in a browser.
            raise BadRequestError(HTTPStatus.MISDIRECTED_REQUEST, "ask by a name of this machine, such as localhost")
        if name.lower() in {b"content-length", b"transfer-encoding"} and value.strip() != b"0":
            raise BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no request here has a body")
    parts = urlsplit(target)
    return Asked(method, parts.path, dict(parse_qsl(parts.query, max_num_fields=16)))


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        message = f"request line and headers are over {MAX_HEAD_BYTES} bytes"
        raise BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message) from None
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the client went away") from None


def _encode(page: Page, *, head: bool) -> bytes:
    lines = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        # Pages are whole in themselves: whatever else one asks for was not put there by us.
        "Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; frame-ancestors 'none'",
        "Connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head else page.body)
