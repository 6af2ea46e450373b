"""Deadlines, requests in flight, sessions, message sizes, and clients that do not read."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from pathlib import Path

import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.messages import (
    AnyRequest,
    ErrorReply,
    Flush,
    Get,
    GetReply,
    Hello,
    NamespaceReply,
    OkReply,
    Put,
    RegisterNamespace,
    Release,
    Stats,
    StatsReply,
)
from kvtierd.protocol.service import Answer, Session
from kvtierd.protocol.sessions import Limits
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.raw_client import RawClient
from tests.unit.protocol.conftest import PADDED, Gate, until

SPACE = Namespace(model="m", geometry=PADDED)


def test_a_request_taken_up_after_its_deadline_is_not_served(raw: RawClient, daemon: ThreadDaemon) -> None:
    error = raw.refused(Flush(id=0, deadline_ns=time.monotonic_ns() - 1_000_000))
    assert error.code == ErrorCode.DEADLINE
    assert "after its deadline" in error.message
    assert not daemon.service.requests


def test_a_request_past_its_deadline_is_cancelled(raw: RawClient, daemon: ThreadDaemon) -> None:
    gate = Gate(daemon, Flush)
    error = raw.refused(Flush(id=0, deadline_ns=time.monotonic_ns() + 50_000_000))
    assert error.code == ErrorCode.DEADLINE
    assert gate.cancelled == 1
    assert raw.alive()


def test_a_request_without_a_deadline_gets_the_daemons(folder: Path) -> None:
    with ThreadDaemon(folder, limits=Limits(default_deadline_s=0.05)) as daemon, RawClient(daemon.endpoint) as raw:
        raw.hello()
        gate = Gate(daemon, Flush)
        assert raw.refused(Flush(id=0, deadline_ns=-1)).code == ErrorCode.DEADLINE
        assert raw.refused(Flush(id=0, deadline_ns=1 << 62)).code == ErrorCode.DEADLINE
        assert gate.cancelled == 2


def test_requests_beyond_the_limit_in_flight_are_busy(folder: Path) -> None:
    with ThreadDaemon(folder, limits=Limits(max_inflight=3)) as daemon, RawClient(daemon.endpoint) as raw:
        raw.hello()
        gate = Gate(daemon, Flush)
        waiting = {raw.post(Flush(id=0)) for _ in range(3)}
        error = raw.refused(Flush(id=0))
        assert error.code == ErrorCode.BUSY
        assert error.retry_after_ms > 0
        assert raw.ask(Stats(id=0), StatsReply)
        with RawClient(daemon.endpoint) as other:
            other.hello()
            assert other.alive()
        gate.open()
        assert {raw.receive()[0].id for _ in range(3)} == waiting
        assert raw.ask(Flush(id=0), OkReply)


def test_answers_come_in_the_order_in_which_they_are_ready(raw: RawClient, daemon: ThreadDaemon) -> None:
    gate = Gate(daemon, Flush)
    slow = raw.post(Flush(id=0))
    assert raw.ask(Stats(id=0), StatsReply)
    gate.open()
    assert raw.receive()[0].id == slow


def test_a_bug_in_one_request_is_an_internal_error_logged_once(
    raw: RawClient, daemon: ThreadDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Session, request: AnyRequest) -> None:
        if isinstance(request, Flush):
            raise ZeroDivisionError("the secret is 42")

    daemon.service.before = fail
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            error = raw.refused(Flush(id=0))
            assert error.code == ErrorCode.INTERNAL
            assert "ZeroDivisionError" in error.message
            assert "secret" not in error.message
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    assert daemon.server.counters["errors_internal_total"] == 3
    assert raw.alive()


def test_an_error_of_a_slow_request_is_answered(raw: RawClient, daemon: ThreadDaemon) -> None:
    failures: list[Exception] = [RequestError(ErrorCode.BUSY, "no room", 30), KeyError("bug")]

    async def fail() -> None:
        await asyncio.sleep(0)
        raise failures.pop(0)

    daemon.service.before = lambda _, request: fail() if isinstance(request, Flush) else None
    error = raw.refused(Flush(id=0))
    assert (error.code, error.retry_after_ms) == (ErrorCode.BUSY, 30)
    assert raw.refused(Flush(id=0)).code == ErrorCode.INTERNAL


def test_a_message_over_the_limit_is_refused(folder: Path) -> None:
    with ThreadDaemon(folder, limits=Limits(max_message_bytes=1 << 20)) as daemon:
        with RawClient(daemon.endpoint) as raw:
            assert raw.hello().max_message_bytes == 1 << 20
            error = raw.refused(Put(id=0, namespace=1), [bytes(32), bytes(8), *[bytes(600_000)] * 2])
            assert error.code == ErrorCode.TOO_LARGE
            assert "1200" in error.message
            assert raw.alive()
            raw.send(bytes(10), bytes((1 << 20) + 1))
            assert raw.silent()
        with RawClient(daemon.endpoint) as other:
            other.hello()
            assert other.alive()


def test_more_frames_than_any_request_has_are_refused(raw: RawClient) -> None:
    error = raw.refused(Stats(id=0), [b""] * 9000)
    assert error.code == ErrorCode.BAD_FRAMES
    assert "9000 frames" in error.message


def test_a_client_that_does_not_read_costs_only_itself(daemon: ThreadDaemon, raw: RawClient) -> None:
    with RawClient(daemon.endpoint) as deaf:
        deaf.hello()
        for _ in range(20_000):
            deaf.post(Stats(id=0))
        assert raw.alive()
        assert all(raw.ask(Stats(id=0), StatsReply) for _ in range(50))


def test_a_stopping_daemon_finishes_what_it_has_and_takes_no_more(daemon: ThreadDaemon, raw: RawClient) -> None:
    gate = Gate(daemon, Flush)
    number = raw.post(Flush(id=0))
    until(lambda: gate.waiting == 1)
    daemon.call(daemon.server.stop_taking)
    error = raw.refused(Stats(id=0))
    assert error.code == ErrorCode.SHUTTING_DOWN
    gate.open()
    reply, _ = raw.receive()
    assert (reply.id, type(reply)) == (number, OkReply)
    assert raw.refused(Hello(id=0)).code == ErrorCode.SHUTTING_DOWN


def test_closing_cancels_what_is_in_flight(folder: Path) -> None:
    with ThreadDaemon(folder) as daemon, RawClient(daemon.endpoint) as raw:
        raw.hello()
        gate = Gate(daemon, Flush)
        raw.post(Flush(id=0))
        until(lambda: gate.waiting == 1)
    assert gate.cancelled == 1
    assert list(folder.iterdir()) == []


def test_a_quiet_release_has_no_reply(raw: RawClient) -> None:
    raw.post(Release(id=0, leases=[], quiet=True))
    assert raw.silent()
    assert raw.ask(Release(id=0, leases=[]), OkReply)


def test_large_frames_leave_without_a_copy_and_say_when(daemon: ThreadDaemon, raw: RawClient) -> None:
    space = raw.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)[0].namespace
    sent: list[int] = []
    serve = daemon.service._serve
    payload = bytearray(1 << 20)

    def answer(session: Session, request: AnyRequest, frames: object) -> object:
        if not isinstance(request, Get):
            return serve(session, request, frames)  # type: ignore[arg-type]
        return Answer(GetReply(id=0, count=1), (b"", payload), on_sent=lambda: sent.append(1))

    daemon.service._serve = answer  # type: ignore[method-assign, assignment]
    for round_ in range(3):
        payload[0] = round_
        _, frames = raw.ask(Get(id=0, namespace=space), GetReply, [b""])
        assert len(frames[1]) == 1 << 20
        assert frames[1][0] == round_
        until(lambda wanted=round_ + 1: len(sent) == wanted)
    assert all(peer.unsent_bytes == 0 for peer in daemon.call(lambda: list(daemon.server.sessions)))
    gc.collect()


def test_payload_that_nobody_reads_is_bounded(folder: Path) -> None:
    with ThreadDaemon(folder, limits=Limits(max_message_bytes=8 << 20)) as daemon, RawClient(daemon.endpoint) as raw:
        raw.hello()
        space = raw.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)[0].namespace
        payload = bytes(4 << 20)
        daemon.service._get = lambda *_: Answer(GetReply(id=0, count=1), (b"", payload))  # type: ignore[method-assign]
        for _ in range(20):
            raw.post(Get(id=0, namespace=space), [b""])
        replies = [raw.receive()[0] for _ in range(20)]
        refused = [reply for reply in replies if isinstance(reply, ErrorReply)]
        assert all(reply.code == ErrorCode.BUSY for reply in refused)
        assert any(isinstance(reply, GetReply) for reply in replies)
        until(lambda: all(peer.unsent_bytes == 0 for peer in daemon.call(lambda: list(daemon.server.sessions))))
        assert raw.ask(Get(id=0, namespace=space), GetReply, [b""])


def test_an_answer_that_cannot_be_sent_is_an_internal_error(daemon: ThreadDaemon, raw: RawClient) -> None:
    answers = [
        Answer(OkReply(id=0), ("text",)),  # type: ignore[arg-type]
        Answer(OkReply(id=0), (b"fine", memoryview(bytes(10))[::2])),
        Answer(StatsReply(id=0, stats={"x": object()})),
        None,
    ]
    daemon.service._serve = lambda *_: answers.pop(0)  # type: ignore[method-assign, assignment, return-value]
    for _ in range(4):
        assert raw.refused(Flush(id=0)).code == ErrorCode.INTERNAL
    del daemon.service._serve
    assert raw.alive()


class _Quota:
    """Two requests of the tenant, whoever's."""

    count = 0
    refused = 0

    @property
    def full(self) -> bool:
        return self.count >= 2


def test_requests_of_a_tenant_in_flight_are_limited_over_all_its_sessions(folder: Path) -> None:
    quota = _Quota()
    with ThreadDaemon(folder) as daemon, RawClient(daemon.endpoint) as one, RawClient(daemon.endpoint) as two:
        one.hello()
        two.hello()
        for peer in daemon.call(lambda: list(daemon.server.sessions)):
            peer.session.quota = quota
        gate = Gate(daemon, Flush)
        for raw in (one, two):
            raw.post(Flush(id=0))
        until(lambda: gate.waiting == 2)
        assert "of this tenant" in one.refused(Flush(id=0)).message
        assert two.refused(Flush(id=0)).code == ErrorCode.BUSY
        assert one.alive(), "what is cheap is taken up"
        gate.open()
        for raw in (one, two):
            assert isinstance(raw.receive()[0], OkReply)
        until(lambda: quota.count == 0)
