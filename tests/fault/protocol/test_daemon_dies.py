"""A daemon that dies under a client: who waits for it is told at once, and its memory is not kept."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtierd.protocol.aio import AsyncClient
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.testing.fake_daemon import ProcessDaemon
from tests.fault.protocol.conftest import SPACE, blocks_of, keys_of, until

KEYS, BLOCKS = keys_of(3), blocks_of(3)
LONG_S = 600.0
"""A deadline that nobody waits for here."""
JOIN_S = 60.0

Start = Callable[[], ProcessDaemon]


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Call in a thread; the list gets what it returns, or its exception."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(function())
        except Exception as error:  # noqa: BLE001 - looked at by the test
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def chunk_files() -> set[str]:
    """Inodes of fake daemons' chunks in our address space."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:kvtierd-fake-data" in line}


@pytest.fixture
def mapped() -> Callable[[], int]:
    """Chunks that have been mapped since the test began: an earlier one's may wait for the garbage collector."""
    gc.collect()
    before = chunk_files()
    return lambda: len(chunk_files() - before)


def used(client: Client) -> None:
    """Have something in the arena of the daemon that is there."""
    handle = client.register(SPACE)
    until(lambda: client.store(handle, KEYS, BLOCKS).stored == 3)
    assert client.counters["arena_attached"]


@pytest.mark.parametrize("what", ["lookup", "fetch", "store", "flush"])
def test_case_17_who_waits_for_a_daemon_that_dies_is_told_at_once(endpoint: str, start: Start, what: str) -> None:
    daemon = start()
    with Client(endpoint, timeout_s=LONG_S, transfer_timeout_s=LONG_S) as client:
        used(client)
        handle = client.register(SPACE)
        calls: dict[str, Callable[[], object]] = {
            "lookup": lambda: client.lookup(handle, KEYS).count,
            "fetch": lambda: client.fetch(handle, KEYS).count,
            "store": lambda: client.store(handle, keys_of(2, 100), blocks_of(2)).stored,
            "flush": client.flush,
        }
        daemon.freeze()
        sent = client.counters.copy()
        thread, outcome = in_thread(calls[what])
        until(lambda: client._driver._leader is not None)
        daemon.kill()
        thread.join(JOIN_S)
        assert not thread.is_alive()
        assert isinstance(outcome[0], Unavailable) if what == "flush" else outcome == [0]
        assert client.counters["hang_ups"] == sent["hang_ups"] + 1


def test_all_threads_that_wait_are_told(endpoint: str, start: Start) -> None:
    daemon = start()
    with Client(endpoint, timeout_s=LONG_S, transfer_timeout_s=LONG_S) as client:
        used(client)
        handle = client.register(SPACE)
        daemon.freeze()
        waiting = [in_thread(lambda: client.lookup(handle, KEYS).count) for _ in range(4)]
        until(lambda: client._driver._leader is not None and len(client._driver._followers) == 3)
        daemon.kill()
        for thread, outcome in waiting:
            thread.join(JOIN_S)
            assert outcome == [0]


def test_a_flush_that_a_daemon_took_is_not_asked_of_the_next_one(endpoint: str, start: Start) -> None:
    daemon = start()
    with Client(endpoint, timeout_s=LONG_S, transfer_timeout_s=LONG_S) as client:
        used(client)
        daemon.freeze()
        thread, outcome = in_thread(client.flush)
        until(lambda: client._driver._leader is not None)
        daemon.kill()
        start()
        thread.join(JOIN_S)
        assert isinstance(outcome[0], Unavailable)
        client.flush()


def test_case_15_the_arena_of_a_daemon_that_died_is_not_kept(
    endpoint: str, start: Start, mapped: Callable[[], int]
) -> None:
    daemon = start()
    with Client(endpoint, timeout_s=0.3, transfer_timeout_s=0.3) as client:
        used(client)
        handle = client.register(SPACE)
        assert mapped() == 1
        with client.acquire(handle, KEYS, timeout_s=20) as lease:
            held = lease.views[0]
            before = np.array(held)
            daemon.kill()
            assert client.lookup(handle, KEYS).count == 0
            np.testing.assert_array_equal(held, before)  # what is in somebody's hands stays
            assert mapped() == 1
        del held, lease
        until(lambda: not mapped())
        start()
        used(client)
        assert mapped() == 1


def test_an_asynchronous_client_is_told_at_once_too(endpoint: str, start: Start, mapped: Callable[[], int]) -> None:
    async def main() -> None:
        daemon = start()
        async with AsyncClient(endpoint, timeout_s=LONG_S, transfer_timeout_s=LONG_S) as client:
            handle = await client.register(SPACE)
            assert (await client.store(handle, KEYS, BLOCKS)).stored == 3
            daemon.freeze()
            waiting = [asyncio.create_task(client.lookup(handle, KEYS)) for _ in range(3)]
            while not client._driver._waiting:
                await asyncio.sleep(0.01)
            daemon.kill()
            async with asyncio.timeout(JOIN_S):
                assert [hit.count for hit in await asyncio.gather(*waiting)] == [0, 0, 0]
            assert client.counters["hang_ups"] == 1
            assert not mapped()

    asyncio.run(main())
