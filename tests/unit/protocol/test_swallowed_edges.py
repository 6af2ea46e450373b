"""ZeroMQ's descriptor tells of a message once, and sending may take that edge: whoever sends must look for messages."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvtierd.protocol.codec import decode_request, encode
from kvtierd.protocol.connection import Connection
from kvtierd.protocol.messages import AnyRequest, CloseSequence, Commit, Hello, HelloReply, OkReply, Release, Stats
from kvtierd.protocol.outbox import Outbox
from kvtierd.protocol.pending import Group, Pending
from kvtierd.protocol.service import Answer

WAIT_MS = 20_000


@pytest.fixture
def router(folder: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{folder}/s.sock")
        yield socket


@pytest.fixture
def connection(folder: Path, router: zmq.Socket[bytes]) -> Iterator[Connection]:
    """A client with a session."""
    made = Connection(f"ipc://{folder}/s.sock", "test")
    try:
        while not made.step(0):
            if router.poll(10):
                rid, header = router.recv_multipart()
                router.send_multipart([rid, encode(welcome(decode_request(memoryview(header))))])
        yield made
    finally:
        made.close()


def welcome(hello: AnyRequest) -> HelloReply:
    assert isinstance(hello, Hello)
    return HelloReply(
        id=hello.id,
        epoch=7,
        version=1,
        server="test",
        token=b"t" * 16,
        arena="",
        max_batch=16,
        max_message_bytes=1 << 20,
        max_inflight=16,
        lease_ttl_ms=1000,
    )


def waiting(connection: Connection, router: zmq.Socket[bytes]) -> Pending:
    """A request whose reply has reached the client's descriptor and nobody has looked."""
    group = Group(lambda: None)
    connection.drain()
    pending = connection.submit(Stats(id=0), (), 1 << 62, group)
    assert pending is not None
    connection.drain()  # the edge of what came before is taken
    rid, header = router.recv_multipart()
    router.send_multipart([rid, encode(OkReply(id=decode_request(memoryview(header)).id))])
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    assert poller.poll(WAIT_MS), "the edge that tells of the reply"
    assert pending.received is None
    return pending


def test_who_posts_takes_in_a_reply_that_another_thread_waits_for(
    connection: Connection, router: zmq.Socket[bytes]
) -> None:
    for request in (Release(id=0, leases=[1], quiet=True), CloseSequence(id=0, sequences=[1], quiet=True)):
        pending = waiting(connection, router)
        assert connection.post(request)
        assert pending.received is not None
        router.recv_multipart()


def test_who_hands_a_commit_over_takes_in_a_reply_too(connection: Connection, router: zmq.Socket[bytes]) -> None:
    pending = waiting(connection, router)
    assert connection.hand_over(Commit(id=0, reservation=1, index=[]), (), 0)
    assert pending.received is not None


def test_a_daemon_that_answers_a_client_that_is_gone_looks_for_requests(router: zmq.Socket[bytes]) -> None:
    looked: list[None] = []
    counters = {"replies_dropped_total": 0, "sent_bytes_total": 0}
    outbox = Outbox(router, counters, lambda: looked.append(None))
    assert not outbox.send(b"\0gone", encode(OkReply(id=1)), Answer(OkReply(id=1)), None)
    assert len(looked) == 1
    assert not outbox.is_reachable(b"\0gone")
    assert len(looked) == 2
    assert counters["replies_dropped_total"] == 2
