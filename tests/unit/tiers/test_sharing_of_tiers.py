"""Several models and several clients share tiers, rows and leases: nobody can take what others need."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import MIB
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings
from kvtierd.tiers.leases import SESSION_SHARE
from kvtierd.tiers.slot_tier import IDLE_TICKS

BIG = Geometry(block_size=64, layers=2, kv_heads=4, k_dim=64, v_dim=64)
PER_CHUNK = MIB // SHAPE.slot_bytes


def run(scenario, settings=None, store=None):
    async def body():
        async with Rig(settings=settings, store=store) as rig:
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            rig.check_accounts()

    asyncio.run(body())


@pytest.mark.parametrize("idle", [True, False])
def test_a_hot_model_gets_its_share_of_a_tier_that_a_cold_one_filled(idle):
    async def scenario(rig, session, ns):
        host = rig.manager.copies.host
        await rig.store(session, ns, make_keys(6 * PER_CHUNK))
        space = Namespace(model="big", geometry=BIG)
        hot = await rig.register(session, space)
        for turn in range(40):
            host.ticks += IDLE_TICKS + 1 if idle else 1
            if not idle:
                reply, _ = await rig.acquire(session, ns, make_keys(4))
                if reply.count:
                    await rig.release(session, reply)
            await rig.settled()
            await rig.store(session, hot, make_keys(16, start=turn % 4, namespace=space), BIG)
        slabs = {cls.slot_bytes: len(cls.slabs) for cls in host.pool.classes}
        assert slabs[BIG.slot_bytes] >= (5 if idle else 3), slabs
        assert sum(slabs.values()) + len(host.spare) + len(host.missing) == 6

    run(scenario, settings=small_settings(capacity=6 * MIB))


def test_a_full_block_table_forgets_what_is_on_disk_only_instead_of_refusing_stores():
    settings = msgspec.structs.replace(small_settings(), max_blocks=1024)

    async def scenario(rig, session, ns):
        for start in range(40):
            assert await rig.store(session, ns, make_keys(50, start=start)) == 50
            await rig.call(session, m.Flush(id=1))
        assert rig.manager.copies.counters["table_evicted_blocks"] >= 40 * 50 - 1024
        assert await rig.lookup(session, ns, make_keys(50, start=39)) == 50

    store = MemoryStore()
    run(scenario, settings=settings, store=store)
    assert len(store.blocks) <= 1024, "what the table forgot is on disk for ever"


def test_one_client_cannot_take_all_leases():
    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(2))
        share = rig.settings.leases.max_leases // SESSION_SHARE
        replies = [(await rig.acquire(session, ns, make_keys(2)))[0] for _ in range(share)]
        with pytest.raises(RequestError) as caught:
            await rig.acquire(session, ns, make_keys(2))
        assert caught.value.code == ErrorCode.BUSY
        other = rig.session()
        reply, _ = await rig.acquire(other, await rig.register(other), make_keys(2))
        assert reply.count == 2
        for mine in replies:
            await rig.release(session, mine)
        assert (await rig.acquire(session, ns, make_keys(2)))[0].count == 2

    run(scenario)
