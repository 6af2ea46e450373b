"""What happens to a block when its client fails, freezes or changes its mind at each step."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from kvtierd.core.checksum import block_sum
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol import messages as m
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
