"""Engine clients whose daemon speaks another version of the protocol, or has forgotten them while they were idle."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, Geometry
from kvtierd.connectors.objects import DROPPED, STORED, Objects
from kvtierd.connectors.opaque import opaque_geometry
from kvtierd.connectors.vllm_lookups import Lookups, Question
from kvtierd.connectors.vllm_plan import ModelFacts, RankShape
from kvtierd.connectors.watch import Watch
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import sessions
from kvtierd.protocol.messages import PROTOCOL_VERSION
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.protocol.sessions import Limits
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.fake_service import FakeService
from kvtierd.testing.waiting import wait_for

GEOMETRY = opaque_geometry(4096, "opaque:test")
HANDLE = NamespaceHandle(Namespace(model="m", geometry=GEOMETRY), allow_loss=False)
SHAPE = Geometry(block_size=4, layers=1, kv_heads=1, k_dim=8, v_dim=8, layout="opaque:test")
KEYS = np.random.default_rng(1).integers(0, 256, (3, 32), np.uint8)
IDLE_S = 1.0


@pytest.fixture
def daemon() -> Iterator[ThreadDaemon]:
    service = FakeService(slot_bytes=GEOMETRY.slot_bytes)
    limits = Limits(session_idle_s=IDLE_S)
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder, ThreadDaemon(Path(folder), service, limits) as running:
        yield running


@pytest.fixture
def client(daemon: ThreadDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout_s=20) as connected:
        yield connected


@pytest.fixture
def objects(client: Client) -> Iterator[Objects]:
    made = Objects(client, load_timeout_s=20, store_timeout_s=20)
    yield made
    made.close()


def some_bytes() -> list[list[np.ndarray]]:
    return [[np.full(4096, i, np.uint8)] for i in range(3)]


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_daemon_older_or_newer_is_one_that_is_away_and_says_why(client, objects, version, monkeypatch, caplog):
    monkeypatch.setattr(sessions, "PROTOCOL_VERSION", version)
    with caplog.at_level(logging.WARNING):
        watch = Watch(client, logging.getLogger("test"), logging.WARNING)
    assert watch.away
    assert f"this daemon speaks {version}; prompts are computed meanwhile" in caplog.text
    assert (objects.store(HANDLE, KEYS, some_bytes()) == DROPPED).all()
    assert not objects.load(HANDLE, KEYS, some_bytes()).any()
    lookups = Lookups(client, [RankShape(geometry=SHAPE)], timeout_s=20)
    question = Question(facts=lambda: ModelFacts(model="m", revision="r"), tokens=range(8), blocks=2)
    lookup = lookups.begin(question)
    wait_for(lambda: not lookup.pending)
    found = lookup.found()
    assert found is not None
    assert found.blocks == 0
    lookups.close()
    monkeypatch.undo()  # an upgrade
    wait_for(lambda: not watch.away)
    assert (objects.store(HANDLE, KEYS, some_bytes()) == STORED).all()
    watch.close()


def test_an_engine_that_was_idle_for_long_goes_on_in_its_session(client, objects):
    assert (objects.store(HANDLE, KEYS, some_bytes()) == STORED).all()
    token = client._connection.token
    time.sleep(3 * IDLE_S)  # sessions that have memory mapped end with their process, not with time
    assert objects.load(HANDLE, KEYS, some_bytes()).all()
    assert client._connection.token == token


def test_case_05_a_load_that_was_paused_beyond_its_lease_is_a_miss(daemon, objects, caplog):
    """While the second object is copied its slot goes to another block, as it may when a lease has expired."""
    assert (objects.store(HANDLE, KEYS, some_bytes()) == STORED).all()

    class Paused(list[np.ndarray]):
        def __iter__(self) -> Iterator[np.ndarray]:
            daemon.call(steal)
            return super().__iter__()

    def steal() -> None:
        slot = daemon.service.blocks[HANDLE.digest, KEYS[1].tobytes()].slot
        daemon.service.chunk.generations[slot] += 1
        daemon.service.chunk.slot(slot)[:] = 0xFF

    target = [[np.zeros(4096, np.uint8)] for _ in range(3)]
    loaded = objects.load(HANDLE, KEYS, [target[0], Paused(target[1]), target[2]])
    assert loaded.tolist() == [True, False, True]
    assert (int(target[0][0][0]), int(target[2][0][0])) == (0, 2)
    assert not caplog.text, "its bytes are not damaged: they are another block's"
