"""What a client makes of its daemon's states: refusals, errors that pass, lost connections, late replies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, KvtierdError, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.endpoint import default_endpoint
from kvtierd.protocol.messages import (
    Acquire,
    AnyRequest,
    CountReply,
    Flush,
    Lookup,
    NamespaceReply,
    Reserve,
)
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.protocol.service import Answer, Session
from kvtierd.protocol.sessions import Limits
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.fake_service import FakeService
from tests.unit.protocol.conftest import PADDED, Gate, blocks_of, keys_of, until

SPACE = Namespace(model="m", geometry=PADDED)
KEYS, BLOCKS = keys_of(SPACE, 3), blocks_of(SPACE, 3)


def test_the_endpoint_is_found_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERD_ENDPOINT", "ipc:///tmp/x.sock")
    assert default_endpoint() == "ipc:///tmp/x.sock"
    monkeypatch.delenv("KVTIERD_ENDPOINT")
    assert default_endpoint() == "ipc:///run/kvtierd/default/kvtierd.sock"


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1", "udp://127.0.0.1:5555", "ipc://", "/run/kvtierd.sock", "ipc:///" + "x" * 107]
)
def test_an_endpoint_that_is_none_is_the_callers_mistake(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        Client(endpoint)


def test_an_absent_daemon_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "kvtierd.sock"
    with Client(f"ipc://{path}", timeout_s=0.01) as client:
        with pytest.raises(Unavailable, match="there is no such socket; is kvtierd running"):
            client.ping()
        path.touch()
        with pytest.raises(Unavailable, match="it did not answer in time"):
            client.ping()
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may do everything
        with pytest.raises(Unavailable, match="in the tenant's group"):
            client.ping()


def test_a_refused_client_says_why_and_comes_in_later(folder: Path) -> None:
    with ThreadDaemon(folder, limits=Limits(max_sessions=1)) as daemon, Client(daemon.endpoint, timeout_s=20) as second:
        with Client(daemon.endpoint, timeout_s=20) as first:
            handle = first.register(SPACE)
            first.store(handle, KEYS, BLOCKS)
            with pytest.raises(Unavailable, match="it refused this client: as many sessions are open as may be"):
                second.ping()
            assert second.lookup(handle, KEYS).count == 0
        until(lambda: second.lookup(handle, KEYS).count == 3)


@pytest.mark.parametrize(
    "code", [ErrorCode.BUSY, ErrorCode.DEADLINE, ErrorCode.UNAVAILABLE, ErrorCode.SHUTTING_DOWN, ErrorCode.INTERNAL]
)
def test_an_error_that_is_the_daemons_state_is_a_miss(
    connect: Callable[..., Client], daemon: ThreadDaemon, code: ErrorCode
) -> None:
    client = connect()
    handle = client.register(SPACE)
    client.store(handle, KEYS, BLOCKS)

    def refuse(_: Session, request: AnyRequest) -> None:
        if isinstance(request, Lookup | Reserve | Acquire | Flush):
            raise RequestError(code, "not now")

    daemon.service.before = refuse
    assert client.lookup(handle, KEYS).count == 0
    assert client.fetch(handle, KEYS).count == 0
    assert client.store(handle, KEYS, BLOCKS).dropped == 3
    with pytest.raises(Unavailable, match=f"says {code}: not now"):
        client.flush()
    assert client.counters[f"errors_{code}"] >= 3
    daemon.service.before = None
    until(lambda: client.fetch(handle, KEYS).count == 3)


@pytest.mark.parametrize("code", [ErrorCode.BAD_ARGUMENT, ErrorCode.NOT_YOURS, ErrorCode.GEOMETRY_MISMATCH])
def test_an_error_of_the_caller_is_raised(
    connect: Callable[..., Client], daemon: ThreadDaemon, code: ErrorCode
) -> None:
    client = connect()
    handle = client.register(SPACE)

    def refuse(_: Session, request: AnyRequest) -> None:
        if isinstance(request, Lookup):
            raise RequestError(code, "that was wrong", 7)

    daemon.service.before = refuse
    with pytest.raises(RequestError, match="that was wrong") as caught:
        client.lookup(handle, KEYS)
    assert (caught.value.code, caught.value.retry_after_ms) == (code, 7)


def test_a_reply_of_another_kind_is_an_error(connect: Callable[..., Client], daemon: ThreadDaemon) -> None:
    client = connect()
    handle = client.register(SPACE)
    daemon.service._lookup = lambda *_: Answer(CountReply(id=0, count=1))  # type: ignore[method-assign]
    with pytest.raises(KvtierdError, match="answered CountReply where LookupReply belongs"):
        client.lookup(handle, KEYS)


def test_a_daemon_that_derives_another_digest_is_an_error(connect: Callable[..., Client], daemon: ThreadDaemon) -> None:
    wrong = NamespaceReply(id=0, namespace=1, digest=bytes(32), block_bytes=1, slot_bytes=1, layer_stride=1)
    daemon.service._register = lambda *_: Answer(wrong)  # type: ignore[method-assign]
    with pytest.raises(KvtierdError, match="another digest"):
        connect().register(SPACE)


def test_a_lost_connection_goes_on_with_its_session(connect: Callable[..., Client], daemon: ThreadDaemon) -> None:
    client = connect()
    handle = client.register(SPACE)
    client.store(handle, KEYS, BLOCKS)
    lease = client.acquire(handle, KEYS)
    reservation = client.reserve(handle, keys_of(SPACE, 2, first_token=100))
    abandoned = client.reserve(handle, keys_of(SPACE, 1, first_token=200))
    connection = client._connection
    connection.open()
    connection.up = False
    abandoned.abort()
    assert len(connection.orphans) == 1
    assert client.lookup(handle, KEYS).count == 3
    assert reservation.commit() == 2
    lease.release()
    client.ping()
    assert daemon.service.log == ["opened 1"]
    assert daemon.service.requests["RegisterNamespace"] == 1
    assert not daemon.service.leases
    assert not daemon.service.reservations
    assert not connection.orphans


@pytest.mark.parametrize("kind", [Reserve, Acquire], ids=["reserve", "acquire"])
def test_a_grant_that_comes_too_late_is_given_back(
    connect: Callable[..., Client], daemon: ThreadDaemon, kind: type[AnyRequest]
) -> None:
    client = connect()
    handle = client.register(SPACE)
    client.store(handle, KEYS, BLOCKS)
    started, go_on = threading.Event(), threading.Event()

    def block_the_loop(_: Session, request: AnyRequest) -> None:
        if isinstance(request, kind):
            started.set()
            go_on.wait(20)

    daemon.service.before = block_the_loop
    if kind is Reserve:
        assert client.reserve(handle, keys_of(SPACE, 2, first_token=100), timeout_s=0.1).views == [None, None]
    else:
        assert client.acquire(handle, KEYS, timeout_s=0.1).count == 0
    assert started.is_set()
    assert client.counters["sessions_lost"] == 1
    daemon.service.before = None
    go_on.set()
    client.ping()
    client.ping()
    assert client.counters["late_replies"] == 1
    assert not daemon.call(lambda: daemon.service.leases or daemon.service.reservations)
    assert daemon.service.log == ["opened 1"]


def test_a_deadline_that_the_daemon_keeps_is_no_lost_session(
    connect: Callable[..., Client], daemon: ThreadDaemon
) -> None:
    client = connect()
    client.register(SPACE)
    gate = Gate(daemon, Flush)
    with pytest.raises(Unavailable, match="says deadline"):
        client.flush(timeout_s=0.5)
    assert gate.cancelled == 1
    assert client.counters["sessions_lost"] == 0
    assert client.ping() > 0


def test_a_session_that_the_daemon_ended_is_opened_again_within_the_call(
    connect: Callable[..., Client], daemon: ThreadDaemon
) -> None:
    client = connect()
    handle = client.register(SPACE)
    client.store(handle, KEYS, BLOCKS)
    for _ in range(3):
        daemon.call(lambda: [daemon.server.sessions.end(peer) for peer in daemon.server.sessions])
        assert client.lookup(handle, KEYS).count == 3
        daemon.call(lambda: [daemon.server.sessions.end(peer) for peer in daemon.server.sessions])
        assert client.fetch(handle, KEYS).count == 3
        daemon.call(lambda: [daemon.server.sessions.end(peer) for peer in daemon.server.sessions])
        assert [hit.count for hit in client.lookup_many(handle, [KEYS] * 600)] == [3] * 600
    assert client.counters["lookups_missed_unavailable"] == 0


def test_large_payload_travels_in_shared_frames(folder: Path) -> None:
    shape = Geometry(block_size=64, layers=2, kv_heads=4, k_dim=128, v_dim=128, dtype="fp32")
    space = Namespace(model="large", geometry=shape)
    with ExitStack() as stack:
        service, limits = FakeService(shape.slot_bytes, 8), Limits(max_message_bytes=4 << 20)
        daemon = stack.enter_context(ThreadDaemon(folder, service, limits))
        client = stack.enter_context(Client(daemon.endpoint, arena=False, timeout_s=20, transfer_timeout_s=20))
        handle = client.register(space)
        keys, blocks = keys_of(space, 7), blocks_of(space, 7)
        assert client.store(handle, keys, blocks).stored == 7
        assert service.requests["Put"] > 1  # a message holds fewer than all
        found = client.fetch(handle, keys)
        assert found.count == 7
        np.testing.assert_array_equal(found.blocks, blocks)
        until(lambda: daemon.call(lambda: all(not peer.unsent_bytes for peer in daemon.server.sessions)))


def test_counters_start_empty_and_a_closed_client_stays_closed(daemon: ThreadDaemon) -> None:
    client = Client(daemon.endpoint, timeout_s=20)
    assert not client.counters
    assert client.ping() > 0
    client.close()
    client.close()
    with pytest.raises(Unavailable, match="the client is closed"):
        client.lookup(NamespaceHandle(SPACE, allow_loss=False), KEYS)


def test_an_interrupted_wait_gives_up_its_request(
    connect: Callable[..., Client], daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    handle = client.register(SPACE)
    client.reserve(handle, KEYS[:1]).abort()
    gate = Gate(daemon, Reserve)

    def interrupted(*_: object) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtierd.protocol.waiting._poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.reserve(handle, KEYS)
    monkeypatch.undo()
    gate.open()
    until(lambda: client.ping() > 0 and client.counters["late_replies"] == 1)
    assert not daemon.call(lambda: daemon.service.reservations)
