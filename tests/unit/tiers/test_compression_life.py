"""Compressed blocks in the life of a daemon: deleted, evicted, found after a restart, forbidden, read in parts."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec, EncodedLayout
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import make_keys, reply_of
from tests.unit.tiers.lossy_blocks import MIB, PLAIN, LossyRig, all_of, count, flush, run


def test_place_of_says_where_a_block_lies_and_in_which_form() -> None:
    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(2)
        await rig.store(session, number, keys, PLAIN)
        forms, rows = rig.manager.copies.shapes.forms, rig.rows(keys)
        place = forms.place_of(int(rows[0]))
        assert place is not None
        assert (place.codec, place.cls.slot_bytes) == (Codec.RAW, PLAIN.slot_bytes)
        await rig.compressed(2)
        place = forms.place_of(int(rows[0]))
        assert place is not None
        assert (place.codec, place.cls.slot_bytes) == (Codec.FP8_E4M3, EncodedLayout(PLAIN).slot_bytes)
        await rig.call(session, m.Delete(id=1, namespace=number), keys.tobytes())
        assert forms.place_of(int(rows[0])) is None
        assert forms.count == 0

    run(scenario)


def test_deleting_and_purging_compressed_blocks_gives_their_slots_back() -> None:
    store = MemoryStore()

    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(6)
        await rig.store(session, number, keys, PLAIN)
        await flush(rig, session)
        await rig.call(session, m.Purge(id=1, namespace=number, tiers=["host"]))
        assert rig.manager.copies.host.used_bytes() == 0
        assert await rig.lookup(session, number, keys) == 6
        await rig.call(session, m.Delete(id=1, namespace=number), keys.tobytes())
        await flush(rig, session)
        assert not store.blocks

    run(scenario, store)


def test_evicted_compressed_blocks_come_back_from_nvme_and_are_lost_without_it() -> None:
    for store in (MemoryStore(), None):

        async def scenario(rig: LossyRig, store: MemoryStore | None = store) -> None:
            session, number = await rig.client()
            keys = rig.keys(4)
            await rig.store(session, number, keys, PLAIN)
            await rig.compressed(4)
            copies = rig.manager.copies
            place = copies.shapes.forms.place_of(int(rig.rows(keys)[0]))
            assert place is not None
            if store is not None:
                await flush(rig, session)
            copies.evict_host(place.cls, copies.host.victims(place.cls, 10))
            assert copies.shapes.forms.count == 0
            blocks, codecs = await rig.fetch(session, number, keys)
            assert codecs == (bytes([2] * 4) if store else b"")
            assert len(blocks) == (4 if store else 0)
            assert all((block == rig.lossy(key)).all() for key, block in zip(keys, blocks, strict=False))

        run(scenario, store)


def test_after_a_restart_blocks_come_back_as_fp8_and_loss_is_allowed_again_by_who_registers() -> None:
    store = MemoryStore()

    async def first(rig: LossyRig) -> None:
        session, number = await rig.client()
        await rig.store(session, number, rig.keys(4), PLAIN)
        await flush(rig, session)

    async def second(rig: LossyRig) -> None:
        session, number = await rig.client()
        looked = await rig.call(session, m.Lookup(id=1, namespaces=[number]), rig.keys(4).tobytes())
        assert reply_of(looked, m.LookupReply).codecs == bytes([2] * 4)
        blocks, codecs = await rig.fetch(session, number, rig.keys(4))
        assert codecs == bytes([2] * 4)
        assert all((block == rig.lossy(key)).all() for key, block in zip(rig.keys(4), blocks, strict=True))
        await rig.store(session, number, rig.keys(2, start=1), PLAIN)
        await flush(rig, session)
        assert rig.manager.copies.shapes.forms.count == 2

    run(first, store)
    run(second, MemoryStore(store))


@pytest.mark.parametrize("restart", [False, True])
def test_client_that_forbids_loss_gets_nothing_that_went_through_fp8(restart: bool) -> None:
    store = MemoryStore()

    async def fill(rig: LossyRig) -> None:
        session, number = await rig.client()
        await rig.store(session, number, rig.keys(4), PLAIN)
        await flush(rig, session)
        await rig.fetch(session, number, rig.keys(2))

    async def forbid(rig: LossyRig) -> None:
        exact, number = await rig.client(allow_loss=False)
        keys = rig.keys(4)
        assert await rig.lookup(exact, number, keys) == 0
        await rig.store(exact, number, keys, PLAIN)
        await flush(rig, exact)
        rig.clock.advance(1_000)
        await asyncio.sleep(0.2)
        lossy, same = await rig.client(allow_loss=True)
        for session, name in ((exact, number), (lossy, same)):
            blocks, codecs = await rig.fetch(session, name, keys)
            assert codecs == b""
            assert all((block == rig.exact(key)).all() for key, block in zip(keys, blocks, strict=True))
        assert len(blocks) == 4
        assert {store.codecs[extent.offset] for extent, _, _ in store.blocks.values()} == {Codec.RAW}

    async def both(rig: LossyRig) -> None:
        await fill(rig)
        await forbid(rig)

    if restart:
        run(fill, store)
        store = MemoryStore(store)
        run(forbid, store)
    else:
        run(both, store)


def test_get_and_parts_name_the_codec_too() -> None:
    shape = Geometry(block_size=128, layers=2, kv_heads=2, k_dim=64, v_dim=64)

    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(3)
        await rig.store(session, number, keys, shape)
        await rig.compressed(3)
        answer = await rig.call(session, m.Get(id=1, namespace=number), keys[:1].tobytes())
        assert reply_of(answer, m.GetReply).codecs == bytes([2])
        assert bytes(answer.frames[1]) == rig.lossy(keys[0]).tobytes()
        answer = await rig.call(session, m.AcquirePart(id=1, namespace=number, begin=64, end=200), keys.tobytes())
        reply = reply_of(answer, m.AcquireReply)
        assert reply.codecs == bytes([2] * reply.count)
        await rig.release(session, reply)
        done = await rig.call(session, m.Reshape(id=1, namespace=number, parts=[64, 64, 128, 128]), keys.tobytes())
        assert reply_of(done, m.CountReply).count == 3
        answer = await rig.call(session, m.AcquirePart(id=1, namespace=number, begin=0, end=128), keys.tobytes())
        reply = reply_of(answer, m.AcquireReply)
        assert (reply.count, reply.codecs) == (2, bytes([2, 2]))
        await rig.release(session, reply)
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == bytes([2] * 3)
        assert all((block == rig.lossy(key)).all() for key, block in zip(keys, blocks, strict=True))
        assert count(rig, "host_corrupt_blocks") == 0

    run(scenario, geometry=shape)


def test_blocks_in_gpu_are_not_compressed_and_what_was_decoded_is_named_in_gpu_too() -> None:
    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(3)
        await rig.store(session, number, keys, PLAIN)
        await rig.call(session, m.Prefetch(id=1, namespace=number, tier="gpu", wait=True), keys[:1].tobytes())
        await rig.compressed(2)
        await asyncio.sleep(0.1)
        assert rig.manager.copies.shapes.forms.count == 2
        await rig.call(session, m.Prefetch(id=1, namespace=number, tier="gpu", wait=True), keys.tobytes())
        rig.manager.copies.evict_host(*all_of(rig))
        looked = await rig.call(session, m.Lookup(id=1, namespaces=[number]), keys.tobytes())
        assert reply_of(looked, m.LookupReply).codecs == bytes([0, 2, 2])
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == bytes([0, 2, 2])
        wanted = [rig.exact(keys[0]), rig.lossy(keys[1]), rig.lossy(keys[2])]
        assert all((block == right).all() for block, right in zip(blocks, wanted, strict=True))

    run(scenario, gpu=True)


def test_namespaces_that_differ_keep_to_their_own_form() -> None:
    store = MemoryStore()

    async def scenario(rig: LossyRig) -> None:
        lossy, number = await rig.client()
        exact = rig.session()
        space = Namespace(model="exact", geometry=PLAIN)
        other = await rig.register(exact, space)
        theirs = make_keys(3, namespace=space)
        await rig.store(lossy, number, rig.keys(3), PLAIN)
        await rig.store(exact, other, theirs, PLAIN)
        await flush(rig, lossy)
        await rig.compressed(3)
        await asyncio.sleep(0.1)
        assert rig.manager.copies.shapes.forms.count == 3
        blocks, codecs = await rig.fetch(exact, other, theirs)
        assert codecs == b""
        assert all((block == rig.exact(key)).all() for key, block in zip(theirs, blocks, strict=True))
        answer = await rig.call(exact, m.Lookup(id=1, namespaces=[other]), theirs.tobytes())
        assert reply_of(answer, m.LookupReply).codecs == b""

    run(scenario, store)


def test_a_full_host_tier_holds_more_blocks_when_they_are_cold() -> None:
    shape = Geometry(block_size=32, layers=4, kv_heads=4, k_dim=64, v_dim=64)

    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        exact_slots = 8 * MIB // shape.slot_bytes
        for start in range(exact_slots):
            await rig.store(session, number, rig.keys(2, start=start), shape)
            rig.clock.advance(15)
            await asyncio.sleep(0.06)
        there = sum([await rig.lookup(session, number, rig.keys(2, start=start)) for start in range(exact_slots)])
        assert there > 1.2 * exact_slots, rig.manager.stats()

    run(scenario, geometry=shape)
