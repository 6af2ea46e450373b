"""Sessions: how they open, go on and end, and whose numbers are whose; and the paths of an endpoint."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import ErrorCode, ExitCode, RequestError, StartupError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.messages import (
    Abort,
    AnyRequest,
    ErrorReply,
    Flush,
    Hello,
    Lookup,
    NamespaceReply,
    OkReply,
    RegisterNamespace,
    Reserve,
    ReserveReply,
    Stats,
)
from kvtierd.protocol.server import Server
from kvtierd.protocol.service import Session
from kvtierd.protocol.sessions import Limits
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.fake_service import FakeService
from kvtierd.testing.raw_client import RawClient
from tests.unit.protocol.conftest import PADDED, Gate, keys_of, until

SPACE = Namespace(model="m", geometry=PADDED)


@pytest.mark.parametrize("kind", [Flush, Reserve], ids=["flush", "reserve"])
def test_a_reply_to_a_client_that_is_gone_is_dropped_and_what_it_granted_given_back(
    daemon: ThreadDaemon, raw: RawClient, kind: type[AnyRequest]
) -> None:
    counters = daemon.server.counters
    for wait_s in (0.02, 0.1, 0.5, 2.5):  # nothing tells us when the server's ZeroMQ thread learns of the end
        gate = Gate(daemon, kind)
        with RawClient(daemon.endpoint) as gone:
            gone.hello()
            space = gone.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)[0].namespace
            frames = [keys_of(SPACE, 2).tobytes()] if kind is Reserve else []
            gone.post(Reserve(id=0, namespace=space) if kind is Reserve else Flush(id=0), frames)
            until(lambda gate=gate: gate.waiting == 1)
        time.sleep(wait_s)
        gate.open()
        until(lambda: not daemon.call(lambda: [p for p in daemon.server.sessions if p.tasks]))
        if counters["replies_dropped_total"]:
            break
    assert counters["replies_dropped_total"] == 1
    until(lambda: "detached" in daemon.service.log[-1])
    assert daemon.service.requests["Abort"] == (kind is Reserve)
    assert raw.alive()


def test_hello_again_is_the_same_session(raw: RawClient, daemon: ThreadDaemon) -> None:
    first = raw.token
    assert raw.hello().token == first
    assert len(first) == 16
    assert daemon.service.log == ["opened 1"]


def test_a_session_goes_on_behind_a_new_connection(raw: RawClient, daemon: ThreadDaemon) -> None:
    space = raw.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)[0].namespace
    with RawClient(daemon.endpoint) as second:
        assert second.hello(resume=raw.token).token == raw.token
        second.post(Lookup(id=0, namespaces=[space]), [b""])
        assert not isinstance(second.receive()[0], ErrorReply)
        assert raw.refused(Stats(id=0)).code == ErrorCode.NO_SESSION
        assert raw.hello(resume=bytes(16)).token != second.token
    assert daemon.service.log == ["opened 1", "opened 2"]


def test_sessions_are_limited(folder: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(ThreadDaemon(folder, limits=Limits(max_sessions=2)))
        first, second, third = (stack.enter_context(RawClient(daemon.endpoint)) for _ in range(3))
        first.hello()
        second.hello()
        error = third.refused(Hello(id=0))
        assert error.code == ErrorCode.BUSY
        assert error.retry_after_ms > 0
        assert first.alive()


def test_sessions_of_closed_connections_make_room(folder: Path) -> None:
    clock, service = ManualClock(), FakeService()

    async def main() -> None:
        server = Server(service, folder, limits=Limits(max_sessions=3), clock=clock)
        await server.start()
        with RawClient(server.endpoint) as stays:
            await asyncio.to_thread(stays.hello)
            for _ in range(10):  # as a command that pings does, again and again
                with RawClient(server.endpoint) as brief:
                    await asyncio.to_thread(brief.hello)
                clock.advance(2)
                server.sessions.end_gone()
                while len(server.sessions) > 1:  # until ZeroMQ has noticed
                    await asyncio.sleep(0.01)
                    server.sessions.end_gone()
            assert stays.receive()[0] == OkReply(id=0)  # it was asked whether it is there
            while not stays.silent():
                assert stays.receive()[0].id == 0
            assert (await asyncio.to_thread(stays.hello)).token == stays.token
        await server.close()

    asyncio.run(main())
    service.close()
    assert service.log.count("detached 1") == 0


def test_a_service_that_refuses_a_session_is_heard(folder: Path) -> None:
    class Full(FakeService):
        def session_opened(self, session: Session) -> None:
            raise RequestError(ErrorCode.BUSY, f"no more than {session.id - 1}", 5)

    with ThreadDaemon(folder, Full()) as daemon, RawClient(daemon.endpoint) as raw:
        assert raw.refused(Hello(id=0)).code == ErrorCode.BUSY
        assert daemon.call(lambda: len(daemon.server.sessions)) == 0


def test_a_silent_session_without_arena_ends(folder: Path) -> None:
    async def main() -> None:
        clock, service = ManualClock(), FakeService()
        server = Server(service, folder, limits=Limits(session_idle_s=100), clock=clock)
        await server.start()
        peer = server.sessions.hello(b"\0one", Hello(id=1))
        clock.advance(60)
        server.sessions.hello(b"\0two", Hello(id=1))
        clock.advance(60)
        server.sessions.end_idle()
        assert len(server.sessions) == 1
        assert service.log == ["opened 1", "opened 2", "detached 1"]
        server.sessions.end(peer)
        assert service.log[-1] == "detached 1"
        await server.close()
        service.close()

    asyncio.run(main())


def test_a_taken_path_is_refused_unless_it_is_known_to_be_stale(folder: Path) -> None:
    async def main() -> None:
        service = FakeService()
        first, second = Server(service, folder, chunks=service), Server(service, folder, chunks=service)
        await first.start()
        assert (folder / "kvtierd.sock").stat().st_mode & 0o777 == 0o660
        assert (folder / "arena.sock").stat().st_mode & 0o777 == 0o660
        with pytest.raises(StartupError, match="exists: another daemon") as caught:
            await second.start()
        assert caught.value.exit_code == ExitCode.LOCKED
        await second.close()
        await second.start(replace_stale=True)
        await second.close()
        await first.close()
        service.close()

    asyncio.run(main())


def test_a_path_that_cannot_be_bound_is_named(folder: Path) -> None:
    async def main(place: Path) -> StartupError:
        service = FakeService()
        server = Server(service, place)
        with pytest.raises(StartupError) as caught:
            await server.start()
        service.close()
        return caught.value

    assert "longer than 107 bytes" in str(asyncio.run(main(folder / ("x" * 100))))
    assert asyncio.run(main(folder / "missing")).exit_code == ExitCode.IO
    (folder / "kvtierd.sock").write_text("no socket")
    assert asyncio.run(main(folder)).exit_code == ExitCode.LOCKED


def test_two_clients_do_not_see_each_others_numbers(daemon: ThreadDaemon, raw: RawClient) -> None:
    with RawClient(daemon.endpoint) as other:
        other.hello()
        space = raw.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)[0].namespace
        keys = keys_of(SPACE, 1).tobytes()
        assert other.refused(Lookup(id=0, namespaces=[space]), [keys]).code == ErrorCode.UNKNOWN_NAMESPACE
        other.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)
        reservation = raw.ask(Reserve(id=0, namespace=space), ReserveReply, [keys])[0].reservation
        assert other.refused(Abort(id=0, reservation=reservation)).code == ErrorCode.NOT_YOURS
        raw.ask(Abort(id=0, reservation=reservation), OkReply)
