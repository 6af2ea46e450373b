"""The small HTTP server: what it answers, and what it does not let happen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.daemon import http
from kvtierd.daemon.http import Asked, HttpServer, Page


async def _hello(asked: Asked) -> Page:
    return Page(f"hello {asked.query.get('name', '')}".encode())


async def _number(asked: Asked) -> Page:
    return Page(str(int(asked.query["n"])).encode())


async def _bug(_asked: Asked) -> Page:
    raise AssertionError("a secret of the inside")


ROUTES = {("GET", "/hello"): _hello, ("GET", "/number"): _number, ("GET", "/bug"): _bug, ("POST", "/do"): _hello}


async def _ask(port: int, data: bytes) -> tuple[str, bytes]:
    """The status line and the body of the answer to raw bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 20)
    await _close(writer)
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


def serving(scenario: Callable[[HttpServer], Awaitable[None]]) -> None:
    async def run() -> None:
        server = HttpServer(ROUTES)
        await server.listen_tcp("127.0.0.1:0")
        try:
            await scenario(server)
        finally:
            await server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        ("GET /hello?name=you HTTP/1.1", "200 OK", b"hello you"),
        ("HEAD /hello HTTP/1.1", "200 OK", b""),
        ("POST /do HTTP/1.1", "200 OK", b"hello "),
        ("GET /do HTTP/1.1", "405 Method Not Allowed", b"/do is not for GET\n"),
        ("DELETE /hello HTTP/1.1", "405 Method Not Allowed", b"DELETE is not served; use GET, HEAD or POST\n"),
        ("GET /nope HTTP/1.1", "404 Not Found", b"there is no /nope; there are /bug, /do, /hello, /number\n"),
        ("GET /../etc/passwd HTTP/1.1", "404 Not Found", None),
        ("GET http://x/hello HTTP/1.1", "400 Bad Request", b"the target must be a path\n"),
        ("GET /hello HTTP/2", "505 HTTP Version Not Supported", b"only HTTP/1.1 is spoken here\n"),
        ("nonsense", "400 Bad Request", b"this is no HTTP request line\n"),
        ("GET /\xff HTTP/1.1", "400 Bad Request", b"this is no HTTP request line\n"),
        ("GET /number?n=x HTTP/1.1", "400 Bad Request", None),
        ("GET /hello?" + "&".join("a=1" for _ in range(20)) + " HTTP/1.1", "400 Bad Request", None),
        ("GET /hello HTTP/1.1\r\nContent-Length: 5", "413 Request Entity Too Large", b"no request here has a body\n"),
        ("GET /hello HTTP/1.1\r\nContent-Length: 0", "200 OK", b"hello "),
        ("GET /hello HTTP/1.1\r\nhost: [::1]:9464", "200 OK", b"hello "),
        ("GET /hello HTTP/1.1\r\nHost: evil.example", "421 Misdirected Request", None),
        ("GET /hello HTTP/1.1\r\nHost: localhost.evil.example", "421 Misdirected Request", None),
    ],
)
def test_answers(request_line: str, status: str, body: bytes | None) -> None:
    async def scenario(server: HttpServer) -> None:
        found, data = await _ask(server.port, request_line.encode("latin-1") + b"\r\nHost: localhost:1\r\n\r\n")
        assert found == f"HTTP/1.1 {status}"
        assert body is None or data == body

    serving(scenario)


def test_bug_is_not_told_to_the_client() -> None:
    async def scenario(server: HttpServer) -> None:
        status, body = await _ask(server.port, b"GET /bug HTTP/1.1\r\n\r\n")
        assert status == "HTTP/1.1 500 Internal Server Error"
        assert b"secret" not in body

    serving(scenario)


def test_head_that_never_ends_is_refused() -> None:
    async def scenario(server: HttpServer) -> None:
        status, _ = await _ask(server.port, b"GET /hello HTTP/1.1\r\n" + b"A: b\r\n" * 4000)
        assert status == "HTTP/1.1 431 Request Header Fields Too Large"

    serving(scenario)


def test_client_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.05)

    async def scenario(server: HttpServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /hel")
        assert await _is_cut(reader)
        await _close(writer)

    serving(scenario)


def test_half_sent_requests_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)

    async def scenario(server: HttpServer) -> None:
        slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        for _, writer in slow:
            writer.write(b"GET /hel")
        assert (await _ask(server.port, b"GET /hello HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"
        assert len(server._open) <= 2
        assert await _is_cut(slow[0][0])
        for _, writer in slow:
            await _close(writer)

    serving(scenario)


def test_more_connections_than_allowed_are_cut_while_all_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)

    async def scenario(server: HttpServer) -> None:
        going_on, answered = asyncio.Event(), asyncio.Event()

        async def slow(_asked: Asked) -> Page:
            going_on.set()
            await answered.wait()
            return Page(b"at last")

        server._routes = {**server._routes, ("GET", "/slow"): slow}
        asking = []
        for _ in range(2):
            asking.append(asyncio.create_task(_ask(server.port, b"GET /slow HTTP/1.1\r\n\r\n")))
            await going_on.wait()
            going_on.clear()
        reader, refused = await asyncio.open_connection("127.0.0.1", server.port)
        assert await _is_cut(reader)
        await _close(refused)
        answered.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == ["HTTP/1.1 200 OK"] * 2

    serving(scenario)


async def _is_cut(reader: asyncio.StreamReader) -> bool:
    """Whether the other end closes the connection without an answer."""
    try:
        return await asyncio.wait_for(reader.read(), 20) == b""
    except ConnectionError:
        return True


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def test_port_in_use_is_an_error_that_names_the_setting() -> None:
    async def scenario(server: HttpServer) -> None:
        with pytest.raises(StartupError, match=r"metrics.listen: 127.0.0.1:\d+ cannot be used") as caught:
            await HttpServer(ROUTES).listen_tcp(f"127.0.0.1:{server.port}")
        assert caught.value.exit_code == ExitCode.IO

    serving(scenario)


def test_unix_socket_is_for_its_owner_and_replaces_a_leftover(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "s"
        path.write_text("left behind")
        server = HttpServer(ROUTES)
        await server.listen_unix(path)
        assert path.stat().st_mode & 0o777 == 0o600
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /hello HTTP/1.1\r\n\r\n")
        assert (await reader.read()).endswith(b"hello ")
        await _close(writer)
        await server.close()
        assert not path.exists()

    asyncio.run(scenario())
