"""Writes to nvme leave the machine to clients that copy out of host memory, and are never late for who waits."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.policy import stepping_aside
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys

PROMPT = 10


class TimedStore(MemoryStore):
    """Writes take a minute of the rig's clock each."""

    rig: Rig

    async def write(self, items):
        self.rig.clock.advance(60)
        return await super().write(items)


@pytest.fixture(autouse=True)
def _copies_that_last(monkeypatch):
    """A client copies for ever once it has begun, and a pause is as long as it takes."""
    monkeypatch.setattr(stepping_aside, "GRACE", 1e15)
    monkeypatch.setattr(stepping_aside, "HORIZON_NS", 10**17)
    monkeypatch.setattr(stepping_aside, "PAUSE_MAX_NS", 10**17)


def run(scenario):
    async def body():
        store = TimedStore()
        async with Rig(store=store) as rig:
            store.rig = rig
            session = rig.session()
            ns = await rig.register(session)
            await rig.store(session, ns, make_keys(PROMPT))
            await on_nvme(rig, PROMPT)
            await asyncio.wait_for(scenario(rig, session, ns), 60)
            rig.check_accounts()

    asyncio.run(body())


async def on_nvme(rig, count):
    while rig.manager.stats()["nvme_blocks"] < count:
        await asyncio.sleep(0.005)


async def copy(rig, session, ns):
    reply, _ = await rig.acquire(session, ns, make_keys(PROMPT))
    assert reply.count == PROMPT
    await rig.release(session, reply)


async def pause(rig):
    while not rig.manager.stats()["offload_pauses"]:
        await asyncio.sleep(0.005)


def test_what_is_stored_while_a_client_copies_waits_and_is_written_at_once_when_somebody_flushes():
    async def scenario(rig, session, ns):
        await copy(rig, session, ns)
        await rig.store(session, ns, make_keys(PROMPT, start=1))
        await pause(rig)
        assert rig.manager.stats()["nvme_blocks"] == PROMPT
        await rig.call(session, m.Flush(id=1))
        assert rig.manager.stats()["nvme_blocks"] == 2 * PROMPT

    run(scenario)


def test_what_is_stored_while_somebody_flushes_does_not_wait():
    async def scenario(rig, session, ns):
        await copy(rig, session, ns)
        await rig.store(session, ns, make_keys(PROMPT, start=1))
        await pause(rig)
        flush = asyncio.create_task(rig.call(session, m.Flush(id=1)))
        await rig.store(session, ns, make_keys(PROMPT, start=2))
        await flush
        await rig.store(session, ns, make_keys(PROMPT, start=3))
        await rig.call(session, m.Flush(id=2))
        assert rig.manager.stats()["nvme_blocks"] == 4 * PROMPT

    run(scenario)


def test_a_large_backlog_waits_for_nobody(monkeypatch):
    async def scenario(rig, session, ns):
        monkeypatch.setattr(rig.manager._write_behind.patience, "_limit_bytes", 1)
        await copy(rig, session, ns)
        await rig.store(session, ns, make_keys(PROMPT, start=1))
        await on_nvme(rig, 2 * PROMPT)
        assert rig.manager.stats()["offload_pauses"] == 0

    run(scenario)


def test_writes_do_not_wait_for_a_client_whose_blocks_come_from_nvme():
    async def scenario(rig, session, ns):
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        await copy(rig, session, ns)
        await rig.store(session, ns, make_keys(PROMPT, start=1))
        await on_nvme(rig, 2 * PROMPT)
        assert rig.manager.stats()["offload_pauses"] == 0

    run(scenario)


def test_the_manager_ends_while_a_write_waits():
    async def scenario(rig, session, ns):
        await copy(rig, session, ns)
        await rig.store(session, ns, make_keys(PROMPT, start=1))
        await pause(rig)

    run(scenario)
