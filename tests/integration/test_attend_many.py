"""Several sequences are attended to at once: a client that decodes a batch of rows asks for all of them together."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, ErrorCode, RequestError, Unavailable
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.protocol import attention_batch
from kvtierd.protocol.attention_plans import Options
from kvtierd.testing.attention import RandomKv, random_kv

SHAPE = Geometry(block_size=64, layers=2, kv_heads=2, k_dim=64, v_dim=64)
BLOCKS = 20
Q = np.random.default_rng(3).standard_normal((BLOCKS, 1, 8, 64)).astype(np.float32)
PAST = Options(causal=False)


@pytest.fixture(scope="module")
def kv() -> RandomKv:
    return random_kv(SHAPE, BLOCKS, seed=2, model="many")


@pytest.fixture
def daemon(tmp_path: Path):
    with EmbeddedDaemon(tmp_path, host__capacity=32 * MIB, host__chunk_bytes=4 * MIB, gpu__capacity=0) as running:
        yield running


@pytest.fixture
def stored(daemon: EmbeddedDaemon, kv: RandomKv):
    with Client(daemon.endpoint, timeout_s=30, transfer_timeout_s=30) as client:
        while client.stats()["host_ready_bytes"] < client.stats()["host_capacity_bytes"]:
            time.sleep(0.01)
        handle = client.register(kv.namespace)
        assert client.store(handle, kv.names, np.stack(kv.packed)).stored == BLOCKS
        client.flush()
        yield client, handle


def check(kv: RandomKv, found, lengths) -> None:
    for number, (attended, blocks) in enumerate(zip(found, lengths, strict=True)):
        expected, lse = kv.reference(Q[number], 1, blocks * SHAPE.block_size, causal=False)
        assert relative_error(attended.output, expected) <= 1e-5
        assert np.allclose(attended.lse, lse, rtol=1e-5, atol=1e-5)


def opened(client: Client, handle, kv: RandomKv, **options):
    """One sequence for each length."""
    return [client.open_sequence(handle, kv.names[:blocks], **options) for blocks in range(1, BLOCKS + 1)]


def asked(sequences):
    return [sequence.ask(1, Q[number], PAST) for number, sequence in enumerate(sequences)]


def test_more_sequences_than_fit_in_one_wave(stored, kv: RandomKv) -> None:
    client, handle = stored
    sequences = opened(client, handle, kv)
    with client.attend_many(asked(sequences)) as pending:
        check(kv, pending.result(), range(1, BLOCKS + 1))
    with client.attend_many([]) as none:
        assert none.result() == []


def test_a_daemon_that_works_on_few_at_a_time(tmp_path: Path, kv: RandomKv) -> None:
    settings = {"host__capacity": 32 * MIB, "host__chunk_bytes": 4 * MIB, "attention__max_requests": 4}
    with EmbeddedDaemon(tmp_path, **settings) as daemon, Client(daemon.endpoint, timeout_s=30) as client:
        while client.stats()["host_ready_bytes"] < 32 * MIB:
            time.sleep(0.01)
        handle = client.register(kv.namespace)
        assert client.store(handle, kv.names, np.stack(kv.packed), timeout_s=30).stored == BLOCKS
        check(kv, client.attend_many(asked(opened(client, handle, kv))).result(), range(1, BLOCKS + 1))


def test_a_restart_and_an_end_by_time_between_two_batches(daemon: EmbeddedDaemon, stored, kv: RandomKv) -> None:
    client, handle = stored
    sequences = opened(client, handle, kv, ttl_s=0.5)
    for trouble in (lambda: await_none(client), daemon.restart):
        trouble()
        give_up_s = time.monotonic() + 60
        while True:
            try:
                check(kv, client.attend_many(asked(sequences)).result(), range(1, BLOCKS + 1))
                break
            except Unavailable:
                assert time.monotonic() < give_up_s
                time.sleep(0.05)


def await_none(client: Client) -> None:
    give_up_s = time.monotonic() + 30
    while client.stats()["sequences"]:
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def test_one_that_is_lost_fails_the_batch_and_names_the_block(stored, kv: RandomKv) -> None:
    client, handle = stored
    sequences = opened(client, handle, kv)
    sequences[4].close()
    sequences[4] = client.open_sequence(handle, kv.names[:5], ttl_s=0.001)
    assert client.delete(handle, kv.names[2:3]) == 1
    give_up_s = time.monotonic() + 30
    while client.stats()["sequences"] == BLOCKS:
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
    with client.attend_many(asked(sequences)) as pending, pytest.raises(RequestError) as caught:
        pending.result()
    assert caught.value.code == ErrorCode.NOT_PRESENT
    assert "block 2" in str(caught.value)


def test_what_nobody_waits_for_leaves_nothing_behind(stored, kv: RandomKv) -> None:
    client, handle = stored
    sequences = opened(client, handle, kv)
    for _ in range(3):
        with client.attend_many(asked(sequences)):
            pass
    check(kv, client.attend_many(asked(sequences)).result(), range(1, BLOCKS + 1))
    for sequence in sequences:
        sequence.close()
    client.ping()
    assert client.stats()["sequences"] == 0


def test_sequences_of_a_wave_are_of_one_session(stored, kv: RandomKv, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is lost in the midst of a wave must not leave numbers of the one before in it."""
    client, handle = stored
    sequences = opened(client, handle, kv)[:3]
    original = attention_batch.SequencePlans.addressed
    calls = itertools.count()

    def addressed(self, request, deadline_ns):
        if next(calls) == 1:
            client._connection.up, client._connection.token = False, b""  # a new session, as after a restart
            client._connection.session_no += 1
            client._connection.numbers = {}
        return (yield from original(self, request, deadline_ns))

    monkeypatch.setattr(attention_batch.SequencePlans, "addressed", addressed)
    check(kv, client.attend_many(asked(sequences)).result(), range(1, 4))
    assert next(calls) > 4
