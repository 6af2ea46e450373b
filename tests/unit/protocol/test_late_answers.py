"""Requests that do not end when they are cancelled, and messages behind one that met a bug: all are answered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtierd.core.checksum import block_sum, layer_sums
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.messages import (
    Acquire,
    AnyArenaReply,
    AnyRequest,
    ArenaHello,
    ArenaReady,
    ErrorReply,
    Flush,
    NamespaceReply,
    OkReply,
    Put,
    PutReply,
    RegisterNamespace,
)
from kvtierd.protocol.service import Session
from kvtierd.protocol.sessions import Limits
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.raw_client import RawClient
from tests.unit.protocol.conftest import PADDED, until

SPACE = Namespace(model="m", geometry=PADDED)


class Stuck:
    """Makes requests of one kind wait, cancelled or not, until it is opened, as a disk does that stands still."""

    def __init__(self, daemon: ThreadDaemon, kind: type[AnyRequest]) -> None:
        self._daemon, self._kind, self._opened = daemon, kind, asyncio.Event()
        daemon.service.before = self._wait

    def _wait(self, _: Session, request: AnyRequest) -> Awaitable[None] | None:
        return self._until_opened() if isinstance(request, self._kind) else None

    async def _until_opened(self) -> None:
        while not self._opened.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self._opened.wait()

    def open(self) -> None:
        self._daemon.call(self._opened.set)


def test_a_request_that_cannot_be_cancelled_is_answered_in_time_all_the_same(
    raw: RawClient, daemon: ThreadDaemon
) -> None:
    stuck = Stuck(daemon, Flush)
    assert raw.refused(Flush(id=0, deadline_ns=time.monotonic_ns() + 50_000_000)).code == ErrorCode.DEADLINE
    assert daemon.server.counters["late_requests_total"] == 1
    assert raw.alive()
    stuck.open()
    until(lambda: daemon.server.counters["replies_dropped_total"] == 1)
    assert raw.silent()
    assert raw.alive()


def test_a_request_that_was_answered_in_its_stead_holds_its_place_until_it_ends(folder: Path) -> None:
    with ThreadDaemon(folder, limits=Limits(max_inflight=1)) as daemon, RawClient(daemon.endpoint) as raw:
        raw.hello()
        stuck = Stuck(daemon, Flush)
        assert raw.refused(Flush(id=0, deadline_ns=time.monotonic_ns() + 50_000_000)).code == ErrorCode.DEADLINE
        assert raw.refused(Flush(id=0)).code == ErrorCode.BUSY
        stuck.open()
        until(lambda: daemon.server.counters["replies_dropped_total"] == 1)
        raw.ask(Flush(id=0), OkReply)


def test_what_came_of_a_request_too_late_is_given_back(raw: RawClient, daemon: ThreadDaemon) -> None:
    number = raw.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)[0].namespace
    block = bytes(PADDED.block_bytes)
    key = bytes(32)
    total = block_sum(layer_sums(np.zeros(PADDED.slot_bytes, np.uint8), PADDED)).to_bytes(8, "little")
    raw.ask(Put(id=0, namespace=number), PutReply, [key, total, block])
    with contextlib.closing(arena_of(daemon)) as arena:
        arena.send(msgspec.msgpack.encode(ArenaHello(raw.token)))
        assert isinstance(msgspec.msgpack.decode(arena.recv(4096), type=AnyArenaReply), ArenaReady)
        stuck = Stuck(daemon, Acquire)
        request = Acquire(id=0, namespace=number, deadline_ns=time.monotonic_ns() + 50_000_000)
        assert raw.refused(request, [key]).code == ErrorCode.DEADLINE
        stuck.open()
        until(lambda: daemon.service.requests["Release"] == 1)
        assert not daemon.call(lambda: daemon.service.leases)


def arena_of(daemon: ThreadDaemon) -> socket.socket:
    plug = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    plug.settimeout(20)
    assert daemon.server.arena is not None
    plug.connect(str(daemon.server.arena.path))
    return plug


def test_a_bug_in_answering_leaves_no_message_unread(
    raw: RawClient, daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, met = daemon.server._dispatcher.fail, []

    def broken(rid: bytes, number: int, error: RequestError) -> None:
        met.append(number)
        if len(met) == 1:
            raise ValueError("a bug")
        fail(rid, number, error)

    monkeypatch.setattr(daemon.server._dispatcher, "fail", broken)
    for _ in range(3):
        raw.send(b"nothing")
    assert isinstance(raw.receive()[0], ErrorReply)
    assert isinstance(raw.receive()[0], ErrorReply)
    assert raw.alive()
    assert len(daemon.errors) == 1
    daemon.errors.clear()
