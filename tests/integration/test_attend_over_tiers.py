"""A real daemon computes attention for clients of other processes: over all tiers, for several at once, and after some
of them are gone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvtierd import AsyncClient, Client, ErrorCode, RequestError, Unavailable
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.testing.attention import RandomKv, random_kv

SHAPE = Geometry(block_size=64, layers=3, kv_heads=2, k_dim=64, v_dim=64)
BLOCKS = 24
Q = np.random.default_rng(3).standard_normal((2, 8, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("attend")
    settings = {"host__capacity": 64 * MIB, "host__chunk_bytes": 4 * MIB, "gpu__capacity": 16 * MIB}
    with EmbeddedDaemon(folder, attention__staging_bytes=MIB, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def kv() -> RandomKv:
    return random_kv(SHAPE, BLOCKS, seed=2, model="integration")


@pytest.fixture(scope="module")
def stored(daemon: EmbeddedDaemon, kv: RandomKv):
    """A client whose blocks lie in all tiers."""
    with Client(daemon.endpoint, timeout_s=30, transfer_timeout_s=30) as client:
        while client.stats()["host_ready_bytes"] < client.stats()["host_capacity_bytes"]:
            time.sleep(0.01)
        handle = client.register(kv.namespace)
        assert client.store(handle, kv.names, np.stack(kv.packed)).stored == BLOCKS
        client.flush()
        client.purge(handle, tiers=["gpu", "host"])
        assert client.prefetch(handle, kv.names[3:6], tier="gpu", wait=True) == 3
        client.purge(handle, tiers=["host"])
        assert client.prefetch(handle, kv.names[10:15], wait=True) == 5
        yield client, handle


def check(kv: RandomKv, attended, layer: int, **options) -> None:
    length = options.pop("length", BLOCKS * SHAPE.block_size)
    expected, lse = kv.reference(Q, layer, length, **options)
    assert relative_error(attended.output, expected) <= 1e-5
    assert np.allclose(attended.lse, lse, rtol=1e-5, atol=1e-5)
    assert not attended.lossy.size


def test_a_client_attends_layer_by_layer_over_all_tiers(stored, kv: RandomKv) -> None:
    client, handle = stored
    with client.open_sequence(handle, kv.names) as sequence:
        assert sequence.count == BLOCKS
        for layer in range(SHAPE.layers):
            check(kv, sequence.attend(layer, Q), layer)
        check(kv, sequence.attend(1, Q, length=700, window=90), 1, length=700, window=90)
        both = sequence.attend_layers([2, 0], [Q, Q])
        check(kv, both[0], 2)
        check(kv, both[1], 0)
    stats = client.stats()
    assert stats["sequences"] == 0
    assert stats["attend_nvme_bytes"] > 0
    assert stats["attend_gpu_bytes"] > 0


@pytest.mark.usefixtures("stored")
def test_an_asyncio_client_asks_several_things_at_once(daemon: EmbeddedDaemon, kv: RandomKv) -> None:
    async def body() -> None:
        async with AsyncClient(daemon.endpoint, timeout_s=30) as client:
            handle = await client.register(kv.namespace)
            async with await client.open_sequence(handle, kv.names[:8]) as sequence:
                assert await sequence.extend(kv.names[8:]) == BLOCKS
                found = await asyncio.gather(*(sequence.attend(layer, Q) for layer in (0, 1, 2)))
        for layer, attended in enumerate(found):
            check(kv, attended, layer)

    asyncio.run(body())


def test_mistakes_are_errors_of_the_client_that_makes_them(stored, kv: RandomKv) -> None:
    client, handle = stored
    wrong = kv.names.copy()
    wrong[7, 0] ^= 1
    with pytest.raises(RequestError) as caught:
        client.open_sequence(handle, wrong)
    assert caught.value.code == ErrorCode.NOT_PRESENT
    with client.open_sequence(handle, kv.names) as sequence:
        for layer, q, kind in ((3, Q, RequestError), (0, Q[:, :7], RequestError), (0, Q[0], ValueError)):
            with pytest.raises(kind):
                sequence.attend(layer, q)
        broken = Q.copy()
        broken[0, 0, 0] = np.nan
        with pytest.raises(RequestError, match="NaN"):
            sequence.attend(0, broken)
        check(kv, sequence.attend(0, Q), 0)
    with pytest.raises(ValueError, match="closed"):
        sequence.attend(0, Q)


def test_a_sequence_that_ended_by_time_is_opened_again(stored, kv: RandomKv) -> None:
    client, handle = stored
    with client.open_sequence(handle, kv.names, ttl_s=0.001) as sequence:
        deadline_s = time.monotonic() + 30
        while client.stats()["sequences"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        check(kv, sequence.attend(1, Q), 1)


def test_several_processes_at_once_and_one_that_is_killed(daemon: EmbeddedDaemon, stored, kv: RandomKv) -> None:
    client, handle = stored
    command = [sys.executable, "-P", str(Path(__file__).with_name("attending_process.py")), daemon.endpoint]
    processes = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(3)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "attending\n"
        assert client.stats()["sequences"] == 3
        processes[0].send_signal(signal.SIGKILL)
        with client.open_sequence(handle, kv.names) as sequence:
            check(kv, sequence.attend(2, Q), 2)
        for process in processes[1:]:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "a client saw a wrong result"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    deadline_s = time.monotonic() + 60
    while client.stats()["sequences"]:
        assert time.monotonic() < deadline_s, "sequences of dead clients are still open"
        time.sleep(0.05)
    assert client.stats()["sequence_host_kept_bytes"] == 0


def test_without_a_daemon_attention_says_so(tmp_path: Path, kv: RandomKv) -> None:
    with Client(f"ipc://{tmp_path}/nobody.sock", timeout_s=0.05) as client:
        handle = client.register(kv.namespace)
        with pytest.raises(Unavailable):
            client.open_sequence(handle, kv.names, timeout_s=0.05)
