"""CASES row 22: a disk that cannot follow costs copies on disk, and nothing else."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, pattern, small_settings
from kvtierd.tiers import write_behind

QUEUE_BYTES = 1 << 20
SLOTS = (2 << 20) // SHAPE.slot_bytes
PROMPT = 10
PROMPTS = 2 * SLOTS // PROMPT


def run(scenario, store=None):
    store = store or MemoryStore()
    settings = small_settings()
    settings = msgspec.structs.replace(
        settings, nvme=msgspec.structs.replace(settings.nvme, write_queue_bytes=QUEUE_BYTES)
    )

    async def body():
        async with Rig(settings, store) as rig:
            session = rig.session()
            ns = await rig.register(session)
            try:
                await scenario(rig, store, session, ns)
            finally:
                store.stall.set()
            rig.check_accounts()

    asyncio.run(body())


async def check_read(rig, session, ns, keys):
    """Read, and compare every byte."""
    reply, descriptors = await rig.acquire(session, ns, keys)
    for key, descriptor in zip(keys[: reply.count], descriptors, strict=True):
        assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
    if reply.lease:
        await rig.release(session, reply)
    return reply.count


def test_case_22_the_queue_to_a_disk_that_stands_still_is_bounded_and_stores_go_on():
    async def scenario(rig, store, session, ns):
        store.stall.clear()
        for number in range(PROMPTS):
            assert await rig.store(session, ns, make_keys(PROMPT, start=number)) == PROMPT
            assert rig.manager.stats()["write_queue_bytes"] <= QUEUE_BYTES
            assert await check_read(rig, session, ns, make_keys(PROMPT, start=number)) == PROMPT
        assert rig.manager.stats()["offload_deferred_blocks"] > 0
        assert rig.manager.stats()["nvme_blocks"] == 0

    run(scenario)


def test_case_22_what_was_evicted_before_its_turn_is_counted_as_dropped():
    async def scenario(rig, store, session, ns):
        store.stall.clear()
        for number in range(PROMPTS):
            await rig.store(session, ns, make_keys(PROMPT, start=number))
        stats = rig.manager.stats()
        store.stall.set()
        await rig.call(session, m.Flush(id=1))
        stats = rig.manager.stats()
        stored = PROMPTS * PROMPT
        assert stats["offload_dropped_blocks"] > 0
        assert stats["offloaded_blocks"] + stats["offload_dropped_blocks"] == stored
        assert stats["host_lost_blocks"] == stats["offload_dropped_blocks"]

    run(scenario)


def test_case_22_batches_that_wait_are_bounded_too(monkeypatch):
    monkeypatch.setattr(write_behind, "DEFERRED_MAX", 3)

    async def scenario(rig, store, session, ns):
        store.stall.clear()
        for number in range(PROMPTS):
            await rig.store(session, ns, make_keys(PROMPT, start=number))
            assert rig.manager.backlog_bytes <= QUEUE_BYTES + 3 * PROMPT * SHAPE.slot_bytes
        assert rig.manager.stats()["offload_dropped_blocks"] > 0

    run(scenario)


@pytest.mark.parametrize("where", ["host", "disk"])
def test_case_22_loads_are_unharmed_while_writes_stand_still(where):
    async def scenario(rig, store, session, ns):
        keys = make_keys(PROMPT, start=500)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        if where == "disk":
            await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        store.stall.clear()
        for number in range(PROMPTS // 2):
            await rig.store(session, ns, make_keys(PROMPT, start=number))
        assert await asyncio.wait_for(check_read(rig, session, ns, keys), 5) == PROMPT
        assert await rig.lookup(session, ns, keys) == PROMPT

    run(scenario)


def test_case_22_a_block_that_was_dropped_gets_another_chance_when_it_is_read(monkeypatch):
    monkeypatch.setattr(write_behind, "DEFERRED_MAX", 1)

    async def scenario(rig, store, session, ns):
        store.stall.clear()
        prompts = [make_keys(PROMPT, start=number) for number in range(13)]
        for keys in prompts:
            await rig.store(session, ns, keys)
        store.stall.set()
        await rig.call(session, m.Flush(id=1))
        dropped = rig.manager.stats()["offload_dropped_blocks"]
        assert dropped >= PROMPT
        for keys in prompts:
            assert await check_read(rig, session, ns, keys) == PROMPT
        await rig.call(session, m.Flush(id=1))
        assert rig.manager.stats()["nvme_blocks"] == 13 * PROMPT

    run(scenario)
