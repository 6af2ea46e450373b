"""What the host tier of a life leaves for the next one, and what that makes of it."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvtierd.config.schema import Host
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.held_files import HeldFiles
from kvtierd.testing.lives import fetched, life, on_loop, until
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings
from kvtierd.tiers.warm_host import Kept

KEYS = make_keys(20)


@pytest.fixture
def files() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.close()


def corrupt(rig: Rig, place: int) -> None:
    """Change a byte of the block at this place of KEYS behind the manager's back."""
    blocks = rig.manager.copies.blocks
    slot = int(blocks.table.host_slot[blocks.row_of(KEYS[place : place + 1], 0)])
    view = rig.manager.copies.host.view(rig.manager.copies.host.pool.class_of(slot), slot)
    view[100] ^= 1


@on_loop
async def test_blocks_of_the_life_before_are_served_from_where_they_lie(files):
    async with life(files) as (rig, session, namespace):
        assert await rig.store(session, namespace, KEYS) == 20
    for _ in range(2):
        async with life(files) as (rig, session, namespace):
            assert await rig.lookup(session, namespace, KEYS) == 20
            assert await fetched(rig, session, namespace, KEYS) == 20
            rig.check_accounts()
            stats = rig.manager.stats()
            assert (stats["warm_adopted_blocks"], stats["warm_refusal"]) == (20, "")


@on_loop
async def test_after_a_crash_at_any_moment_what_was_committed_is_there_and_nothing_else(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS[:10])
        grant = await rig.reserve(session, namespace, KEYS[10:])
        sums = rig.fill(grant, KEYS[10:])
        before = files.snapshot()
        await rig.commit(session, grant, sums)
        after = files.snapshot()
    for held, count in ((before, 10), (after, 20)):
        async with life(held) as (rig, session, namespace):
            assert await fetched(rig, session, namespace, KEYS) == count
            rig.check_accounts()
        held.close()


@on_loop
async def test_blocks_that_were_deleted_or_evicted_do_not_come_back(files):
    others = make_keys(200, start=7)
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        await rig.call(session, m.Delete(id=1, namespace=namespace), KEYS[5:].tobytes())
        deleted = files.snapshot()
        assert await rig.store(session, namespace, others[:100]) == 100
        await rig.store(session, namespace, others[100:])
        left = await rig.lookup(session, namespace, KEYS)
        kept = [await rig.lookup(session, namespace, others[i : i + 1]) for i in range(200)]
    async with life(deleted) as (rig, session, namespace):
        assert await fetched(rig, session, namespace, KEYS) == 5
        assert await rig.lookup(session, namespace, KEYS[5:6]) == 0
    deleted.close()
    assert 0 in kept
    async with life(files) as (rig, session, namespace):
        assert await rig.lookup(session, namespace, KEYS) == left
        assert [await rig.lookup(session, namespace, others[i : i + 1]) for i in range(200)] == kept


@on_loop
async def test_block_is_verified_before_it_is_first_served(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        corrupt(rig, 7)
    async with life(files) as (rig, session, namespace):
        assert await rig.lookup(session, namespace, KEYS) == 20
        assert await fetched(rig, session, namespace, KEYS) == 7
        assert await fetched(rig, session, namespace, KEYS[8:]) == 12
        assert rig.manager.stats()["warm_corrupt_blocks"] == 1
        assert await rig.lookup(session, namespace, KEYS) == 7
        rig.check_accounts()


@pytest.mark.parametrize("request_of", ["get", "part", "pin", "gpu"])
@on_loop
async def test_every_way_to_read_a_block_verifies_it_first(files, request_of):
    shape = Geometry(block_size=128, layers=1, kv_heads=1, k_dim=16, v_dim=16)
    space = Namespace(model="parts", geometry=shape)
    keys = make_keys(4, namespace=space)
    async with life(files) as (rig, session, _):
        namespace = await rig.register(session, space)
        await rig.store(session, namespace, keys, shape)
        slots = rig.manager.copies.blocks.table.host_slot[: rig.manager.copies.blocks.table.used_rows]
        host = rig.manager.copies.host
        for slot in slots[slots >= 0].tolist():
            host.view(host.pool.class_of(slot), slot)[9] ^= 1
    async with Rig(small_settings(), None, Kept(files, files.passed())) as rig:
        rig.manager._warm._background.cancel()
        session = rig.session()
        namespace = await rig.register(session, space)
        if request_of == "get":
            answer = await rig.call(session, m.Get(id=1, namespace=namespace), keys.tobytes())
        elif request_of == "part":
            request = m.AcquirePart(id=1, namespace=namespace, begin=0, end=128)
            answer = await rig.call(session, request, keys.tobytes())
        elif request_of == "pin":
            answer = await rig.call(session, m.Pin(id=1, namespace=namespace), keys.tobytes())
        else:
            answer = await rig.call(
                session, m.Prefetch(id=1, namespace=namespace, tier="gpu", wait=True), keys.tobytes()
            )
        assert answer.reply.count == 0
        assert rig.manager.stats()["warm_corrupt_blocks"] > 0


@on_loop
async def test_the_rest_is_verified_in_the_background_and_what_is_nowhere_on_disk_is_written(files):
    store = MemoryStore()
    store.stall.clear()
    async with life(files, store) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        corrupt(rig, 19)
        crashed, empty = files.snapshot(), MemoryStore(store)
        store.stall.set()
    assert not empty.blocks
    async with life(crashed, empty) as (rig, _, _):
        await until(lambda: not rig.manager.stats()["warm_unverified_blocks"] and rig.manager.backlog_bytes == 0)
        await rig.manager.drain()
        assert rig.manager.stats()["warm_verified_blocks"] == 19
        assert rig.manager.stats()["warm_corrupt_blocks"] == 1
        assert len(empty.blocks) == 19
        rig.check_accounts()
    crashed.close()


@on_loop
async def test_block_that_is_in_host_and_on_disk_is_one_block(files):
    store = MemoryStore()
    async with life(files, store) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        await rig.manager.drain()
        corrupt(rig, 3)
    async with life(files, MemoryStore(store)) as (rig, session, namespace):
        answer = await rig.call(session, m.Lookup(id=1, namespaces=[namespace]), KEYS.tobytes())
        assert set(answer.reply.tiers) == {m.TIER_HOST | m.TIER_NVME}
        assert await fetched(rig, session, namespace, KEYS) == 3
        # The copy on disk is good.
        assert await fetched(rig, session, namespace, KEYS) == 20
        assert rig.manager.stats()["host_blocks"] == rig.manager.stats()["nvme_blocks"] == 20
        rig.check_accounts()


@on_loop
async def test_slots_that_a_living_process_may_write_stay_out_of_use_over_any_number_of_lives(files):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:
        async with life(files) as (rig, session, namespace):
            session.pid, session.pidfd = writer.pid, os.pidfd_open(writer.pid)
            grant = await rig.reserve(session, namespace, KEYS)
            views = [rig.slot(descriptor) for descriptor in grant.descriptors]
            os.close(session.pidfd)
        for _ in range(2):
            async with life(files) as (rig, session, namespace):
                assert rig.manager.stats()["warm_quarantined_slots"] == 20
                assert await rig.lookup(session, namespace, KEYS) == 0
                again = await rig.reserve(session, namespace, KEYS)
                theirs = [rig.slot(descriptor) for descriptor in again.descriptors]
                for view in views:
                    view[:] = 0xAA
                await rig.commit(session, again, rig.fill(again, KEYS))
                for view in views:
                    view[:] = 0x55
                assert len(theirs) == 20
                assert await fetched(rig, session, namespace, KEYS) == 20
                await rig.call(session, m.Delete(id=1, namespace=namespace), KEYS.tobytes())
                rig.check_accounts()
        async with life(files) as (rig, _, _):
            writer.communicate(b"\n")
            await until(lambda: rig.manager.stats()["warm_quarantined_slots"] == 0)
            assert rig.manager.stats()["host_used_bytes"] == 0
            rig.check_accounts()
        assert [name for name in files.names if name.startswith("p")] == []


@on_loop
async def test_client_that_goes_on_gives_back_what_it_does_not_write_any_more(files):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:
        async with life(files) as (rig, session, namespace):
            session.pid, session.pidfd = writer.pid, os.pidfd_open(writer.pid)
            session.token = bytes(range(16))
            grants = [await rig.reserve(session, namespace, KEYS[begin : begin + 10]) for begin in (0, 10)]
            os.close(session.pidfd)
        async with life(files) as (rig, session, _):
            for token, number, left in (
                (bytes(16), grants[0].id, 20),
                (bytes(range(16)), 999, 20),
                (b"short", grants[0].id, 20),
                (bytes(range(16)), grants[0].id, 10),
                (bytes(range(16)), grants[0].id, 10),
            ):
                answer = await rig.call(session, m.Abort(id=1, reservation=number, token=token))
                assert isinstance(answer.reply, m.OkReply)
                assert rig.manager.stats()["warm_quarantined_slots"] == left
            rig.check_accounts()
        async with life(files) as (rig, session, _):
            assert rig.manager.stats()["warm_quarantined_slots"] == 10
            await rig.call(session, m.Abort(id=1, reservation=grants[1].id, token=bytes(range(16))))
            assert rig.manager.stats()["host_used_bytes"] == 0
            rig.check_accounts()
        assert [name for name in files.names if name.startswith("p")] == []
        writer.communicate(b"\n")


@on_loop
async def test_slots_of_a_process_that_ended_meanwhile_are_free(files):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:
        async with life(files) as (rig, session, namespace):
            session.pid, session.pidfd = writer.pid, os.pidfd_open(writer.pid)
            await rig.reserve(session, namespace, KEYS)
            os.close(session.pidfd)
        writer.communicate(b"\n")
    files.forget(f"p{writer.pid}")  # as when the store had no room for it: then the number must do
    for _ in range(2):
        async with life(files) as (rig, _, _):
            assert rig.manager.stats()["warm_quarantined_slots"] == 0
            assert rig.manager.stats()["host_used_bytes"] == 0


@on_loop
async def test_reader_that_was_paused_across_a_restart_sees_that_its_slot_changed_hands(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        reply, descriptors = await rig.acquire(session, namespace, KEYS)
        assert reply.count == 20
        handed = rig.manager.chunk_files(session, int(descriptors[0]["chunk"]))
        seen = mmap.mmap(handed.generations_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
        with pytest.raises(PermissionError):
            mmap.mmap(handed.generations_fd, 4096)
        first, slots = handed.generations_first, descriptors["offset"] // handed.slot_bytes
    generations = np.frombuffer(seen, np.uint64)[first:]
    async with life(files) as (rig, session, namespace):
        assert (generations[slots] == descriptors["generation"]).all()
        await until(lambda: not rig.manager.stats()["warm_unverified_blocks"])  # which holds slots for a while
        await rig.call(session, m.Delete(id=1, namespace=namespace), KEYS[:5].tobytes())
        changed = generations[slots] != descriptors["generation"]
        assert changed.tolist() == [True] * 5 + [False] * 15


@on_loop
async def test_namespaces_keep_their_terms_and_tenants_their_blocks(files):
    strict = Namespace(model="strict", geometry=SHAPE)
    async with life(files) as (rig, session, _):
        for allow in (True, False):
            await rig.call(session, m.RegisterNamespace(id=1, namespace=strict, allow_loss=allow))
        other = rig.session(tenant="other")
        theirs = await rig.register(other, strict)
        await rig.store(other, theirs, KEYS)
    async with life(files) as (rig, session, _):
        mine = await rig.register(session, strict)
        assert [entry.allow_loss for entry in rig.manager.copies.namespaces.entries] == [False, False, False]
        assert await rig.lookup(session, mine, KEYS) == 0
        other = rig.session(tenant="other")
        assert await rig.lookup(other, await rig.register(other, strict), KEYS) == 20


@on_loop
async def test_memory_that_another_class_needs_is_given_on_and_nothing_of_it_is_kept(files):
    big = Namespace(model="big", geometry=Geometry(block_size=16, layers=16, kv_heads=8, k_dim=64, v_dim=64))
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, make_keys(170))
    async with life(files) as (rig, session, _):
        number = await rig.register(session, big)
        for _ in range(50):
            rig.manager.copies.host.ticks += 1
            if await rig.store(session, number, make_keys(1, namespace=big), big.geometry):
                break
            await asyncio.sleep(0.01)
        assert rig.manager.stats()["host_chunks_moved"] == 1
        rig.check_accounts()
    assert len([name for name in files.names if name.startswith("c")]) == 2
    async with life(files) as (rig, session, namespace):
        number = await rig.register(session, big)
        assert await rig.lookup(session, number, make_keys(1, namespace=big)) == 1
        rig.check_accounts()


def test_default_is_to_stay_warm():
    assert Host().warm_restart
