"""The endpoint for other machines: who comes in, as whom, and what is different there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvtierd.core.errors import ErrorCode, StartupError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.curve import CurveKeys, KeyPair
from kvtierd.protocol.messages import ErrorReply, Flush, Hello, OkReply, Reserve
from kvtierd.protocol.remote import RemoteServer
from kvtierd.protocol.sessions import Limits
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.raw_client import RawClient
from tests.unit.protocol.conftest import PADDED, blocks_of, keys_of, until

SERVER, ANNA, ANNAS_OTHER, BERT, STRANGER = (KeyPair.new() for _ in range(5))
ALLOWED = {ANNA.public: "a", ANNAS_OTHER.public: "a", BERT.public: "b"}
SPACE = Namespace(model="m", geometry=PADDED)


def keys(own: KeyPair, server: KeyPair = SERVER) -> CurveKeys:
    return CurveKeys(server.public, own)


def remote(**options: object) -> ThreadDaemon:
    return ThreadDaemon(
        Path(), make=lambda service: RemoteServer(service, "127.0.0.1:0", SERVER, ALLOWED, **options)
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture
def daemon() -> Iterator[ThreadDaemon]:
    with remote() as running:
        yield running


def tenants(daemon: ThreadDaemon) -> list[str]:
    return daemon.call(lambda: [peer.session.tenant for peer in daemon.server.sessions])


def test_right_key_is_served_in_frames(daemon: ThreadDaemon) -> None:
    with Client(daemon.endpoint, curve=keys(ANNA), timeout_s=20, transfer_timeout_s=20) as client:
        handle, blocks, names = client.register(SPACE), blocks_of(SPACE, 3), keys_of(SPACE, 3)
        assert client.store(handle, names, blocks).stored == 3
        assert client.lookup(handle, names).count == 3
        assert (client.fetch(handle, names).blocks == blocks).all()
        assert tenants(daemon) == ["a"]


def test_wrong_key_gets_nothing_and_is_named_in_the_log(daemon: ThreadDaemon, caplog: pytest.LogCaptureFixture) -> None:
    with Client(daemon.endpoint, curve=keys(STRANGER), timeout_s=0.3) as client:
        with pytest.raises(Unavailable, match="among those of a tenant"):
            client.ping()
        handle = client.register(SPACE)
        assert client.lookup(handle, keys_of(SPACE, 1)).count == 0
    until(lambda: daemon.server.counters["curve_refused_total"] > 0)
    assert tenants(daemon) == []
    assert any(STRANGER.public in record.message for record in caplog.records)


def test_no_key_gets_nothing(daemon: ThreadDaemon) -> None:
    with RawClient(daemon.endpoint) as raw:
        raw.socket.setsockopt(zmq.SNDTIMEO, 300)
        raw.post(Hello(id=0))
        assert raw.silent(0.5)
    assert tenants(daemon) == []


def test_a_client_that_wants_another_server_does_not_talk_to_this_one(daemon: ThreadDaemon) -> None:
    with (
        Client(daemon.endpoint, curve=keys(ANNA, server=STRANGER), timeout_s=0.3) as client,
        pytest.raises(Unavailable),
    ):
        client.ping()
    assert tenants(daemon) == []


def test_key_says_whose_tenant_a_session_is(daemon: ThreadDaemon) -> None:
    with RawClient(daemon.endpoint, curve=keys(ANNA)) as anna, RawClient(daemon.endpoint, curve=keys(BERT)) as bert:
        anna.hello()
        bert.hello()
        assert sorted(tenants(daemon)) == ["a", "b"]


@pytest.mark.parametrize("thief", [BERT, ANNAS_OTHER])
def test_token_of_another_key_opens_a_session_like_one_that_nobody_has(daemon: ThreadDaemon, thief: KeyPair) -> None:
    with RawClient(daemon.endpoint, curve=keys(ANNA)) as anna, RawClient(daemon.endpoint, curve=keys(thief)) as other:
        token = anna.hello().token
        assert other.hello(resume=token).token != token
        assert anna.alive()
    with RawClient(daemon.endpoint, curve=keys(ANNA)) as again:
        assert again.hello(resume=token).token == token, "his own is resumed"


def test_there_is_no_arena(daemon: ThreadDaemon) -> None:
    with RawClient(daemon.endpoint, curve=keys(ANNA)) as raw:
        assert raw.hello().arena == ""
        refused = raw.refused(Reserve(id=0, namespace=1), [bytes(32)])
        assert refused.code in {ErrorCode.BAD_ARGUMENT, ErrorCode.UNKNOWN_NAMESPACE}


def test_deadline_is_what_is_left_and_not_a_time_of_another_clock(daemon: ThreadDaemon) -> None:
    with RawClient(daemon.endpoint, curve=keys(ANNA)) as raw:
        raw.hello()
        raw.ask(Flush(id=0, deadline_ns=20_000_000_000), OkReply)
        assert raw.refused(Flush(id=0, deadline_ns=1)).code == ErrorCode.DEADLINE


def test_key_that_is_taken_away_ends_its_sessions_and_comes_in_no_more(daemon: ThreadDaemon) -> None:
    with RawClient(daemon.endpoint, curve=keys(ANNA)) as anna, RawClient(daemon.endpoint, curve=keys(BERT)) as bert:
        anna.hello()
        bert.hello()
        server = daemon.server
        assert isinstance(server, RemoteServer)
        daemon.call(lambda: server.allow({BERT.public: "b"}))
        assert tenants(daemon) == ["b"]
        assert not anna.alive()
        assert anna.ask(Hello(id=0), ErrorReply)[0].code == ErrorCode.UNAVAILABLE, "the connection is still there"
        assert bert.alive()
    with RawClient(daemon.endpoint, curve=keys(ANNA)) as again:
        again.post(Hello(id=0))
        assert again.silent(0.3)


def test_one_tenant_cannot_take_the_sessions_of_another() -> None:
    limits = {"sessions_max": {"a": 1, "b": 1}, "limits": Limits(max_sessions=100)}
    with (
        remote(**limits) as daemon,
        RawClient(daemon.endpoint, curve=keys(ANNA)) as first,
        RawClient(daemon.endpoint, curve=keys(ANNAS_OTHER)) as second,
        RawClient(daemon.endpoint, curve=keys(BERT)) as bert,
    ):
        first.hello()
        assert second.ask(Hello(id=0), ErrorReply)[0].code == ErrorCode.BUSY
        bert.hello()


def test_at_the_limit_of_connections_the_port_is_shut_and_those_inside_go_on(daemon: ThreadDaemon) -> None:
    gate = daemon.server._gate
    with RawClient(daemon.endpoint, curve=keys(ANNA)) as inside:
        inside.hello()
        gate._limit = 2
        with RawClient(daemon.endpoint, curve=keys(BERT)) as last:
            last.hello()
            until(lambda: not gate.open)
            with RawClient(daemon.endpoint, curve=keys(BERT)) as late:
                late.post(Hello(id=0))
                assert late.silent(0.3)
                assert inside.alive()
                last.close()
                until(lambda: gate.open)
                assert late.receive()[0].id == 1


def test_port_that_is_taken_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        daemon = ThreadDaemon(Path(), make=lambda service: RemoteServer(service, address, SERVER, ALLOWED))
        with pytest.raises(StartupError, match=f"cannot listen on {address}: .*in use"), daemon:
            pass
