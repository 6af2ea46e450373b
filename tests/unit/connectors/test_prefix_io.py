"""A prefix goes in and comes out whole, or is a miss: against the real client and server, with a service to break."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, Geometry, Namespace
from kvtierd.connectors import prefix_io
from kvtierd.connectors.kv_layout import LayerKv, carrier
from kvtierd.connectors.prefix_io import Counters, PrefixIo
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol.messages import Acquire, AnyRequest, Commit, Lookup, Reserve
from kvtierd.protocol.service import Session
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.fake_service import FakeService

SHAPE = Geometry(block_size=4, layers=3, kv_heads=2, k_dim=8, v_dim=4)
BLOCKS = 5
TOKENS = np.arange(BLOCKS * 4)


class Cache:
    """An engine's cache of random KV, for `PrefixIo.write` and to compare with."""

    def __init__(self, tokens: int, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        element = carrier(SHAPE.dtype)
        self.layers = [
            LayerKv(*(rng.integers(0, 65536, (2, tokens, dim), element) for dim in (SHAPE.k_dim, SHAPE.v_dim)))
            for _ in range(SHAPE.layers)
        ]
        self.asked: list[tuple[int, int]] = []

    def part(self, begin: int, end: int) -> Sequence[LayerKv]:
        self.asked.append((begin, end))
        return [LayerKv(pair.k[:, begin:end], pair.v[:, begin:end]) for pair in self.layers]

    def empty_like(self) -> Cache:
        other = Cache(self.layers[0].k.shape[1])
        for pair in other.layers:
            pair.k[:] = 0
            pair.v[:] = 0
        return other

    def same(self, other: Cache, tokens: int) -> bool:
        pairs = zip(self.layers, other.layers, strict=True)
        return all(
            np.array_equal(a.k[:, :tokens], b.k[:, :tokens]) and np.array_equal(a.v[:, :tokens], b.v[:, :tokens])
            for a, b in pairs
        )


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., ThreadDaemon]]:
    with ExitStack() as stack:

        def make(slots: int = 64) -> ThreadDaemon:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-")))
            service = FakeService(slot_bytes=SHAPE.slot_bytes, slots=slots)
            return stack.enter_context(ThreadDaemon(folder, service))

        yield make


@pytest.fixture
def make_io() -> Iterator[Callable[..., PrefixIo]]:
    with ExitStack() as stack:

        def make(endpoint: str) -> PrefixIo:
            client = stack.enter_context(Client(endpoint, timeout_s=20, transfer_timeout_s=20))
            return PrefixIo(client, Namespace(model="m", geometry=SHAPE), Counters())

        yield make


@pytest.fixture
def daemon(make_daemon: Callable[..., ThreadDaemon]) -> ThreadDaemon:
    return make_daemon()


@pytest.fixture
def io(make_io: Callable[..., PrefixIo], daemon: ThreadDaemon) -> PrefixIo:
    return make_io(daemon.endpoint)


def read_back(io: PrefixIo, like: Cache) -> tuple[int, Cache]:
    out, keys = like.empty_like(), io.keys(TOKENS)
    return io.read(keys, io.lookup(keys), out.layers), out


@pytest.mark.parametrize("batch_blocks", [1, 2, 100])
def test_a_prefix_comes_back_whole(io: PrefixIo, batch_blocks: int) -> None:
    io._batch_blocks = batch_blocks
    cache = Cache(len(TOKENS))
    stored = io.write(io.keys(TOKENS), cache.part)
    assert (stored.stored, stored.existed, stored.refused) == (BLOCKS, 0, 0)
    assert stored.payload_bytes == BLOCKS * SHAPE.block_bytes
    blocks, out = read_back(io, cache)
    assert blocks == BLOCKS
    assert cache.same(out, len(TOKENS))


def test_the_batch_is_bounded_in_bytes(daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_io, "BATCH_BYTES", 2 * SHAPE.slot_bytes + 1)
    with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as client:
        io = PrefixIo(client, Namespace(model="m", geometry=SHAPE), Counters())
        cache = Cache(len(TOKENS))
        assert io.write(io.keys(TOKENS), cache.part).stored == BLOCKS
        assert cache.asked == [(0, 8), (8, 16), (16, 20)]
        assert read_back(io, cache)[0] == BLOCKS
        assert (daemon.service.requests["Reserve"], daemon.service.requests["Acquire"]) == (3, 3)


def test_only_what_is_missing_is_asked_of_the_engine(io: PrefixIo) -> None:
    cache, keys = Cache(len(TOKENS)), io.keys(TOKENS)
    io.write(keys[:2], cache.part)
    cache.asked.clear()
    stored = io.write(keys, cache.part)
    assert (stored.stored, stored.existed) == (3, 2)
    assert cache.asked == [(8, 20)]
    assert io.write(keys, cache.part).existed == BLOCKS
    assert cache.asked == [(8, 20)]
    blocks, out = read_back(io, cache)
    assert blocks == BLOCKS
    assert cache.same(out, len(TOKENS))


def test_where_room_ends_the_prefix_ends_without_a_hole(
    make_daemon: Callable[..., ThreadDaemon], make_io: Callable[..., PrefixIo]
) -> None:
    daemon = make_daemon(slots=3)
    io, cache = make_io(daemon.endpoint), Cache(len(TOKENS))
    io._batch_blocks = 2
    stored = io.write(io.keys(TOKENS), cache.part)
    assert (stored.stored, stored.refused) == (3, 2)
    assert daemon.service.requests["Reserve"] == 2  # nothing after the hole is asked for
    assert read_back(io, cache)[0] == 3
    assert io._counters.refused_blocks == 2


def test_case_03_a_block_that_rotted_is_a_miss_and_goes_away(
    io: PrefixIo, daemon: ThreadDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    cache, keys = Cache(len(TOKENS)), io.keys(TOKENS)
    io.write(keys, cache.part)

    def rot() -> None:
        block = daemon.service.blocks[io.namespace.digest(), keys[2].tobytes()]
        daemon.service.chunk.slot(block.slot)[SHAPE.layer_stride + 5] ^= 1

    daemon.call(rot)
    with caplog.at_level(logging.ERROR):
        blocks, out = read_back(io, cache)
    assert blocks == 2
    assert cache.same(out, 2 * SHAPE.block_size)
    assert io._counters.corrupt_blocks == 1
    assert "does not match its checksum" in caplog.text
    assert len(io.lookup(keys)) == 2
    assert io.write(keys, cache.part).stored == 1  # and is stored anew
    assert read_back(io, cache)[0] == BLOCKS


def test_case_05_a_slot_that_changed_hands_is_a_miss_and_its_block_stays(io: PrefixIo, daemon: ThreadDaemon) -> None:
    cache, keys = Cache(len(TOKENS)), io.keys(TOKENS)
    io.write(keys, cache.part)
    release: list[object] = []

    class Slow(list[LayerKv]):
        """Arrays whose first use comes after the lease has ended and the slot was given to somebody else."""

        def __iter__(self) -> Iterator[LayerKv]:
            if not release:
                release.append(daemon.call(steal))
            return super().__iter__()

    def steal() -> None:
        slot = daemon.service.blocks[io.namespace.digest(), keys[1].tobytes()].slot
        daemon.service.chunk.generations[slot] += 1
        daemon.service.chunk.slot(slot)[:] = 0xFF

    out = cache.empty_like()
    assert io.read(keys, io.lookup(keys), Slow(out.layers)) == 1
    assert cache.same(out, SHAPE.block_size)
    assert io._counters.corrupt_blocks == 0


@pytest.mark.parametrize("kind", [Lookup, Acquire, Reserve, Commit])
@pytest.mark.parametrize("code", [ErrorCode.BUSY, ErrorCode.BAD_ARGUMENT])
def test_an_error_of_the_daemon_is_a_miss_or_a_refusal_and_never_raised(
    io: PrefixIo, daemon: ThreadDaemon, kind: type[AnyRequest], code: ErrorCode
) -> None:
    cache, keys = Cache(len(TOKENS)), io.keys(TOKENS)
    half = keys[:2]
    io.write(half, cache.part)

    def fail(_session: Session, request: AnyRequest) -> None:
        if isinstance(request, kind):
            raise RequestError(code, "made up")

    daemon.service.before = fail
    blocks, _ = read_back(io, cache)
    assert blocks == (0 if kind in {Lookup, Acquire} else 2)
    stored = io.write(keys, cache.part)
    # What does not fail here is stored: only Reserve and Commit are in the way of a store.
    assert stored.stored == (0 if kind in {Reserve, Commit} else 3)
    assert stored.stored + stored.existed + stored.refused == BLOCKS
    assert bool(io._counters.failures) == (code is ErrorCode.BAD_ARGUMENT)
    daemon.service.before = None
    assert io.write(keys, cache.part).refused == 0
    assert read_back(io, cache)[0] == BLOCKS


def test_without_a_daemon_everything_is_a_miss(tmp_path: Path) -> None:
    with Client(f"ipc://{tmp_path}/nobody.sock") as client:
        io = PrefixIo(client, Namespace(model="m", geometry=SHAPE), Counters())
        cache = Cache(len(TOKENS))
        stored = io.write(io.keys(TOKENS), cache.part)
        assert (stored.stored, stored.refused) == (0, BLOCKS)
        assert cache.asked == []
        assert read_back(io, cache)[0] == 0
        assert io._counters.failures == 0
        assert client.counters["lookups_missed_unavailable"] == 1


def test_an_engine_whose_arrays_do_not_fit_is_told_and_nothing_is_stored(io: PrefixIo) -> None:
    wrong = [LayerKv(np.zeros((2, 20, 9), np.uint16), np.zeros((2, 20, 4), np.uint16))] * 3
    with pytest.raises(ValueError, match="K of layer 0"):
        io.write(io.keys(TOKENS), lambda begin, end: [LayerKv(p.k[:, begin:end], p.v[:, begin:end]) for p in wrong])
    assert len(io.lookup(io.keys(TOKENS))) == 0
    assert io.write(io.keys(TOKENS), Cache(len(TOKENS)).part).stored == BLOCKS


def test_dropping_from_no_tier_is_refused(io: PrefixIo) -> None:
    with pytest.raises(ValueError, match="name the tiers"):
        io.drop([])
