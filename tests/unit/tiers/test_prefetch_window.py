"""The window: blocks behind a read are in host before they are asked for, and nobody pays for it."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys, small_settings


def run(scenario, window=3):
    settings = small_settings()
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    fields["kv_cache_config"] = type(settings.kv_cache_config)(prefetch_window=window)

    async def body():
        async with Rig(settings=type(settings)(**fields), store=MemoryStore()) as rig:
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            await asyncio.sleep(0.02)
            rig.check_accounts()

    asyncio.run(body())


async def make_cold(rig, session, ns, keys):
    await rig.store(session, ns, keys)
    await rig.call(session, m.Flush(id=1))
    await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))


@pytest.mark.parametrize(("window", "waits"), [(0, 10), (3, 1)])
def test_a_sequential_reader_waits_for_the_disk_only_at_the_start(window, waits):
    async def scenario(rig, session, ns):
        keys = make_keys(10)
        await make_cold(rig, session, ns, keys)
        cold = 0
        for end in range(1, 11):
            reply, descriptors = await rig.acquire(session, ns, keys[:end])
            cold += int(descriptors["source"][-1] == m.TIER_NVME)
            assert reply.count == end
            await rig.release(session, reply)
            await asyncio.sleep(0.01)
        assert cold == waits
        assert rig.manager.copies.counters["onboarded_blocks"] == 10, "a block was read twice"

    run(scenario, window)


def test_the_window_ends_where_the_sequence_does_and_other_sequences_are_left_alone():
    async def scenario(rig, session, ns):
        mine, others = make_keys(4), make_keys(4, start=5)
        await make_cold(rig, session, ns, mine)
        await make_cold(rig, session, ns, others)
        reply, _ = await rig.acquire(session, ns, mine[:3])
        await rig.release(session, reply)
        await asyncio.sleep(0.02)
        assert rig.manager.copies.tier_counts()["host_blocks"] == 4
        assert rig.manager.copies.counters["prefetched_blocks"] == 1

    run(scenario)


def test_a_stale_hint_leads_nowhere():
    async def scenario(rig, session, ns):
        keys = make_keys(4)
        await make_cold(rig, session, ns, keys)
        table = rig.manager.copies.blocks.table
        rows = rig.manager.copies.blocks.find_prefix(keys, 0)
        table.next_row[rows[0]] = rows[0]
        reply, _ = await rig.acquire(session, ns, keys[:1])
        await rig.release(session, reply)
        await rig.call(session, m.Delete(id=1, namespace=ns), keys[1:].tobytes())
        table.next_row[rows[0]] = rows[2]
        reply, _ = await rig.acquire(session, ns, keys[:1])
        await rig.release(session, reply)
        await asyncio.sleep(0.02)
        assert rig.manager.copies.tier_counts()["host_blocks"] == 1

    run(scenario)


def test_a_client_that_goes_away_takes_its_prefetches_along():
    async def scenario(rig, session, ns):
        keys = make_keys(6)
        await make_cold(rig, session, ns, keys)
        gone = rig.session()
        theirs = await rig.register(gone)
        await rig.call(gone, m.Prefetch(id=1, namespace=theirs), keys.tobytes())
        rig.manager.process_gone(gone)
        await asyncio.sleep(0.02)
        assert not rig.manager.copies.host.pool.holds.any()

    run(scenario)
