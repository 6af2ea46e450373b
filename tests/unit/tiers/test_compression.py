"""Cold blocks become FP8 where their namespace allows loss, and nowhere else; a reader is always told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec, EncodedLayout
from kvtierd.gpu.codec import BlockCodec
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import make_keys, reply_of
from tests.unit.tiers.lossy_blocks import PLAIN, SHAPES, LossyRig, settings

MIB = 1 << 20


def run(scenario: Callable[..., Awaitable[None]], store: MemoryStore | None = None, **options) -> None:
    geometry = options.pop("geometry", PLAIN)
    options = {"capacity": 8 * MIB, **options}

    async def body() -> None:
        async with LossyRig(settings(**options), store, geometry) as rig:
            await scenario(rig)
            rig.check_accounts()

    asyncio.run(body())


async def flush(rig: LossyRig, session) -> None:
    await rig.call(session, m.Flush(id=1))


def count(rig: LossyRig, name: str) -> float:
    return rig.manager.stats()[name]


@pytest.mark.parametrize("geometry", SHAPES.values(), ids=SHAPES.keys())
def test_cold_block_is_compressed_before_it_is_written_and_read_back_decoded_and_named(geometry: Geometry) -> None:
    store = MemoryStore()

    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(4)
        assert await rig.store(session, number, keys, geometry) == 4
        await flush(rig, session)
        form = EncodedLayout(geometry)
        assert [data.size for _, data, _ in store.blocks.values()] == [form.slot_bytes] * 4
        assert set(store.codecs.values()) == {Codec.FP8_E4M3}
        assert rig.manager.copies.shapes.forms.count == 4
        assert rig.manager.copies.host.used_bytes() == 4 * form.slot_bytes
        looked = reply_of(await rig.call(session, m.Lookup(id=1, namespaces=[number]), keys.tobytes()), m.LookupReply)
        assert (looked.hit, looked.codecs) == (4, bytes([Codec.FP8_E4M3] * 4))
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == bytes([Codec.FP8_E4M3] * 4)
        for key, block in zip(keys, blocks, strict=True):
            assert (block == rig.lossy(key)).all()
            assert (block != rig.exact(key)).any()
        assert rig.manager.copies.shapes.forms.count == 0
        assert count(rig, "compressed_blocks") == count(rig, "decompressed_blocks") == 4
        assert count(rig, "compressed_in_bytes") == 4 * geometry.slot_bytes
        assert count(rig, "compressed_out_bytes") == 4 * form.slot_bytes
        assert 0.01 < count(rig, "compress_relative_l2_mean") < 0.04
        assert 0.01 < count(rig, "compress_error_max") < 0.08

    run(scenario, store, geometry=geometry)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"allow_loss": False}, {}),
        ({}, {"enabled": False}),
        ({}, {"threshold": 0}),
        ({}, {"geometry": Geometry(block_size=32, layers=2, kv_heads=2, k_dim=64, v_dim=64, dtype="fp8_e4m3")}),
        ({}, {"geometry": Geometry(block_size=32, layers=2, kv_heads=2, k_dim=64, v_dim=64, layout="opaque:own")}),
        ({}, {"geometry": Geometry(block_size=16, layers=2, kv_heads=1, k_dim=8, v_dim=8)}),
    ],
    ids=["no loss allowed", "disabled", "never cold", "fp8 already", "opaque", "no smaller in FP8"],
)
def test_what_may_not_or_need_not_be_compressed_stays_exact_in_every_tier(fields, options) -> None:
    store = MemoryStore()

    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client(**fields)
        keys = rig.keys(4)
        shape = rig.geometry
        grant = await rig.reserve(session, number, keys)
        sums = super(LossyRig, rig).fill(grant, keys, shape)
        await rig.commit(session, grant, sums)
        await flush(rig, session)
        rig.clock.advance(10_000)
        await asyncio.sleep(0.2)
        assert set(store.codecs.values()) == {Codec.RAW}
        assert rig.manager.copies.shapes.forms.count == 0
        before, codecs = await rig.fetch(session, number, keys)
        assert codecs == b""
        rig.manager.copies.evict_host(*_all_of(rig))
        after, codecs = await rig.fetch(session, number, keys)
        assert codecs == b""
        assert [block.tobytes() for block in before] == [block.tobytes() for block in after]
        assert count(rig, "compressed_blocks") == 0

    run(scenario, store, **options)


def _all_of(rig: LossyRig):
    """Every slot of the namespace's class in host that has a block."""
    host = rig.manager.copies.host
    cls = rig.manager.copies.host_class(rig.manager.copies.namespaces.entries[0])
    slots = np.concatenate([host.pool.slots_of(slab) for slab in cls.slabs])
    return cls, slots[host.pool.row[slots] >= 0]


def test_block_that_cooled_down_is_compressed_at_rest_without_an_nvme_tier() -> None:
    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(5)
        await rig.store(session, number, keys, PLAIN)
        await asyncio.sleep(0.2)
        assert rig.manager.copies.shapes.forms.count == 0, "it was just stored"
        await rig.compressed(5)
        assert await rig.lookup(session, number, keys) == 5
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == bytes([1] * 5)
        assert all((block == rig.lossy(key)).all() for key, block in zip(keys, blocks, strict=True))

    run(scenario)


def test_leased_and_pinned_blocks_stay_exact_until_they_are_let_go() -> None:
    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(4)
        await rig.store(session, number, keys, PLAIN)
        reply, descriptors = await rig.acquire(session, number, keys[:1], ttl_ms=60_000)
        await rig.call(session, m.Pin(id=1, namespace=number), keys[1:2].tobytes())
        await rig.compressed(2)
        await asyncio.sleep(0.2)
        assert rig.manager.copies.shapes.forms.count == 2
        assert (rig.read(descriptors[0], PLAIN) == rig.exact(keys[0])).all()
        await rig.release(session, reply)
        await rig.call(session, m.Unpin(id=1, namespace=number), keys[1:2].tobytes())
        await rig.compressed(4, seconds=0)

    run(scenario)


def test_reader_keeps_the_exact_bytes_that_it_leased_while_the_block_is_written_in_fp8() -> None:
    store = MemoryStore()

    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(3)
        store.stall.clear()
        await rig.store(session, number, keys, PLAIN)
        reply, descriptors = await rig.acquire(session, number, keys)
        store.stall.set()
        await flush(rig, session)
        for key, descriptor in zip(keys, descriptors, strict=True):
            assert (rig.read(descriptor, PLAIN) == rig.exact(key)).all()
        await rig.release(session, reply)
        blocks, codecs = await rig.fetch(session, number, keys)
        wanted = [
            rig.lossy(key) if code else rig.exact(key) for key, code in zip(keys, codecs or bytes(3), strict=True)
        ]
        assert all((block == right).all() for block, right in zip(blocks, wanted, strict=True))

    run(scenario, store)


def test_block_is_compressed_again_only_after_a_longer_rest_and_loses_nothing_more() -> None:
    async def scenario(rig: LossyRig) -> None:
        session, number = await rig.client()
        keys = rig.keys(3)
        await rig.store(session, number, keys, PLAIN)
        await rig.compressed(3)
        errors = _errors(rig, keys)
        for _ in range(3):
            first, _ = await rig.fetch(session, number, keys)
            rig.clock.advance(30)
            await asyncio.sleep(0.2)
            assert rig.manager.copies.shapes.forms.count == 0, "it was just decoded"
            await rig.compressed(3, seconds=60)
            assert (_errors(rig, keys) == errors).all(), "the errors are no longer those against the exact block"
            again, codecs = await rig.fetch(session, number, keys)
            assert codecs == bytes([1] * 3)
            assert [block.tobytes() for block in first] == [block.tobytes() for block in again]
            await rig.compressed(3, seconds=100)

    run(scenario)


def _errors(rig: LossyRig, keys) -> np.ndarray:
    """Relative L2 and largest errors that are stored with blocks, [blocks, layers, 2 x groups]."""
    copies, codec = rig.manager.copies, BlockCodec(PLAIN)
    found = []
    for row in rig.rows(keys).tolist():
        place = copies.shapes.forms.place_of(row)
        assert place is not None
        assert place.codec is Codec.FP8_E4M3
        view = copies.host.view(place.cls, place.slot)
        found.append(np.concatenate([codec.relative_l2(view), codec.largest_error(view)], axis=1))
    return np.array(found)


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
            assert codecs == (bytes([1] * 4) if store else b"")
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
        assert reply_of(looked, m.LookupReply).codecs == bytes([1] * 4)
        blocks, codecs = await rig.fetch(session, number, rig.keys(4))
        assert codecs == bytes([1] * 4)
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
        assert reply_of(answer, m.GetReply).codecs == bytes([1])
        assert bytes(answer.frames[1]) == rig.lossy(keys[0]).tobytes()
        answer = await rig.call(session, m.AcquirePart(id=1, namespace=number, begin=64, end=200), keys.tobytes())
        reply = reply_of(answer, m.AcquireReply)
        assert reply.codecs == bytes([1] * reply.count)
        await rig.release(session, reply)
        done = await rig.call(session, m.Reshape(id=1, namespace=number, parts=[64, 64, 128, 128]), keys.tobytes())
        assert reply_of(done, m.CountReply).count == 3
        answer = await rig.call(session, m.AcquirePart(id=1, namespace=number, begin=0, end=128), keys.tobytes())
        reply = reply_of(answer, m.AcquireReply)
        assert (reply.count, reply.codecs) == (2, bytes([1, 1]))
        await rig.release(session, reply)
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == bytes([1] * 3)
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
        rig.manager.copies.evict_host(*_all_of(rig))
        looked = await rig.call(session, m.Lookup(id=1, namespaces=[number]), keys.tobytes())
        assert reply_of(looked, m.LookupReply).codecs == bytes([0, 1, 1])
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == bytes([0, 1, 1])
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
