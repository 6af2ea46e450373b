"""Quotas of tenants: what one may have, what it does to itself at its limit, and that others are not touched."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from kvtierd.config.schema import Tenant
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import MIB
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings

PER_CHUNK = MIB // SHAPE.slot_bytes
BIG = Geometry(block_size=64, layers=2, kv_heads=4, k_dim=64, v_dim=64)


def settings_for(*, capacity=6 * MIB, max_blocks=4096, **tenants):
    return msgspec.structs.replace(small_settings(capacity=capacity), max_blocks=max_blocks, tenants=tenants)


def run(scenario, settings, store=None):
    async def body():
        async with Rig(settings=settings, store=store) as rig:
            await scenario(rig)
            await rig.settled()
            rig.check_accounts()
            check_disk(rig)

    asyncio.run(body())


def check_disk(rig):
    """What the quota of the disk has counted is what is there."""
    quota = rig.manager.copies.blocks.disk_quota
    if quota is None:
        return
    table, spaces = rig.manager.copies.blocks.table, rig.manager.copies.namespaces
    there = np.flatnonzero(table.flags[: table.used_rows] & m.TIER_NVME)
    found: dict[str, int] = {}
    for number in table.namespace[there].tolist():
        entry = spaces[number]
        found[entry.tenant] = found.get(entry.tenant, 0) + entry.geometry.slot_bytes
    for tenant in {entry.tenant for entry in spaces.entries}:
        assert quota.used_bytes(tenant) == found.get(tenant, 0), tenant


async def member(rig, tenant, space=None):
    session = rig.session(tenant=tenant)
    return session, await rig.register(session, space)


def slabs(rig, tenant, tier="host"):
    return sum(len(cls.slabs) for cls in getattr(rig.manager.copies, tier).pool.classes if cls.tenant == tenant)


def test_tenant_at_its_quota_evicts_its_own_and_leaves_the_others_alone():
    async def scenario(rig):
        a, at_a = await member(rig, "a")
        b, at_b = await member(rig, "b")
        kept = make_keys(2 * PER_CHUNK)
        await rig.store(b, at_b, kept)
        for start in range(1, 12):
            assert await rig.store(a, at_a, make_keys(PER_CHUNK, start=start)) == PER_CHUNK, "it gets room of its own"
            await rig.settled()
            rig.manager.tick()
        assert slabs(rig, "a") == 2
        assert await rig.lookup(b, at_b, kept) == kept.shape[0]
        assert await rig.lookup(a, at_a, make_keys(PER_CHUNK, start=11)) == PER_CHUNK

    run(scenario, settings_for(a=Tenant(host_bytes=2 * MIB), b=Tenant()))


def test_quota_holds_over_models_whose_chunks_the_tenant_moves_among_them():
    async def scenario(rig):
        a, small = await member(rig, "a")
        space = Namespace(model="big", geometry=BIG)
        big = await rig.register(a, space)
        for turn in range(1, 30):
            await rig.store(a, small, make_keys(PER_CHUNK, start=turn))
            await rig.settled()
            await rig.store(a, big, make_keys(8, start=turn, namespace=space), BIG)
            await rig.settled()
            rig.manager.tick()
            assert slabs(rig, "a") <= 2
        keys = make_keys(4, start=77, namespace=space)
        assert await rig.store(a, big, keys, BIG) == 4
        assert await rig.lookup(a, big, keys) == 4

    run(scenario, settings_for(a=Tenant(host_bytes=2 * MIB)))


def test_lowered_quota_takes_what_is_over_it():
    settings = settings_for(a=Tenant(host_bytes=4 * MIB))

    async def scenario(rig):
        a, at_a = await member(rig, "a")
        for start in range(1, 5):
            await rig.store(a, at_a, make_keys(PER_CHUNK, start=start))
        assert slabs(rig, "a") == 4
        rig.manager.apply(msgspec.structs.replace(settings, tenants={"a": Tenant(host_bytes=MIB)}))
        for _ in range(5):
            rig.manager.tick()
            await rig.settled()
        assert slabs(rig, "a") == 1
        rig.manager.apply(msgspec.structs.replace(settings, tenants={"a": Tenant()}))
        for start in range(1, 5):
            await rig.store(a, at_a, make_keys(PER_CHUNK, start=start))
        assert slabs(rig, "a") == 4, "and 0 is no quota"

    run(scenario, settings)


def test_gpu_quota_bounds_its_slabs():
    settings = settings_for(a=Tenant(gpu_bytes=MIB))
    settings = msgspec.structs.replace(settings, gpu=msgspec.structs.replace(settings.gpu, capacity=3 * MIB))

    async def scenario(rig):
        a, at_a = await member(rig, "a")
        b, at_b = await member(rig, "b")
        for session, space in ((a, at_a), (b, at_b)):
            for start in (1, 2):
                keys = make_keys(PER_CHUNK, start=start)
                await rig.store(session, space, keys)
                request = m.Prefetch(id=1, namespace=space, tier="gpu", wait=True)
                await rig.call(session, request, keys.tobytes())
        assert (slabs(rig, "a", "gpu"), slabs(rig, "b", "gpu")) == (1, 2)

    run(scenario, settings)


def test_at_its_disk_quota_new_blocks_wait_in_host_and_the_oldest_make_room():
    limit = 40 * SHAPE.slot_bytes

    async def scenario(rig):
        a, at_a = await member(rig, "a")
        b, at_b = await member(rig, "b")
        others = make_keys(30)
        await rig.store(b, at_b, others)
        for start in range(1, 9):
            rig.clock.advance(10)
            keys = make_keys(10, start=start)
            await rig.store(a, at_a, keys)
            await rig.call(a, m.Flush(id=1))
            assert rig.manager.copies.blocks.disk_quota.used_bytes("a") <= limit
            await rig.call(a, m.Purge(id=1, namespace=at_a, tiers=["host"]))
            for _ in range(8):
                rig.manager.tick()
        counters = rig.manager.copies.counters
        assert counters["quota_dropped_blocks"] > 0
        assert await rig.lookup(a, at_a, make_keys(10, start=1)) == 0, "the oldest are gone"
        assert await rig.lookup(a, at_a, make_keys(10, start=8)) == 10
        assert await rig.lookup(b, at_b, others) == 30

    run(scenario, settings_for(a=Tenant(nvme_bytes=limit), b=Tenant()), MemoryStore())


def test_what_an_earlier_life_left_on_disk_counts():
    store = MemoryStore()

    async def fill(rig):
        a, at_a = await member(rig, "a")
        await rig.store(a, at_a, make_keys(20))
        await rig.call(a, m.Flush(id=1))

    run(fill, settings_for(a=Tenant()), store)

    async def scenario(rig):
        assert rig.manager.copies.blocks.disk_quota.used_bytes("a") == 20 * SHAPE.slot_bytes
        for _ in range(4):
            rig.manager.tick()
        assert rig.manager.copies.blocks.disk_quota.used_bytes("a") <= 10 * SHAPE.slot_bytes
        a, at_a = await member(rig, "a")
        assert await rig.store(a, at_a, make_keys(5, start=3)) == 5, "it may still use host"

    run(scenario, settings_for(a=Tenant(nvme_bytes=10 * SHAPE.slot_bytes)), MemoryStore(store))


def test_reads_from_disk_go_as_far_as_the_quota_of_moves_and_others_read_on():
    async def scenario(rig):
        for tenant in ("a", "b"):
            session, space = await member(rig, tenant)
            await rig.store(session, space, make_keys(10))
            await rig.call(session, m.Flush(id=1))
            await rig.call(session, m.Purge(id=1, namespace=space, tiers=["host"]))
        a, at_a = await member(rig, "a")
        b, at_b = await member(rig, "b")
        first, whole = await asyncio.gather(rig.acquire(a, at_a, make_keys(10)), rig.acquire(b, at_b, make_keys(10)))
        assert (first[0].count, whole[0].count) == (4, 10)
        again, _ = await rig.acquire(a, at_a, make_keys(10))
        assert again.count == 8, "what is there by now is no move"

    run(scenario, settings_for(a=Tenant(nvme_inflight=4), b=Tenant()), MemoryStore())


def test_no_tenant_can_use_up_the_numbers_of_namespaces():
    async def scenario(rig):
        rig.manager.copies.namespaces.tenant_max = 2
        a = rig.session(tenant="a")
        for number in range(2):
            await rig.register(a, Namespace(model=f"m{number}", geometry=SHAPE))
        with pytest.raises(RequestError) as caught:
            await rig.register(a, Namespace(model="m3", geometry=SHAPE))
        assert caught.value.code == ErrorCode.BUSY
        await member(rig, "b")

    run(scenario, settings_for(a=Tenant(), b=Tenant()))


@pytest.mark.parametrize(
    ("tenant", "salt", "limit"), [("default", "\0x", "zero byte"), ("a", "s" * 1020, "limit for this tenant")]
)
def test_salt_that_the_store_could_not_tell_from_its_own_mark_is_refused(tenant, salt, limit):
    async def scenario(rig):
        session = rig.session(tenant=tenant)
        with pytest.raises(RequestError, match=limit) as caught:
            await rig.register(session, Namespace(model="m", geometry=SHAPE, tenant_salt=salt))
        assert caught.value.code == ErrorCode.BAD_ARGUMENT

    run(scenario, settings_for(a=Tenant()))
