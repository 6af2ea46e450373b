"""Random and mutated messages against the real server: no crash, no leak, and another client is served throughout."""

from __future__ import annotations

import gc
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtierd.core.checksum import block_sum, layer_sums
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import block_keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.codec import HeaderError, check_frames, decode_request, encode
from kvtierd.protocol.messages import (
    Abort,
    Acquire,
    AcquireReply,
    AnyReply,
    AnyRequest,
    ArenaHello,
    ArenaMap,
    Commit,
    Delete,
    ErrorReply,
    Flush,
    Get,
    Hello,
    Lookup,
    NamespaceReply,
    Pin,
    Prefetch,
    Purge,
    Put,
    RegisterNamespace,
    Release,
    Reserve,
    ReserveReply,
    Stats,
    StatsReply,
    Unpin,
)
from kvtierd.testing.fake_chunk import CHUNK
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.raw_client import RawClient

SPACE = Namespace(model="m", geometry=Geometry(block_size=4, layers=2, kv_heads=1, k_dim=4, v_dim=4))
KEYS = block_keys(SPACE.digest(), range(12), 4).tobytes()
BLOCK = bytes(SPACE.geometry.block_bytes)


def bytes_of_a_slot() -> np.ndarray:
    return np.zeros(SPACE.geometry.slot_bytes, np.uint8)


small = st.integers(0, 3)
space = st.sampled_from([1, 1, 1, 1, 0, 2])
held = st.sampled_from([0, 0, 0, 1])
keys = st.sampled_from([b"", KEYS[:32], KEYS])
requests = st.one_of(
    st.builds(Hello, id=small, client=st.text(max_size=5), resume=st.binary(max_size=16)),
    st.builds(RegisterNamespace, id=small, namespace=st.just(SPACE), block_bytes=st.sampled_from([0, 128, 7])),
    st.builds(Lookup, id=small, namespaces=st.lists(space, max_size=3)),
    st.builds(Reserve, id=small, namespace=space),
    st.builds(Commit, id=small, reservation=held, index=st.none() | st.lists(small, max_size=3), verify=st.booleans()),
    st.builds(Abort, id=small, reservation=held),
    st.builds(Acquire, id=small, namespace=space, ttl_ms=small, verify=st.booleans()),
    st.builds(Release, id=small, leases=st.lists(held, max_size=3), quiet=st.booleans()),
    st.builds(Put, id=small, namespace=space),
    st.builds(Get, id=small, namespace=space),
    st.builds(Prefetch, id=small, namespace=space, wait=st.booleans()),
    st.builds(Pin, id=small, namespace=space),
    st.builds(Unpin, id=small, namespace=space),
    st.builds(Delete, id=small, namespace=space),
    st.builds(Purge, id=small, namespace=space),
    st.builds(Flush, id=small),
    st.builds(Stats, id=small),
)
frames = st.lists(keys | st.binary(max_size=80) | st.just(bytes(8)) | st.just(BLOCK), max_size=5)
WHOLE = block_sum(layer_sums(bytes_of_a_slot(), SPACE.geometry)).to_bytes(8, "little")


def fitting(request: AnyRequest, count: int) -> list[bytes]:
    """Frames of the right number and length for a request about `count` blocks."""
    match request:
        case Lookup(namespaces=spaces):
            return [KEYS[: 32 * count]] * len(spaces)
        case Commit(index=index):
            blocks = count if index is None else len(index)
            return [layer_sums(bytes_of_a_slot(), SPACE.geometry).tobytes() * blocks, WHOLE * blocks]
        case Put():
            return [KEYS[: 32 * count], WHOLE * count, *[BLOCK] * count]
        case Reserve() | Acquire() | Get() | Prefetch() | Pin() | Unpin() | Delete():
            return [KEYS[: 32 * count]]
        case _:
            return []


whole_requests = st.tuples(requests, st.integers(0, 3)).map(lambda pair: (pair[0], fitting(*pair)))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The header of a request with some of its bytes changed, cut or repeated."""
    header = bytearray(encode(draw(requests)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(header)))
        match draw(st.integers(0, 3)):
            case 0 if at < len(header):
                header[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del header[at:]
            case 2:
                header[at:at] = draw(st.binary(max_size=8))
            case _:
                header[at:at] = header[at : at + 8]
    return bytes(header)


maps = st.builds(
    lambda fields, op: msgspec.msgpack.encode({**fields, **op}),
    st.dictionaries(st.text(max_size=12), values, max_size=5),
    st.dictionaries(st.sampled_from(["op", "id", "epoch", "namespace", "namespaces", "index", "leases"]), values),
)
headers = st.binary(max_size=200) | mutated() | maps
messages = st.tuples(headers, frames)


@given(headers, frames)
@example(b"\x81" * 5000, [])
@example(b"\xdf\xff\xff\xff\xff", [])
@example(msgspec.msgpack.encode({"op": "lookup", "id": 1, "namespaces": [1 << 63]}), [b""])
def test_a_header_is_a_request_or_a_typed_error(header: bytes, raw_frames: list[bytes]) -> None:
    request = result_of(lambda: decode_request(memoryview(header)))
    if isinstance(request, HeaderError):
        assert request.code in {ErrorCode.BAD_HEADER, ErrorCode.BAD_ARGUMENT}
        assert isinstance(request.request_id, int)
        assert str(request)
        return
    error = result_of(lambda: check_frames(request, [memoryview(frame) for frame in raw_frames]))
    if error is not None:
        assert isinstance(error, RequestError)
        assert error.code in {ErrorCode.BAD_FRAMES, ErrorCode.BAD_ARGUMENT, ErrorCode.BATCH_TOO_LARGE}


def result_of(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except RequestError as error:
        return error


@pytest.fixture(scope="module")
def daemon() -> Iterator[ThreadDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvt-") as path, ThreadDaemon(Path(path)) as running:
        yield running


@pytest.fixture(scope="module")
def bystander(daemon: ThreadDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.endpoint) as client:
        client.hello()
        yield client


@pytest.fixture(scope="module")
def attacker(daemon: ThreadDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.endpoint) as client:
        client.hello()
        client.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)
        yield client


def exchange(client: RawClient, batch: list[tuple[bytes, list[bytes]]]) -> list[object]:
    """Send messages, then one whose answer says that all of them were taken up; what was answered to them."""
    for header, raw_frames in batch:
        client.send(header, *raw_frames)
    marker = 1 << 62
    client.send(encode(Stats(id=marker, epoch=client.epoch)))
    replies: list[object] = []
    while True:
        reply, _ = client.receive()
        if reply.id == marker:
            return replies
        replies.append(reply)


def check_that_nothing_is_left(daemon: ThreadDaemon) -> None:
    def left() -> list[object]:
        return [peer.tasks for peer in daemon.server.sessions if peer.tasks or peer.unsent_bytes]

    for _ in range(1000):
        if not daemon.call(left):
            return
        time.sleep(0.01)
    raise AssertionError(daemon.call(left))


@settings(max_examples=150)
@given(batch=st.lists(messages, min_size=1, max_size=8))
def test_random_messages_are_answered_with_errors_and_hurt_nobody(
    daemon: ThreadDaemon, attacker: RawClient, bystander: RawClient, batch: list[tuple[bytes, list[bytes]]]
) -> None:
    replies = exchange(attacker, batch)
    assert len(replies) <= len(batch)
    internal = [r for r in replies if isinstance(r, ErrorReply) and r.code == ErrorCode.INTERNAL]
    assert not internal
    assert bystander.ask(Stats(id=0), StatsReply)
    assert not daemon.errors


class Held:
    """What the service granted last: a request about number 0 means this."""

    def __init__(self) -> None:
        self.reservation = 0
        self.lease = 0

    def aim(self, request: AnyRequest) -> AnyRequest:
        match request:
            case Commit(reservation=0) | Abort(reservation=0):
                request.reservation = self.reservation
            case Release(leases=[0, *_]):
                request.leases = [self.lease]
                request.quiet = False
            case Release():
                request.quiet = False
        return request

    def note(self, reply: AnyReply) -> None:
        match reply:
            case ReserveReply(reservation=number) if number:
                self.reservation = number
            case AcquireReply(lease=number) if number:
                self.lease = number


@settings(max_examples=200)
@example(
    batch=[
        (request, fitting(request, 1))
        for request in (Reserve(id=0, namespace=1), Put(id=0, namespace=1), Commit(id=0, reservation=0, index=[0]))
    ]
)
@given(batch=st.lists(whole_requests | whole_requests | st.tuples(requests, frames), min_size=10, max_size=30))
def test_requests_in_any_order_keep_the_service_whole(
    daemon: ThreadDaemon, attacker: RawClient, bystander: RawClient, batch: list[tuple[AnyRequest, list[bytes]]]
) -> None:
    held = Held()
    for request, raw in batch:
        attacker.post(held.aim(request), raw)
        reply, _ = attacker.receive()
        assert not (isinstance(reply, ErrorReply) and reply.code == ErrorCode.INTERNAL), (request, reply)
        held.note(reply)
    assert bystander.ask(Stats(id=0), StatsReply)
    service = daemon.service

    def slots() -> int:
        lent = sum(len(item.slots) for item in service.reservations.values())
        dead = {id(block): block for lease in service.leases.values() for block in lease.blocks if block.dead}
        return len(service.chunk.free) + len(service.blocks) + lent + len(dead)

    assert daemon.call(slots) == service.chunk.slots
    assert not daemon.errors


def test_a_long_run_of_garbage_leaves_nothing_behind(daemon: ThreadDaemon, bystander: RawClient) -> None:
    def garbage(round_: int) -> list[tuple[bytes, list[bytes]]]:
        return [(bytes([round_, i]) * 50, [bytes(i)] * (i % 5)) for i in range(200)]

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    counts = []
    for round_ in range(6):
        with RawClient(daemon.endpoint) as client:
            client.hello()
            assert len(exchange(client, garbage(round_))) == 200
        assert bystander.alive()
        counts.append(objects())
    check_that_nothing_is_left(daemon)
    assert max(counts[3:]) - counts[2] < 500, counts  # 600 messages came in between


@settings(max_examples=60)
@given(data=st.lists(st.binary(min_size=1, max_size=5000) | maps, min_size=1, max_size=5))
def test_random_messages_on_the_arena_socket_hurt_nobody(
    daemon: ThreadDaemon, bystander: RawClient, data: list[bytes]
) -> None:
    assert daemon.server.arena is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as plug:
        plug.settimeout(20)
        plug.connect(str(daemon.server.arena.path))
        try:
            for message in data:
                plug.send(message)
            plug.send(msgspec.msgpack.encode(ArenaMap(CHUNK)))
            while plug.recv(4096):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert bystander.ask(Stats(id=0), StatsReply)
    assert not daemon.errors
    assert daemon.call(lambda: daemon.server.counters["arena_attached_total"]) == 0
    assert msgspec.msgpack.encode(ArenaHello(b"")) not in data
