"""Objects through the real client and server, with a service to break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client
from kvtierd.connectors import objects as module
from kvtierd.connectors.objects import DROPPED, EXISTED, STORED, Objects
from kvtierd.connectors.opaque import opaque_geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.fake_service import FakeService

GEOMETRY = opaque_geometry(6000, "opaque:test")
HANDLE = NamespaceHandle(Namespace(model="m", geometry=GEOMETRY), allow_loss=False)
COUNT = 9


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with (
        ThreadDaemon(tmp_path, FakeService(slot_bytes=GEOMETRY.slot_bytes)) as daemon,
        Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=30) as connected,
    ):
        yield connected


@pytest.fixture
def objects(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    monkeypatch.setattr(module, "BATCH_BYTES", 4 * GEOMETRY.slot_bytes)  # so that it takes several turns
    made = Objects(client, load_timeout_s=30, store_timeout_s=30)
    yield made
    made.close()


def some_keys(seed: int = 0, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


def some_bytes(seed: int = 1, count: int = COUNT) -> list[list[np.ndarray]]:
    """Objects in three pieces each."""
    return [split(row) for row in np.random.default_rng(seed).integers(0, 256, (count, 6000), np.uint8)]


def split(row: np.ndarray) -> list[np.ndarray]:
    return [row[:100], row[100:5000], row[5000:]]


def room(count: int = COUNT) -> list[list[np.ndarray]]:
    return [split(np.zeros(6000, np.uint8)) for _ in range(count)]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all((a == b).all() for a, b in zip(one, other, strict=True))


def test_all_come_back_and_a_second_store_finds_them_there(objects):
    keys, source, target = some_keys(), some_bytes(), room()
    assert (objects.store(HANDLE, keys, source) == STORED).all()
    assert (objects.present(HANDLE, keys) > 0).all()
    assert objects.load(HANDLE, keys, target).all()
    assert all(same(a, b) for a, b in zip(target, source, strict=True))
    assert (objects.store(HANDLE, keys, source) == EXISTED).all()


@pytest.mark.parametrize("there", [[0], [8], [1, 2, 3, 7], [0, 2, 4, 6, 8], []])
def test_holes_end_nothing(objects, there):
    keys, source, target = some_keys(), some_bytes(), room()
    objects.store(HANDLE, keys[there], [source[i] for i in there])
    wanted = np.isin(np.arange(COUNT), there)
    assert ((objects.present(HANDLE, keys) > 0) == wanted).all()
    assert (objects.load(HANDLE, keys, target) == wanted).all()
    assert all(same(target[i], source[i]) for i in there)
    outcomes = objects.store(HANDLE, keys, source)
    assert (outcomes == np.where(wanted, EXISTED, STORED)).all()


def test_case_03_damaged_ones_are_no_hit_and_are_deleted(objects, client):
    keys, source = some_keys(), some_bytes()
    good = [i for i in range(COUNT) if i != 4]
    objects.store(HANDLE, keys[good], [source[i] for i in good])
    with client.reserve(HANDLE, keys[4:5]) as slots:
        slots.commit(sums=np.array([[7]], np.uint64))
    loaded = objects.load(HANDLE, keys, room())
    assert np.flatnonzero(~loaded).tolist() == [4]
    assert objects.present(HANDLE, keys)[4] == 0


def test_without_a_daemon_nothing_is_there_and_all_is_dropped(tmp_path):
    with Client(f"ipc://{tmp_path}/no.sock") as client:
        away = Objects(client, load_timeout_s=1, store_timeout_s=1)
        assert (away.store(HANDLE, some_keys(), some_bytes()) == DROPPED).all()
        assert not away.present(HANDLE, some_keys()).any()
        assert not away.load(HANDLE, some_keys(), room()).any()
        away.close()
