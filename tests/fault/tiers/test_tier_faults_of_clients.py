"""What happens to a block when its client fails, freezes or changes its mind at each step."""

from __future__ import annotations

import asyncio
import itertools
import threading

import numpy as np
import pytest

from kvtierd.core.checksum import block_sum, fill_and_sum
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, pattern
from kvtierd.tiers import namespaces, writes

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


def hold_up(monkeypatch, target, name):
    """Have a worker's job wait: (event that it has begun, event that lets it go on)."""
    begun, go_on = threading.Event(), threading.Event()
    work = getattr(target, name)

    def late(*arguments):
        begun.set()
        go_on.wait(10)
        return work(*arguments)

    monkeypatch.setattr(target, name, late)
    return begun, go_on


async def until(event):
    while not event.is_set():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("index", [None, [0]])
def test_case_15_a_client_that_dies_while_its_commit_is_verified_leaves_nothing_reserved(monkeypatch, index):
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        grant = await rig.reserve(session, ns, keys)
        sums = rig.fill(grant, keys)
        begun, go_on = hold_up(monkeypatch, writes, "whole_blocks")
        commit = asyncio.create_task(rig.commit(session, grant, sums[: len(index or keys)], verify=True, index=index))
        await until(begun)
        if index is None:
            commit.cancel()  # as the server does when a session ends
        rig.manager.session_detached(session)
        rig.manager.process_gone(session)
        go_on.set()
        await asyncio.gather(commit, return_exceptions=True)
        assert rig.manager.stats()["reservations"] == 0

    run(scenario)


def test_case_05_a_put_that_is_cancelled_twice_keeps_its_slots_until_its_thread_has_ended(monkeypatch):
    async def scenario(rig, session, ns):
        keys, others = make_keys(2), make_keys(2, start=1)
        payloads = [pattern(key, SHAPE) for key in keys]
        totals = np.zeros(2, np.uint64)
        for i, payload in enumerate(payloads):
            sums = np.zeros(SHAPE.layers, np.uint64)
            fill_and_sum(payload, np.zeros(SHAPE.slot_bytes, np.uint8), SHAPE, sums)
            totals[i] = block_sum(sums)
        begun, go_on = hold_up(monkeypatch, writes, "fill")
        request = m.Put(id=1, namespace=ns)
        put = asyncio.create_task(rig.call(session, request, keys.tobytes(), totals.tobytes(), *payloads))
        await until(begun)
        for _ in range(3):  # its deadline, then the end of its session
            put.cancel()
            await asyncio.sleep(0.01)
        assert not put.done()
        grant = await rig.reserve(session, ns, others)
        sums = rig.fill(grant, others)
        go_on.set()
        await asyncio.gather(put, return_exceptions=True)
        await rig.commit(session, grant, sums, verify=True)
        assert rig.manager.stats()["reservations"] == 0

    run(scenario)


def test_pins_on_their_way_into_host_count_against_the_limit():
    async def scenario(rig, session, ns):
        prompts = [make_keys(12, start=start) for start in range(10)]
        for keys in prompts:
            await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        pins = [rig.call(session, m.Pin(id=1, namespace=ns), keys.tobytes()) for keys in prompts]
        outcomes = await asyncio.gather(*pins, return_exceptions=True)
        assert any(isinstance(outcome, RequestError) for outcome in outcomes)
        assert rig.manager.stats()["pinned_bytes"] <= rig.settings.host.capacity // 2
        rig.manager.session_detached(session)
        assert rig.manager.stats()["pinned_bytes"] == 0

    run(scenario, store=MemoryStore())


def test_numbers_out_of_range_are_refused_and_are_no_bug():
    async def scenario(rig, session, ns):
        keys = make_keys(1)
        grant = await rig.reserve(session, ns, keys)
        sums = rig.fill(grant, keys)
        total = np.array([block_sum(sums[0])], np.uint64).tobytes()
        for place in (2**64 - 1, 2**63 - 1, -1, -(2**63)):
            commit = m.Commit(id=1, reservation=grant.id, index=[place])
            await refused(ErrorCode.BAD_ARGUMENT, rig, session, commit, sums.tobytes(), total)
        await rig.commit(session, grant, sums)
        await refused(ErrorCode.BAD_ARGUMENT, rig, session, m.Acquire(id=1, namespace=ns, ttl_ms=-1), keys.tobytes())

    run(scenario)


def test_more_namespaces_on_disk_than_fit_do_not_keep_the_daemon_from_starting(monkeypatch):
    store = MemoryStore()

    async def fill(rig, session, _ns):
        for number in range(4):
            named = Namespace(model=f"model-{number}", geometry=SHAPE)
            await rig.store(session, await rig.register(session, named), make_keys(1, namespace=named))
        await rig.call(session, m.Flush(id=1))

    run(fill, store=store)
    monkeypatch.setattr(namespaces, "MAX_NAMESPACES", 2)

    async def look():
        async with Rig(store=MemoryStore(store)) as rig:
            stats = rig.manager.stats()
            assert (stats["recovered_blocks"], stats["recovery_dropped_blocks"]) == (2, 2)

    asyncio.run(look())
