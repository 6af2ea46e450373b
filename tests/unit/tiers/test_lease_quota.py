"""One tenant, however many clients it opens, holds no more than its share of the host tier."""

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
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings

CAPACITY = 6 * MIB
SLOT = SHAPE.slot_bytes
ROOM = int(CAPACITY * 0.25) // SLOT


def settings_for(share: float, *tenants: str):
    settings = small_settings(capacity=CAPACITY, watermark=1.0)
    leases = msgspec.structs.replace(settings.leases, tenant_share=share, ttl_ms=600_000)
    return msgspec.structs.replace(settings, leases=leases, tenants=dict.fromkeys(tenants, Tenant()))


def run(scenario, settings):
    async def body():
        async with Rig(settings=settings) as rig:
            await scenario(rig)
            rig.check_accounts()

    asyncio.run(body())


async def client(rig, tenant, space=None):
    session = rig.session(tenant=tenant)
    return session, await rig.register(session, space)


def held_slots(rig, tenant):
    """What is held, counted anew."""
    pool = rig.manager.copies.host.pool
    numbers = np.flatnonzero(pool.holds[: pool.slots_max] > 0).astype(np.int32)
    return sum(pool.class_of(slot).slot_bytes for slot in numbers.tolist() if pool.class_of(slot).tenant == tenant)


def test_reservations_of_many_clients_of_a_tenant_stop_at_its_share_and_another_stores_on():
    async def scenario(rig):
        leased = rig.manager.copies.host.leased
        for number in range(ROOM // 20 + 1):
            await rig.reserve(*await client(rig, "a"), make_keys(20, start=number))
        another = await client(rig, "a")
        with pytest.raises(RequestError) as caught:
            await rig.reserve(*another, make_keys(20, start=99))
        assert caught.value.code == ErrorCode.BUSY
        assert "leases.tenant_share" in str(caught.value)
        assert caught.value.retry_after_ms > 0
        assert leased.held_bytes("a") == held_slots(rig, "a") == ROOM * SLOT
        assert leased.refused["a"] > 0
        b, at_b = await client(rig, "b")
        for number in range(4):
            assert await rig.store(b, at_b, make_keys(20, start=number)) == 20
        assert leased.held_bytes("b") == 0, "what is committed is held no more"

    run(scenario, settings_for(0.25, "a", "b"))


def test_a_store_that_fits_in_part_gets_its_leading_blocks():
    async def scenario(rig):
        a, space = await client(rig, "a")
        await rig.store(a, space, make_keys(3))
        keys = make_keys(ROOM + 20)
        grant = await rig.reserve(a, space, keys)
        status = grant.descriptors["status"]
        assert (status[:3] == m.SLOT_EXISTS).all()
        assert (status[3 : 3 + ROOM] == m.SLOT_GRANTED).all()
        assert (status[3 + ROOM :] == m.SLOT_BUSY).all()
        assert status.size == len(keys)
        sums = rig.fill(grant, keys)
        assert (await rig.commit(a, grant, sums)).committed == ROOM
        assert await rig.lookup(a, space, keys) == ROOM + 3
        assert rig.manager.copies.host.leased.held_bytes("a") == 0

    run(scenario, settings_for(0.25, "a", "b"))


def test_leases_stop_at_the_share_and_what_the_tenant_holds_already_costs_nothing():
    async def scenario(rig):
        leased = rig.manager.copies.host.leased
        a, space = await client(rig, "a")
        for begin in range(0, ROOM + 10, 10):
            await rig.store(a, space, make_keys(ROOM + 10)[: begin + 10])
        first, _ = await rig.acquire(a, space, make_keys(ROOM + 10))
        assert first.count == ROOM, "the leading ones"
        again, at_again = await client(rig, "a")
        second, _ = await rig.acquire(again, at_again, make_keys(ROOM + 10))
        assert second.count == ROOM, "other clients read the same slots"
        assert leased.held_bytes("a") == held_slots(rig, "a") == ROOM * SLOT
        await rig.release(a, first)
        assert leased.held_bytes("a") == ROOM * SLOT, "the other client has them"
        rig.manager.session_detached(again)
        assert leased.held_bytes("a") == held_slots(rig, "a") == 0

    run(scenario, settings_for(0.25, "a", "b"))


def test_a_lease_without_room_is_busy_and_names_the_limit():
    async def scenario(rig):
        a, space = await client(rig, "a")
        keys = [make_keys(ROOM // 2, start=number) for number in range(3)]
        for some in keys:
            await rig.store(a, space, some)
        for some in keys[:2]:
            assert (await rig.acquire(a, space, some))[0].count == some.shape[0]
        rest = ROOM - 2 * (ROOM // 2)
        for _ in range(rest):
            assert (await rig.acquire(a, space, keys[2]))[0].count == rest
        if not rest:
            with pytest.raises(RequestError, match=r"leases\.tenant_share") as caught:
                await rig.acquire(a, space, keys[2])
            assert caught.value.code == ErrorCode.BUSY
        b, at_b = await client(rig, "b")
        await rig.store(b, at_b, keys[2])
        assert (await rig.acquire(b, at_b, keys[2]))[0].count == keys[2].shape[0]

    run(scenario, settings_for(0.25, "a", "b"))


@pytest.mark.parametrize("quick", [True, False])
def test_both_ways_stop_at_the_same_block_and_count_the_same(quick):
    async def scenario(rig):
        if not quick:
            rig.manager.quick.turn_off()
        a, space = await client(rig, "a")
        await rig.store(a, space, make_keys(ROOM))
        await rig.store(a, space, make_keys(ROOM + 5))
        lease, _ = await rig.acquire(a, space, make_keys(ROOM + 5))
        assert lease.count == ROOM
        with pytest.raises(RequestError, match=r"leases\.tenant_share"):
            await rig.reserve(a, space, make_keys(3, start=4))
        await rig.release(a, lease)
        assert (await rig.reserve(a, space, make_keys(3, start=4))).id
        assert rig.manager.copies.host.leased.held_bytes("a") == held_slots(rig, "a") == 3 * SLOT

    run(scenario, settings_for(0.25, "a", "b"))


def test_a_key_named_twice_is_counted_once():
    async def scenario(rig):
        a, space = await client(rig, "a")
        await rig.store(a, space, make_keys(4))
        one = make_keys(1)
        lease, _ = await rig.acquire(a, space, np.concatenate([one, one, one]))
        other, _ = await rig.acquire(a, space, one)
        assert rig.manager.copies.host.leased.held_bytes("a") == SLOT
        await rig.release(a, lease)
        assert rig.manager.copies.host.leased.held_bytes("a") == SLOT
        await rig.release(a, other)
        assert rig.manager.copies.host.leased.held_bytes("a") == 0

    run(scenario, settings_for(0.25, "a", "b"))


def test_sequences_keep_no_more_than_the_share():
    space = Namespace(model="computed", geometry=Geometry(block_size=16, layers=3, kv_heads=2, k_dim=32, v_dim=32))

    async def scenario(rig):
        a, number = await client(rig, "a", space)
        keys = make_keys(ROOM + 10, namespace=space)
        for end in (ROOM // 2, ROOM + 10):
            await rig.store(a, number, keys[:end], space.geometry)
        reply = (await rig.call(a, m.OpenSequence(id=1, namespace=number), keys.tobytes())).reply
        assert reply.blocks == ROOM + 10
        leased, room = rig.manager.copies.host.leased, int(CAPACITY * 0.25) // space.geometry.slot_bytes
        assert reply.kept == min(room, ROOM + 10)
        assert leased.held_bytes("a") == reply.kept * space.geometry.slot_bytes
        await rig.call(a, m.CloseSequence(id=1, sequences=[reply.sequence]))
        assert leased.held_bytes("a") == held_slots(rig, "a") == 0

    run(scenario, settings_for(0.25, "a", "b"))


def test_numbers_of_leases_are_shared_too():
    async def scenario(rig):
        limit = rig.settings.leases.max_leases // 4
        sessions = [await client(rig, "a") for _ in range(3)]
        await rig.store(*sessions[0], make_keys(1))
        taken = [await rig.acquire(*sessions[number % 3], make_keys(1)) for number in range(limit)]
        assert len(taken) == limit
        with pytest.raises(RequestError, match=f"{limit} a tenant") as caught:
            await rig.acquire(*sessions[1], make_keys(1))
        assert caught.value.code == ErrorCode.BUSY
        b, at_b = await client(rig, "b")
        await rig.store(b, at_b, make_keys(1))
        assert (await rig.acquire(b, at_b, make_keys(1)))[0].count == 1

    run(scenario, settings_for(0.25, "a", "b"))


def test_a_reload_takes_over_another_share():
    async def scenario(rig):
        a, space = await client(rig, "a")
        keys = make_keys(ROOM)
        await rig.store(a, space, keys)
        rig.manager.apply(settings_for(0.01, "a", "b"))
        few = int(CAPACITY * 0.01) // SLOT
        lease, _ = await rig.acquire(a, space, keys)
        assert lease.count == few
        rig.manager.apply(settings_for(1.0, "a", "b"))
        assert (await rig.acquire(a, space, keys))[0].count == ROOM

    run(scenario, settings_for(0.25, "a", "b"))


def test_a_tenant_that_is_alone_may_hold_all_of_it():
    async def scenario(rig):
        session, space = await client(rig, "default")
        assert rig.manager.copies.host.leased is None
        grant = await rig.reserve(session, space, make_keys(CAPACITY // MIB * (MIB // SLOT)))
        assert (grant.descriptors["status"] == m.SLOT_GRANTED).all()

    run(scenario, settings_for(0.25))
