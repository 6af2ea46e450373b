"""What happens to a block when a client, a disk or memory fails at each step of its life."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from kvtierd.core.checksum import block_sum
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, pattern, reply_of

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


@pytest.mark.parametrize("step", ["reserve", "write", "part-commit", "abort"])
def test_case_02_a_store_that_failed_at_any_step_is_a_miss(step):
    async def scenario(rig, session, ns):
        keys = make_keys(4)
        grant = await rig.reserve(session, ns, keys)
        if step != "reserve":
            sums = rig.fill(grant, keys)
        if step == "part-commit":
            await rig.commit(session, grant, sums[1:], index=[1, 2, 3])
        if step == "abort":
            await rig.call(session, m.Abort(id=1, reservation=grant.id))
        rig.manager.process_gone(session)
        reader = rig.session()
        assert await rig.lookup(reader, await rig.register(reader), keys) == 0
        assert rig.manager.stats()["reservations"] == 0

    run(scenario)


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


def test_acquire_with_verify_serves_nothing_that_rotted():
    async def scenario(rig, session, ns):
        keys = make_keys(5)
        grant = await rig.reserve(session, ns, keys)
        await rig.commit(session, grant, rig.fill(grant, keys))
        rig.slot(grant.descriptors[2])[0] ^= 0x80
        reply, _ = await rig.acquire(session, ns, keys, verify=True)
        assert reply.count == 2
        await rig.release(session, reply)
        assert await rig.lookup(session, ns, keys) == 2

    run(scenario)


def test_a_commit_with_verify_refuses_bytes_that_do_not_match_and_changes_nothing():
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        grant = await rig.reserve(session, ns, keys)
        sums = rig.fill(grant, keys)
        rig.slot(grant.descriptors[1])[0] ^= 1
        totals = np.array([block_sum(row) for row in sums], np.uint64)
        request = m.Commit(id=1, reservation=grant.id, verify=True)
        text = await refused(ErrorCode.CHECKSUM_MISMATCH, rig, session, request, sums.tobytes(), totals.tobytes())
        assert "block 1" in text
        assert await rig.lookup(session, ns, keys) == 0
        rig.slot(grant.descriptors[1])[0] ^= 1
        assert (await rig.commit(session, grant, sums, verify=True)).committed == 3

    run(scenario)


def test_case_05_an_expired_lease_frees_the_slot_and_the_generation_tells_the_late_reader():
    async def scenario(rig, session, ns):
        keys = make_keys(2 * PER_CHUNK)
        await rig.store(session, ns, keys)
        reply, descriptors = await rig.acquire(session, ns, keys, ttl_ms=500)
        other = rig.session()
        theirs = await rig.register(other)
        assert await rig.store(other, theirs, make_keys(4, start=5)) == 0
        await tick(rig, 1)
        assert await rig.store(other, theirs, make_keys(4, start=5)) == 4
        changed = [rig.generation(d) != int(d["generation"]) for d in descriptors]
        assert sum(changed) >= 4
        await refused(ErrorCode.NOT_YOURS, rig, session, m.Release(id=1, leases=[reply.lease]))

    run(scenario)


def test_case_15_what_a_dead_client_held_is_free_at_once():
    async def scenario(rig, session, ns):
        total = 2 * PER_CHUNK
        await rig.store(session, ns, make_keys(total - 10))
        dead = rig.session()
        theirs = await rig.register(dead)
        reply, _ = await rig.acquire(dead, theirs, make_keys(total - 10))
        grant = await rig.reserve(dead, theirs, make_keys(10, start=3))
        assert reply.count == total - 10
        assert grant.id
        rig.manager.process_gone(dead)
        stats = rig.manager.stats()
        assert (stats["leases"], stats["reservations"]) == (0, 0)
        assert await rig.store(session, ns, make_keys(total // 2, start=4)) == total // 2

    run(scenario)


def test_case_05_a_frozen_writer_cannot_write_into_a_slot_that_changed_hands():
    async def scenario(rig, session, ns):
        total = 2 * PER_CHUNK
        frozen = rig.session()
        theirs = await rig.register(frozen)
        keys = make_keys(4, start=7)
        grant = await rig.reserve(frozen, theirs, keys)
        rig.manager.session_detached(frozen)
        await tick(rig, 3600)
        # Its keys are free for others, its slots are not.
        assert await rig.store(session, ns, keys) == 4
        for start in range(10, 16):
            await rig.store(session, ns, make_keys(total // 2, start=start))
        places = {(int(d["chunk"]), int(d["offset"])) for d in grant.descriptors}
        for start in itertools.chain([7], range(10, 16)):
            reply, descriptors = await rig.acquire(session, ns, make_keys(total // 2 if start > 9 else 4, start=start))
            assert places.isdisjoint({(int(d["chunk"]), int(d["offset"])) for d in descriptors})
            if reply.count:
                await rig.release(session, reply)
        # It wakes up, writes, and commits: nothing of others is touched, its blocks exist already or appear now.
        await rig.commit(frozen, grant, rig.fill(grant, keys))
        reply, descriptors = await rig.acquire(session, ns, keys)
        for key, descriptor in zip(keys[: reply.count], descriptors, strict=True):
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        if reply.count:
            await rig.release(session, reply)

    run(scenario)


def test_a_late_commit_of_a_quarantined_reservation_still_counts():
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        grant = await rig.reserve(session, ns, keys)
        await tick(rig, 5)
        assert rig.manager.stats()["quarantined_reservations"] == 1
        assert (await rig.commit(session, grant, rig.fill(grant, keys))).committed == 3
        assert await rig.lookup(session, ns, keys) == 3
        assert rig.manager.stats()["reservations"] == 0

    run(scenario)


def test_case_05_a_block_deleted_in_use_stays_whole_until_its_reader_ends():
    async def scenario(rig, session, ns):
        keys = make_keys(6)
        await rig.store(session, ns, keys)
        reply, descriptors = await rig.acquire(session, ns, keys)
        await rig.call(session, m.Delete(id=1, namespace=ns), keys.tobytes())
        assert await rig.lookup(session, ns, keys) == 0
        for start in range(1, 8):
            await rig.store(session, ns, make_keys(PER_CHUNK, start=start))
        for key, descriptor in zip(keys, descriptors, strict=True):
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        await rig.release(session, reply)

    run(scenario)


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
        assert rig.manager.copies.counters["offload_dropped_blocks"] > 0
        assert rig.manager.stats()["write_queue_bytes"] <= rig.settings.nvme.write_queue_bytes
        reply, _ = await rig.acquire(session, ns, make_keys(10, start=11))
        assert reply.count == 10
        await rig.release(session, reply)
        store.stall.set()

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


def test_case_06_case_07_every_field_of_a_namespace_separates_blocks():
    changes = [
        {"model": "other"}, {"revision": "r2"}, {"tenant_salt": "s"}, {"lora": "a"}, {"lora_version": "2"},
        {"rope_digest": "x"}, {"quantisation": "awq"}, {"tp_rank": 1, "tp_size": 2}, {"tp_size": 2},
        {"pp_rank": 1, "pp_size": 2}, {"group": 1}, {"geometry": Geometry(**{**shape_fields(), "dtype": "fp16"})},
        {"geometry": Geometry(**{**shape_fields(), "layout": "hnd"})},
    ]  # fmt: skip

    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(3))
        for change in changes:
            other = Namespace(**{"model": "test", "geometry": SHAPE, **change})
            number = await rig.register(session, other)
            assert await rig.lookup(session, number, make_keys(3)) == 0, change

    run(scenario)


def shape_fields():
    return {name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__}


def test_case_09_another_tenants_block_is_a_miss_in_every_operation():
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        await rig.store(session, ns, keys)
        stranger = rig.session(tenant="other")
        theirs = await rig.register(stranger)
        assert await rig.lookup(stranger, theirs, keys) == 0
        reply, _ = await rig.acquire(stranger, theirs, keys)
        assert reply.count == 0
        deleted = await rig.call(stranger, m.Delete(id=1, namespace=theirs), keys.tobytes())
        assert reply_of(deleted, m.CountReply).count == 0
        await rig.call(stranger, m.Purge(id=1))
        assert await rig.lookup(session, ns, keys) == 3
        grant = await rig.reserve(session, ns, make_keys(1, start=2))
        assert rig.manager.chunk_files(stranger, int(grant.descriptors[0]["chunk"])) is None
        assert rig.manager.chunk_files(session, int(grant.descriptors[0]["chunk"])) is not None

    run(scenario)


def test_bad_input_is_refused_by_name_and_changes_nothing():
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        grant = await rig.reserve(session, ns, keys)
        sums = rig.fill(grant, keys)
        totals = np.array([block_sum(row) for row in sums], np.uint64)
        commit = m.Commit(id=1, reservation=grant.id)
        bad = ErrorCode.BAD_ARGUMENT
        assert "31 bytes" in await refused(bad, rig, session, m.Lookup(id=1, namespaces=[ns]), bytes(31))
        big = bytes(32 * (m.MAX_BATCH + 1))
        await refused(ErrorCode.BATCH_TOO_LARGE, rig, session, m.Lookup(id=1, namespaces=[ns]), big)
        await refused(ErrorCode.BAD_FRAMES, rig, session, m.Lookup(id=1, namespaces=[ns]))
        await refused(ErrorCode.UNKNOWN_NAMESPACE, rig, session, m.Lookup(id=1, namespaces=[99]), bytes(32))
        await refused(bad, rig, session, commit, sums.tobytes()[:-8], totals.tobytes())
        wrong = totals.copy()
        wrong[2] ^= np.uint64(1)
        text = await refused(ErrorCode.CHECKSUM_MISMATCH, rig, session, commit, sums.tobytes(), wrong.tobytes())
        assert "block 2" in text
        elsewhere = m.Commit(id=1, reservation=grant.id, index=[0, 7])
        assert "block 7" in await refused(bad, rig, session, elsewhere, sums[:2].tobytes(), totals[:2].tobytes())
        twice = m.Commit(id=1, reservation=grant.id, index=[1, 1])
        await refused(bad, rig, session, twice, sums[:2].tobytes(), totals[:2].tobytes())
        thief = rig.session()
        await refused(ErrorCode.NOT_YOURS, rig, thief, commit, sums.tobytes(), totals.tobytes())
        await refused(ErrorCode.NOT_YOURS, rig, thief, m.Abort(id=1, reservation=grant.id))
        await refused(ErrorCode.NOT_YOURS, rig, thief, m.Release(id=1, leases=[1]))
        off = m.RegisterNamespace(id=1, namespace=Namespace(model="x", geometry=SHAPE), block_bytes=5)
        assert "not 5" in await refused(ErrorCode.GEOMETRY_MISMATCH, rig, session, off)
        huge = Geometry(block_size=4096, layers=8, kv_heads=8, k_dim=128, v_dim=128)
        too_large = m.RegisterNamespace(id=1, namespace=Namespace(model="x", geometry=huge))
        await refused(ErrorCode.TOO_LARGE, rig, session, too_large)
        framed = [keys.tobytes(), totals.tobytes(), b"x", b"y", b"z"]
        await refused(ErrorCode.GEOMETRY_MISMATCH, rig, session, m.Put(id=1, namespace=ns), *framed)
        assert await rig.lookup(session, ns, keys) == 0
        assert (await rig.commit(session, grant, sums)).committed == 3
        await refused(ErrorCode.NOT_YOURS, rig, session, commit, sums.tobytes(), totals.tobytes())

    run(scenario)


def test_put_with_a_wrong_sum_stores_none_of_its_blocks():
    async def scenario(rig, session, ns):
        keys = make_keys(2)
        blocks = [pattern(key, SHAPE).tobytes() for key in keys]
        request = m.Put(id=1, namespace=ns)
        await refused(ErrorCode.CHECKSUM_MISMATCH, rig, session, request, keys.tobytes(), bytes(16), *blocks)
        assert await rig.lookup(session, ns, keys) == 0
        assert not rig.manager.copies.host.pool.holds.any()

    run(scenario)
