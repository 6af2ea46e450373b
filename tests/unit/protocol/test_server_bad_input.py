"""What a client can get wrong: each is a typed error that names it, changes nothing, and costs nobody else anything."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode
from kvtierd.core.keys import KEY_BYTES
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.codec import encode
from kvtierd.protocol.messages import (
    MAX_BATCH,
    MAX_HEADER_BYTES,
    Abort,
    Acquire,
    AnyRequest,
    Commit,
    Delete,
    Flush,
    Get,
    Hello,
    Lookup,
    NamespaceReply,
    Pin,
    Prefetch,
    Purge,
    Put,
    PutReply,
    RegisterNamespace,
    Release,
    Reserve,
    Stats,
    Unpin,
)
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.raw_client import RawClient
from tests.unit.protocol.conftest import PADDED, blocks_of, keys_of

SPACE = Namespace(model="m", geometry=PADDED)
KEYS = keys_of(SPACE, 2).tobytes()
pack = msgspec.msgpack.encode
PICKLE = b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93\x8c\x06exit 1\x85R."
"""What would run a command where somebody unpickled it."""


@pytest.fixture(autouse=True)
def _nothing_changed(daemon: ThreadDaemon, raw: RawClient) -> Iterator[None]:
    """Whatever was sent: the sender and another client are served, and nothing is stored or held."""
    with RawClient(daemon.endpoint) as other:
        other.hello()
        yield
        assert raw.alive()
        assert other.alive()
    service = daemon.service
    assert not service.blocks
    assert not service.reservations
    assert not service.leases
    assert len(service.chunk.free) == service.chunk.slots


@pytest.fixture
def space(raw: RawClient) -> int:
    return raw.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)[0].namespace


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"", "no MessagePack map"),
        (b"\xc1", "no MessagePack map"),
        (bytes(range(256)), "no MessagePack map"),
        (pack(17), "no MessagePack map"),
        (pack([1, 2]), "no MessagePack map"),
        (pack({"id": "x", "op": "lookup"}), "no MessagePack map"),
        (b"\x81" * 2000, "no MessagePack map"),
        (b"\x91" * 60_000, "no MessagePack map"),
        (encode(Stats(id=9))[:-1], "no MessagePack map"),
        (encode(Stats(id=9)) + b"\0", "no MessagePack map"),
        (PICKLE, "no MessagePack map"),
        (bytes(MAX_HEADER_BYTES + 1), "65537 bytes; the limit is 65536"),
    ],
    ids=[
        "empty",
        "reserved byte",
        "binary",
        "number",
        "list",
        "text id",
        "nested maps",
        "nested lists",
        "truncated",
        "trailing",
        "pickle",
        "too long",
    ],
)
def test_case_30_a_header_that_is_none_is_named(raw: RawClient, header: bytes, text: str) -> None:
    error = raw.refused_raw(header)
    assert error.code == ErrorCode.BAD_HEADER
    assert text in error.message
    assert error.id == 0


def test_an_unknown_operation_is_named(raw: RawClient) -> None:
    error = raw.refused_raw(pack({"op": "levitate", "id": 41, "epoch": raw.epoch}))
    assert (error.code, error.id) == (ErrorCode.BAD_HEADER, 41)
    assert "unknown operation 'levitate'" in error.message


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"op": "lookup"}, "namespaces"),
        ({"op": "lookup", "namespaces": "1"}, "array"),
        ({"op": "lookup", "namespaces": [1.5]}, "int"),
        ({"op": "lookup", "namespaces": []}, "names no namespace"),
        ({"op": "prefetch", "namespace": 1, "tier": "tape"}, "tape"),
        ({"op": "register", "namespace": {"model": "m", "geometry": {}}}, "block_size"),
        ({"op": "register", "namespace": {"model": "m"}}, "geometry"),
        ({"op": "commit", "reservation": -1.5}, "int"),
        ({"op": "stats", "deadline_ns": "soon"}, "int"),
        ({"op": "hello", "versions": [1]}, "2"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(raw: RawClient, fields: dict[str, object], text: str) -> None:
    error = raw.refused_raw(pack({"id": 7, "epoch": raw.epoch, **fields}))
    assert (error.code, error.id) == (ErrorCode.BAD_ARGUMENT, 7)
    assert text in error.message


def test_a_geometry_out_of_range_is_named(raw: RawClient) -> None:
    shape = msgspec.to_builtins(PADDED) | {"layers": 5000}
    error = raw.refused_raw(
        pack({"op": "register", "id": 7, "epoch": raw.epoch, "namespace": {"model": "m", "geometry": shape}})
    )
    assert error.code == ErrorCode.BAD_ARGUMENT
    assert "layers is 5000" in error.message


def test_a_long_offending_value_is_cut(raw: RawClient) -> None:
    error = raw.refused_raw(pack({"op": "prefetch", "id": 1, "namespace": 1, "tier": "x" * 10_000}))
    assert len(error.message) <= 400


@pytest.mark.parametrize("versions", [(2, 3), (0, 0), (9, 1)])
def test_other_protocol_versions_are_told_ours(daemon: ThreadDaemon, versions: tuple[int, int]) -> None:
    with RawClient(daemon.endpoint) as client:
        error = client.refused(Hello(id=0, versions=versions))
        assert error.code == ErrorCode.BAD_VERSION
        assert "this daemon speaks 1" in error.message


def requests_with_frames(space: int) -> list[tuple[AnyRequest, int]]:
    """Every operation with the number of frames it wants (None of them empty lists)."""
    return [
        (Hello(id=0), 0),
        (RegisterNamespace(id=0, namespace=SPACE), 0),
        (Lookup(id=0, namespaces=[space, space]), 2),
        (Reserve(id=0, namespace=space), 1),
        (Commit(id=0, reservation=1), 2),
        (Abort(id=0, reservation=1), 0),
        (Acquire(id=0, namespace=space), 1),
        (Release(id=0, leases=[1]), 0),
        (Put(id=0, namespace=space), 4),
        (Get(id=0, namespace=space), 1),
        (Prefetch(id=0, namespace=space), 1),
        (Pin(id=0, namespace=space), 1),
        (Unpin(id=0, namespace=space), 1),
        (Delete(id=0, namespace=space), 1),
        (Purge(id=0), 0),
        (Flush(id=0), 0),
        (Stats(id=0), 0),
    ]


@pytest.mark.parametrize("position", range(17))
def test_a_wrong_number_of_frames_is_named(raw: RawClient, space: int, position: int) -> None:
    request, wanted = requests_with_frames(space)[position]
    name = type(request).__struct_config__.tag
    for count in {wanted - 1, wanted + 1, wanted + 3} - {-1}:
        frames = [KEYS] * count
        if isinstance(request, Put) and count >= 2:
            frames[1] = bytes(16)
        error = raw.refused(request, frames)
        assert error.code == ErrorCode.BAD_FRAMES, error
        assert str(name) in error.message
        assert f"{count} frames" in error.message


@pytest.mark.parametrize(
    "request_",
    [
        Lookup(id=0, namespaces=[1]),
        Reserve(id=0, namespace=1),
        Acquire(id=0, namespace=1),
        Get(id=0, namespace=1),
        Prefetch(id=0, namespace=1),
        Pin(id=0, namespace=1),
        Unpin(id=0, namespace=1),
        Delete(id=0, namespace=1),
    ],
    ids=lambda request: type(request).__name__,
)
def test_keys_of_the_wrong_length_are_named(raw: RawClient, request_: AnyRequest) -> None:
    error = raw.refused(request_, [KEYS[:-1]])
    assert error.code == ErrorCode.BAD_FRAMES
    assert "frame 1 has 63 bytes of keys, which is no multiple of 32" in error.message
    many = bytes((MAX_BATCH + 1) * KEY_BYTES)
    error = raw.refused(request_, [many])
    assert error.code == ErrorCode.BATCH_TOO_LARGE
    assert "8193 blocks in one request; the limit is 8192" in error.message


def test_a_group_lookup_wants_equal_counts_and_one_limit_for_all(raw: RawClient, space: int) -> None:
    lookup = Lookup(id=0, namespaces=[space, space])
    error = raw.refused(lookup, [KEYS, KEYS[:32]])
    assert error.code == ErrorCode.BAD_FRAMES
    assert "frame 2 has 1 keys and frame 1 has 2" in error.message
    half = bytes((MAX_BATCH // 2 + 1) * KEY_BYTES)
    assert raw.refused(lookup, [half, half]).code == ErrorCode.BATCH_TOO_LARGE


@pytest.mark.parametrize(
    ("index", "layer_sums", "block_sums", "text"),
    [
        (None, 23, 8, "frame 1 has 23 bytes of sums"),
        (None, 24, 9, "frame 2 has 9 bytes of sums"),
        ([0, 1], 24, 8, "names 2 blocks but brings 1 block sums"),
        (None, 24, 16, "do not divide among 2 blocks"),
    ],
)
def test_sums_of_the_wrong_length_are_named(
    raw: RawClient, index: list[int] | None, layer_sums: int, block_sums: int, text: str
) -> None:
    error = raw.refused(Commit(id=0, reservation=1, index=index), [bytes(layer_sums), bytes(block_sums)])
    assert error.code == ErrorCode.BAD_FRAMES
    assert text in error.message


def test_put_wants_a_sum_and_a_payload_for_each_key(raw: RawClient, space: int) -> None:
    put = Put(id=0, namespace=space)
    error = raw.refused(put, [KEYS, bytes(8)])
    assert error.code == ErrorCode.BAD_FRAMES
    assert "2 keys want 16" in error.message
    error = raw.refused(put, [KEYS, bytes(16), bytes(10), bytes(10)])
    assert error.code == ErrorCode.GEOMETRY_MISMATCH
    assert "10 bytes" in error.message
    block = blocks_of(SPACE, 1)[0].tobytes()
    error = raw.refused(put, [KEYS[:32], bytes(8), block])
    assert error.code == ErrorCode.CHECKSUM_MISMATCH
    assert raw.ask(put, PutReply, [b"", b""])[0].stored == 0


def test_a_geometry_that_contradicts_its_block_bytes_is_refused(raw: RawClient) -> None:
    error = raw.refused(RegisterNamespace(id=0, namespace=SPACE, block_bytes=1000))
    assert error.code == ErrorCode.GEOMETRY_MISMATCH
    assert "1000" in error.message
    assert "1152" in error.message


def test_numbers_that_are_not_yours(raw: RawClient, space: int) -> None:
    assert raw.refused(Lookup(id=0, namespaces=[space + 1]), [KEYS]).code == ErrorCode.UNKNOWN_NAMESPACE
    assert raw.refused(Release(id=0, leases=[77])).code == ErrorCode.NOT_YOURS
    assert raw.refused(Abort(id=0, reservation=77)).code == ErrorCode.NOT_YOURS
    assert raw.refused(Commit(id=0, reservation=77), [b"", b""]).code == ErrorCode.NOT_YOURS


def test_a_request_without_a_session_is_refused(daemon: ThreadDaemon) -> None:
    with RawClient(daemon.endpoint) as client:
        client.epoch = daemon.server.epoch
        error = client.refused(Stats(id=0))
        assert error.code == ErrorCode.NO_SESSION
        assert error.epoch == daemon.server.epoch


def test_a_request_of_an_earlier_epoch_changes_nothing(raw: RawClient, space: int, daemon: ThreadDaemon) -> None:
    before = daemon.service.requests.copy()
    for epoch in (1, raw.epoch - 1, raw.epoch + 1, (1 << 64) - 1):
        error = raw.refused(Reserve(id=0, epoch=epoch, namespace=space), [KEYS])
        assert error.code == ErrorCode.STALE_EPOCH
        assert error.epoch == raw.epoch
    assert daemon.service.requests == before


def test_a_routing_id_of_the_clients_own_is_refused(daemon: ThreadDaemon) -> None:
    with RawClient(daemon.endpoint, routing_id=b"mine") as client:
        error = client.refused(Hello(id=0))
        assert error.code == ErrorCode.BAD_FRAMES
        assert "routing id" in error.message
        assert b"mine".hex() in error.message
    assert daemon.call(lambda: len(daemon.server.sessions)) == 2


def test_unknown_fields_are_ignored_and_missing_ones_default(raw: RawClient) -> None:
    raw.send(pack({"op": "stats", "id": 5, "epoch": raw.epoch, "colour": "green", "depth": {"x": [1]}}))
    reply, _ = raw.receive()
    assert reply.id == 5
    assert type(reply).__name__ == "StatsReply"


def test_frames_may_be_any_bytes(raw: RawClient, space: int) -> None:
    random = np.random.default_rng(1).bytes(64)
    raw.post(Lookup(id=0, namespaces=[space]), [random])
    assert raw.receive()[0].hit == 0  # type: ignore[union-attr]
