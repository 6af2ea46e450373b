"""What happens to a block when the disk, or memory, fails at each step of its life."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, pattern

PER_CHUNK = (1 << 20) // SHAPE.slot_bytes


def run(scenario, **options):
    async def body():
        async with Rig(**options) as rig:
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            rig.check_accounts()

    asyncio.run(body())


async def refused(code, rig, session, request, *frames):
    with pytest.raises(RequestError) as caught:
        await rig.call(session, request, *frames)
    assert caught.value.code == code, caught.value
    return str(caught.value)


async def tick(rig, seconds):
    rig.clock.advance(seconds)
    await asyncio.sleep(0.12)


def test_case_02_a_failed_write_to_nvme_leaves_no_claim_there():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        store.fail_writes = 2
        await rig.store(session, ns, make_keys(4))
        await rig.call(session, m.Flush(id=1))
        assert rig.manager.copies.counters["offload_failed_blocks"] == 2
        assert rig.manager.copies.tier_counts()["nvme_blocks"] == 2
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        assert await rig.lookup(session, ns, make_keys(4)) == 4

    run(scenario, store=store)


def test_a_failed_flush_is_not_acknowledged():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(1))
        store.fail_flushes = 1
        await refused(ErrorCode.UNAVAILABLE, rig, session, m.Flush(id=1))
        await rig.call(session, m.Flush(id=1))

    run(scenario, store=store)


def test_case_03_a_corrupt_block_on_disk_is_a_miss_and_the_run_ends_before_it():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(6)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        store.corrupt(rig.manager.copies.namespaces[0].digest, keys[3].tobytes())
        reply, _ = await rig.acquire(session, ns, keys)
        assert reply.count == 3
        await rig.release(session, reply)
        assert await rig.lookup(session, ns, keys) == 3

    run(scenario, store=store)


def test_a_failed_read_is_a_miss_now_and_a_hit_later():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(3)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        store.fail_reads = 1
        reply, _ = await rig.acquire(session, ns, keys)
        assert reply.count == 0
        await asyncio.sleep(0.01)
        assert not rig.manager.copies.host.pool.holds.any()
        reply, _ = await rig.acquire(session, ns, keys)
        assert reply.count == 3
        await rig.release(session, reply)

    run(scenario, store=store)


def test_a_block_that_rots_in_host_is_caught_before_it_reaches_the_disk():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        store.stall.clear()
        keys = make_keys(3)
        grant = await rig.reserve(session, ns, keys)
        sums = rig.fill(grant, keys)
        await rig.commit(session, grant, sums)
        rig.slot(grant.descriptors[1])[7] ^= 1
        store.stall.set()
        await rig.call(session, m.Flush(id=1))
        assert await rig.lookup(session, ns, keys) == 1
        assert rig.manager.copies.counters["host_corrupt_blocks"] == 1

    run(scenario, store=store)


def test_a_block_deleted_on_its_way_from_disk_is_a_miss():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(4)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        reading = asyncio.create_task(rig.acquire(session, ns, keys))
        await asyncio.sleep(0)
        await rig.call(session, m.Delete(id=1, namespace=ns), keys[1].tobytes())
        reply, _ = await reading
        assert reply.count <= 1
        if reply.count:
            await rig.release(session, reply)
        assert await rig.lookup(session, ns, keys) == 1

    run(scenario, store=store)


def test_a_block_deleted_while_it_is_written_does_not_come_back():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        store.stall.clear()
        await rig.store(session, ns, make_keys(3))
        await asyncio.sleep(0.01)
        await rig.call(session, m.Delete(id=1, namespace=ns), make_keys(3).tobytes())
        store.stall.set()
        await rig.call(session, m.Flush(id=1))
        assert not store.blocks

    run(scenario, store=store)


def test_a_cancelled_acquire_leaves_nothing_held():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(8)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        reading = asyncio.create_task(rig.acquire(session, ns, keys, verify=True))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.sleep(0.05)
        assert not rig.manager.copies.host.pool.holds.any()
        assert rig.manager.stats()["leases"] == 0

    run(scenario, store=store)


def test_many_readers_of_a_block_on_disk_share_one_read():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(8)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        before = rig.manager.copies.counters["onboarded_bytes"]
        replies = await asyncio.gather(*(rig.acquire(session, ns, keys) for _ in range(6)))
        assert [reply.count for reply, _ in replies] == [8] * 6
        assert rig.manager.copies.counters["onboarded_bytes"] - before == 8 * SHAPE.slot_bytes
        for reply, _ in replies:
            await rig.release(session, reply)

    run(scenario, store=store)


def test_case_22_a_disk_that_stands_still_costs_copies_on_disk_and_nothing_else():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        store.stall.clear()
        for start in range(12):
            assert await rig.store(session, ns, make_keys(10, start=start)) == 10
        assert rig.manager.copies.counters["offload_deferred_blocks"] > 0
        assert rig.manager.stats()["write_queue_bytes"] <= rig.settings.nvme.write_queue_bytes
        reply, _ = await rig.acquire(session, ns, make_keys(10, start=11))
        assert reply.count == 10
        await rig.release(session, reply)
        store.stall.set()
        # What was deferred reaches the disk when it can, if it is still there.
        await rig.call(session, m.Flush(id=1))
        assert len(store.blocks) == 120

    run(scenario, store=store)


def test_deferred_blocks_that_were_evicted_meanwhile_are_counted_as_dropped():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        store.stall.clear()
        for start in range(30):
            await rig.store(session, ns, make_keys(10, start=start))
        store.stall.set()
        await rig.call(session, m.Flush(id=1))
        counters = rig.manager.copies.counters
        assert counters["offload_dropped_blocks"] > 0
        assert counters["offload_dropped_blocks"] + len(store.blocks) == 300

    run(scenario, store=store)


def test_an_extent_that_the_store_recycles_is_no_copy_any_more():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(4)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        digest = rig.manager.copies.namespaces[0].digest
        store.reclaim(digest, keys[3].tobytes())
        assert await rig.lookup(session, ns, keys) == 4
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        assert await rig.lookup(session, ns, keys) == 4
        store.reclaim(digest, keys[2].tobytes())
        assert await rig.lookup(session, ns, keys) == 2

    run(scenario, store=store)


def test_a_gpu_copy_that_goes_while_it_is_wanted_is_still_read_or_a_miss():
    async def scenario(rig, session, ns):
        keys = make_keys(6)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Prefetch(id=1, namespace=ns, tier="gpu", wait=True), keys.tobytes())
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        reading = asyncio.create_task(rig.acquire(session, ns, keys))
        await asyncio.sleep(0)
        copies = rig.manager.copies
        copies.drop_gpu(copies.gpu_class(copies.namespaces[0]), copies.blocks.find(keys, 0))
        reply, descriptors = await reading
        assert reply.count == 6
        for key, descriptor in zip(keys, descriptors, strict=True):
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        await rig.release(session, reply)

    run(scenario, store=MemoryStore())
