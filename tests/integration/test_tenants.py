"""Two tenants of one daemon who store the same model's blocks: neither sees, times or disturbs the other's."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from kvtierd import Client, CurveKeys, Geometry, KeyPair, Namespace, block_keys
from kvtierd.cli.main import main
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol import messages as m
from kvtierd.protocol.arena import Arena, ArenaError
from kvtierd.testing.raw_client import RawClient
from kvtierd.testing.waiting import wait_for

SPACE = Namespace(model="m", geometry=Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64))
BLOCKS = 6
SMALL = {"host__capacity": "16MiB", "host__chunk_bytes": "4MiB", "gpu__capacity": "4MiB", "nvme__segment_bytes": "4MiB"}
OTHER = {"tenants__b__host_bytes": "8MiB"}
KEYS = block_keys(SPACE.digest(), range(BLOCKS * 16), 16)
STRANGE = block_keys(SPACE.digest(), range(1_000_000, 1_000_000 + BLOCKS * 16), 16)


def blocks_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, SPACE.geometry.block_bytes), np.uint8)


def endpoint(daemon: EmbeddedDaemon, tenant: str) -> str:
    return f"ipc://{daemon.runtime_dir / tenant / 'kvtierd.sock'}"


def client(daemon: EmbeddedDaemon, tenant: str, **options: object) -> Client:
    return Client(endpoint(daemon, tenant), timeout_s=20, transfer_timeout_s=20, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedDaemon]:
    with EmbeddedDaemon(tmp_path_factory.mktemp("tenants") / "d", **SMALL, **OTHER) as running:
        yield running


def test_case_09_equal_keys_of_two_tenants_are_two_blocks_in_every_tier_and_life(tmp_path: Path) -> None:
    mine, others = blocks_of(1), blocks_of(2)
    with EmbeddedDaemon(tmp_path / "d", **SMALL, **OTHER) as daemon:
        with client(daemon, "default") as a, client(daemon, "b") as b:
            at_a, at_b = a.register(SPACE), b.register(SPACE)
            assert at_a.digest == at_b.digest
            assert a.store(at_a, KEYS, mine).stored == BLOCKS
            assert b.lookup(at_b, KEYS).count == 0
            assert b.fetch(at_b, KEYS).count == 0
            assert b.store(at_b, KEYS, others).stored == BLOCKS, "his are new"
            for handle, one, blocks in ((at_a, a, mine), (at_b, b, others)):
                one.flush()
                assert one.purge(handle, tiers=["host"]) == BLOCKS
                assert (one.fetch(handle, KEYS).blocks == blocks).all()
            assert b.delete(at_b, KEYS[:1]) == 1
            assert a.lookup(at_a, KEYS).count == BLOCKS
            b.flush()
        daemon.restart()
        with client(daemon, "default") as a, client(daemon, "b") as b:
            at_a, at_b = a.register(SPACE), b.register(SPACE)
            assert (a.fetch(at_a, KEYS).blocks == mine).all()
            assert b.lookup(at_b, KEYS).count == 0, "its first block was deleted"
            assert (b.fetch(at_b, KEYS[1:]).blocks == others[1:]).all()
            assert b.purge() == BLOCKS - 1
            assert a.lookup(at_a, KEYS).count == BLOCKS


def test_blocks_of_a_tenant_that_is_not_served_wait_for_it(tmp_path: Path) -> None:
    with EmbeddedDaemon(tmp_path / "d", **SMALL, **OTHER) as daemon, client(daemon, "b") as b:
        b.store(b.register(SPACE), KEYS, blocks_of(2))
        b.flush()
    with EmbeddedDaemon(tmp_path / "d", **SMALL, server__tenant="c") as daemon, client(daemon, "c") as c:
        assert c.lookup(c.register(SPACE), KEYS).count == 0
    with EmbeddedDaemon(tmp_path / "d", **SMALL, server__tenant="b") as daemon, client(daemon, "b") as b:
        assert (b.fetch(b.register(SPACE), KEYS).blocks == blocks_of(2)).all()


OPERATIONS = {
    "lookup": lambda ns: m.Lookup(id=0, namespaces=[ns]),
    "get": lambda ns: m.Get(id=0, namespace=ns),
    "prefetch": lambda ns: m.Prefetch(id=0, namespace=ns, wait=True),
    "pin": lambda ns: m.Pin(id=0, namespace=ns),
    "unpin": lambda ns: m.Unpin(id=0, namespace=ns),
    "delete": lambda ns: m.Delete(id=0, namespace=ns),
    "acquire": lambda ns: m.Acquire(id=0, namespace=ns),
    "open_sequence": lambda ns: m.OpenSequence(id=0, namespace=ns),
    "reshape": lambda ns: m.Reshape(id=0, namespace=ns, parts=[64]),
}


def answer(raw: RawClient, request: m.AnyRequest, *frames: bytes) -> tuple[object, list[bytes]]:
    """A reply without what differs between any two: its id, and numbers that were given out."""
    raw.post(request, frames)
    reply, got = raw.receive()
    fields = msgspec.structs.asdict(reply)
    return type(reply), [{name: value for name, value in fields.items() if name not in {"id", "epoch"}}, got]  # type: ignore[return-value]


@pytest.mark.parametrize("name", OPERATIONS)
def test_case_09_another_tenants_blocks_are_answered_as_blocks_that_nobody_stored(
    daemon: EmbeddedDaemon, name: str
) -> None:
    with client(daemon, "default") as a, RawClient(endpoint(daemon, "b")) as b:
        a.store(a.register(SPACE), KEYS, blocks_of(1))
        b.hello()
        space = b.ask(m.RegisterNamespace(id=0, namespace=SPACE), m.NamespaceReply)[0].namespace
        request = OPERATIONS[name]
        seen = answer(b, request(space), KEYS.tobytes())
        unknown = answer(b, request(space), STRANGE.tobytes())
        if name != "open_sequence":  # whose keys nobody has is a sequence of no blocks, with a number of its own
            assert seen == unknown
        else:
            assert seen[0] == unknown[0]
            assert not getattr(seen[1][0], "blocks", 0)  # type: ignore[index]


def test_case_09_numbers_of_another_tenant_are_like_numbers_that_nobody_has(daemon: EmbeddedDaemon) -> None:
    with ExitStack() as held, RawClient(daemon.endpoint) as a, RawClient(endpoint(daemon, "b")) as b:
        for raw in (a, b):
            held.callback(attached(raw).close)
            raw.ask(m.RegisterNamespace(id=0, namespace=SPACE), m.NamespaceReply)
        keys = block_keys(SPACE.digest(), range(5_000_000, 5_000_000 + 32), 16)
        reserved = a.ask(m.Reserve(id=0, namespace=1), m.ReserveReply, [keys.tobytes()])[0].reservation
        assert reserved
        sums = [bytes(2 * 2 * 8), bytes(2 * 8)]
        for request, frames in ((m.Commit(id=0, reservation=0), sums), (m.Abort(id=0, reservation=0), [])):
            errors = []
            for number in (reserved, reserved + 77_777):
                request.reservation = number
                error = b.refused(request, frames)
                errors.append((error.code, error.message.replace(str(number), "N")))
            assert errors[0] == errors[1]
            assert errors[0][0] == "not_yours"
        a.ask(m.Abort(id=0, reservation=reserved), m.OkReply)


def attached(raw: RawClient) -> Arena:
    return Arena.attach(raw.hello().arena, raw.token, time.monotonic_ns() + 20_000_000_000)


def test_case_09_memory_of_another_tenant_cannot_be_mapped(daemon: EmbeddedDaemon) -> None:
    with ExitStack() as held, RawClient(daemon.endpoint) as a, RawClient(endpoint(daemon, "b")) as b:
        mine, theirs = attached(a), attached(b)
        held.callback(mine.close)
        held.callback(theirs.close)
        space = a.ask(m.RegisterNamespace(id=0, namespace=SPACE), m.NamespaceReply)[0].namespace
        keys = block_keys(SPACE.digest(), range(6_000_000, 6_000_000 + 16), 16)
        frames = a.ask(m.Reserve(id=0, namespace=space), m.ReserveReply, [keys.tobytes()])[1]
        chunk = int(np.frombuffer(frames[0], m.SLOT_DTYPE)["chunk"][0])
        assert mine.map(chunk, time.monotonic_ns() + 20_000_000_000).data.size == 4 << 20
        refusals = []
        for number in (chunk, 99_999):
            with pytest.raises(ArenaError) as caught:
                theirs.map(number, time.monotonic_ns() + 20_000_000_000)
            refusals.append(str(caught.value).replace(str(number), "N"))
        assert refusals[0] == refusals[1]


def test_case_09_token_opens_nothing_at_another_tenants_sockets(daemon: EmbeddedDaemon) -> None:
    with RawClient(daemon.endpoint) as a, RawClient(endpoint(daemon, "b")) as b:
        token = a.hello().token
        theirs = b.hello(resume=token)
        assert theirs.token != token
        refusals = []
        for tried in (token, bytes(16)):
            with pytest.raises(ArenaError) as caught:
                Arena.attach(theirs.arena, tried, time.monotonic_ns() + 20_000_000_000)
            refusals.append(str(caught.value))
        assert refusals[0] == refusals[1]


def test_case_09_events_are_told_to_their_tenant_alone(daemon: EmbeddedDaemon) -> None:
    context = zmq.Context()
    ears = {}
    for tenant in ("default", "b"):
        ears[tenant] = context.socket(zmq.SUB)
        ears[tenant].setsockopt(zmq.LINGER, 0)
        ears[tenant].subscribe(b"")
        ears[tenant].connect(f"ipc://{daemon.runtime_dir / tenant / 'events.sock'}")
    try:
        with client(daemon, "b") as b:
            handle = b.register(SPACE)

            def heard() -> bool:
                b.delete(handle, KEYS)  # until the subscription has arrived, nobody is told
                b.store(handle, KEYS, blocks_of(2))
                return bool(ears["b"].poll(200))

            wait_for(heard)
            assert KEYS[0].tobytes() in ears["b"].recv_multipart()[2]
            assert not ears["default"].poll(300)
    finally:
        for ear in ears.values():
            ear.close()
        context.term()


def test_statistics_of_a_tenant_tell_nothing_of_another(daemon: EmbeddedDaemon) -> None:
    with client(daemon, "default") as a, client(daemon, "b") as b:
        b.purge()
        b.flush()
        before = b.stats()
        a.store(a.register(SPACE), block_keys(SPACE.digest(), range(7_000_000, 7_000_096), 16), blocks_of(3))
        after = b.stats()
        assert after == before
        assert after["host_used_bytes"] == 0


def test_remote_client_is_the_tenant_of_its_key(tmp_path: Path) -> None:
    server, anna, bert = KeyPair.new(), KeyPair.new(), KeyPair.new()
    server.save(tmp_path / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = {
        "server__tcp": address,
        "server__tcp_key": tmp_path / "server.key",
        "tenants__default__keys": anna.public,
        "tenants__b__keys": bert.public,
    }
    with EmbeddedDaemon(tmp_path / "d", **SMALL, **settings) as daemon, client(daemon, "default") as local:
        local.store(local.register(SPACE), KEYS, blocks_of(1))
        far = {"endpoint": f"tcp://{address}", "timeout_s": 20, "transfer_timeout_s": 20}
        with (
            Client(**far, curve=CurveKeys(server.public, anna)) as a,
            Client(**far, curve=CurveKeys(server.public, bert)) as b,
        ):
            assert (a.fetch(a.register(SPACE), KEYS).blocks == blocks_of(1)).all(), "in frames, of the same tenant"
            handle = b.register(SPACE)
            assert b.lookup(handle, KEYS).count == 0
            assert b.store(handle, KEYS, blocks_of(2)).stored == BLOCKS
            assert (b.fetch(handle, KEYS).blocks == blocks_of(2)).all()
            with client(daemon, "b") as neighbour:
                assert neighbour.lookup(neighbour.register(SPACE), KEYS).count == BLOCKS


def test_operators_see_who_has_what_of_its_quota(daemon: EmbeddedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    with client(daemon, "b") as b:
        b.store(b.register(SPACE), KEYS, blocks_of(2))
        assert main(["tenants", "--endpoint", daemon.endpoint, "--format", "json"]) == 0
        found = {one["tenant"]: one for one in json.loads(capsys.readouterr().out)}
        assert set(found) == {"default", "b"}
        assert found["b"]["sessions"] >= 1
        assert found["b"]["host_limit_bytes"] == 8 << 20
        assert 0 < found["b"]["host_used_bytes"] <= 8 << 20
        assert main(["tenants", "--endpoint", daemon.endpoint]) == 0
        assert "of 8.00 MiB" in capsys.readouterr().out


def test_metrics_say_what_each_tenant_has_unless_the_operator_keeps_that_from_other_users(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    with (
        EmbeddedDaemon(tmp_path / "d", **SMALL, **OTHER, metrics__listen=listen) as daemon,
        client(daemon, "b") as b,
        client(daemon, "default") as a,
    ):
        handle = b.register(SPACE)
        b.store(handle, KEYS, blocks_of(2))
        b.flush()
        assert b.lookup(handle, KEYS).count == BLOCKS
        assert a.lookup(a.register(SPACE), STRANGE).count == 0
        tokens = BLOCKS * SPACE.geometry.block_size
        found = set(scraped(listen).splitlines())
        assert found >= {
            f'kvtierd_tenant_lookup_tokens_total{{tenant="b"}} {tokens}',
            f'kvtierd_tenant_hit_tokens_total{{tenant="b",tier="host"}} {tokens}',
            f'kvtierd_tenant_blocks{{tenant="b",tier="nvme"}} {BLOCKS}',
            f'kvtierd_tenant_used_bytes{{tenant="b",tier="nvme"}} {BLOCKS * SPACE.geometry.slot_bytes}',
            f'kvtierd_tenant_quota_bytes{{tenant="b",tier="host"}} {8 << 20}',
            'kvtierd_tenant_held_bytes{tenant="b"} 0',
            'kvtierd_tenant_hit_tokens_total{tenant="default",tier="host"} 0',
        }
    with EmbeddedDaemon(tmp_path / "d", **SMALL, **OTHER, metrics__listen=listen, metrics__tenants="false"):
        assert "tenant=" not in scraped(listen)


def scraped(listen: str) -> str:
    """What Prometheus gets."""

    def get() -> str:
        try:
            with urllib.request.urlopen(f"http://{listen}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    wait_for(lambda: bool(get()))
    return get()
