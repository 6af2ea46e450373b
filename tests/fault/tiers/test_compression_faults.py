"""Compression when something breaks: nothing damaged is given a new sum, and no block is lost for it."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from kvtierd.core.stored_form import Codec
from kvtierd.gpu.reference.codec import encode_group, layer_groups
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.tiers import compress, compress_work
from tests.unit.tiers.lossy_blocks import PLAIN, LossyRig, settings


def run(scenario, store=None, **options) -> None:
    async def body() -> None:
        async with LossyRig(settings(**{"capacity": 8 << 20, **options}), store) as rig:
            session, number = await rig.client()
            await scenario(rig, session, number)
            await asyncio.sleep(0)
            rig.check_accounts()
            held = rig.manager.copies.host.pool.holds
            assert not held.any(), "a slot is held for ever"

    asyncio.run(body())


def damage(rig: LossyRig, keys, where: int = 11) -> None:
    """Flip a bit of what the first of these blocks has in host."""
    place = rig.manager.copies.shapes.forms.place_of(int(rig.rows(keys)[0]))
    assert place is not None
    rig.manager.copies.host.view(place.cls, place.slot)[where] ^= 1


def test_source_that_changed_in_memory_is_not_laundered_into_a_new_sum() -> None:
    store = MemoryStore()

    async def scenario(rig, session, number) -> None:
        keys = rig.keys(3)
        store.stall.clear()
        grant = await rig.reserve(session, number, keys)
        sums = rig.fill(grant, keys)
        rig.slot(grant.descriptors[0], PLAIN)[5] ^= 1  # after it was hashed, before it is committed
        await rig.commit(session, grant, sums)
        store.stall.set()
        await rig.call(session, m.Flush(id=1))
        stats = rig.manager.stats()
        assert (stats["compressed_blocks"], stats["compress_failed_blocks"]) == (2, 1)
        assert await rig.lookup(session, number, keys) == 0, "the damaged block heads the prefix and must be gone"
        assert len(store.blocks) == 2

    run(scenario, store)


def test_source_that_changed_at_rest_stays_with_its_old_sum_and_is_a_miss_when_it_is_read() -> None:
    async def scenario(rig, session, number) -> None:
        keys = rig.keys(2)
        await rig.store(session, number, keys, PLAIN)
        damage(rig, keys)
        await rig.compressed(1)
        await asyncio.sleep(0.2)
        assert rig.manager.copies.shapes.forms.count == 1
        assert rig.manager.stats()["compress_failed_blocks"] >= 1
        answer = await rig.call(session, m.Acquire(id=1, namespace=number, verify=True), keys.tobytes())
        assert answer.reply.count == 0

    run(scenario)


def test_damaged_compressed_form_is_dropped_and_read_from_nvme_where_it_is() -> None:
    for store in (MemoryStore(), None):

        async def scenario(rig, session, number, store=store) -> None:
            keys = rig.keys(2)
            await rig.store(session, number, keys, PLAIN)
            await rig.compressed(2)
            if store is not None:
                await rig.call(session, m.Flush(id=1))
            damage(rig, keys)
            blocks, codecs = await rig.fetch(session, number, keys)
            assert blocks == []
            assert codecs == b""
            assert rig.manager.stats()["host_corrupt_blocks"] == 1
            blocks, _ = await rig.fetch(session, number, keys)
            assert len(blocks) == (2 if store else 0)
            assert all((block == rig.lossy(key)).all() for key, block in zip(keys, blocks, strict=False))

        run(scenario, store)


def test_damaged_fp8_extent_is_a_miss_and_dropped() -> None:
    store = MemoryStore()

    async def scenario(rig, session, number) -> None:
        keys = rig.keys(2)
        await rig.store(session, number, keys, PLAIN)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=number, tiers=["host"]))
        store.corrupt(rig.space.digest(), keys[0].tobytes())
        blocks, _ = await rig.fetch(session, number, keys)
        assert blocks == []
        assert rig.manager.stats()["onboard_corrupt_blocks"] == 1
        assert await rig.lookup(session, number, keys) == 0

    run(scenario, store)


def test_codec_that_fails_costs_the_compression_and_not_the_block(monkeypatch, caplog) -> None:
    store = MemoryStore()

    def broken(*_: object) -> None:
        raise MemoryError("injected")

    async def scenario(rig, session, number) -> None:
        keys = rig.keys(3)
        with caplog.at_level(logging.CRITICAL):
            await rig.store(session, number, keys, PLAIN)
            await rig.call(session, m.Flush(id=1))
            rig.clock.advance(30)
            await asyncio.sleep(0.2)
        assert set(store.codecs.values()) == {Codec.RAW}
        assert len(store.blocks) == 3
        assert rig.manager.stats()["compress_failed_blocks"] >= 3
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == b""
        assert all((block == rig.exact(key)).all() for key, block in zip(keys, blocks, strict=True))

    monkeypatch.setattr(compress, "encode", broken)
    run(scenario, store)


def test_disk_that_refuses_leaves_the_block_compressed_in_host() -> None:
    store = MemoryStore()

    async def scenario(rig, session, number) -> None:
        keys = rig.keys(2)
        store.fail_writes = 2
        await rig.store(session, number, keys, PLAIN)
        await rig.call(session, m.Flush(id=1))
        assert not store.blocks
        assert rig.manager.copies.shapes.forms.count == 2
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == bytes([2, 2])
        assert all((block == rig.lossy(key)).all() for key, block in zip(keys, blocks, strict=True))

    run(scenario, store)


def test_block_deleted_while_it_is_encoded_leaves_nothing(monkeypatch) -> None:
    store = MemoryStore()
    original, begun = compress_work.encode, asyncio.Event()

    async def scenario(rig, session, number) -> None:
        loop = asyncio.get_running_loop()

        def slow(*arguments) -> None:
            loop.call_soon_threadsafe(begun.set)
            original(*arguments)

        monkeypatch.setattr(compress, "encode", slow)
        keys = rig.keys(2)
        await rig.store(session, number, keys, PLAIN)
        await begun.wait()
        await rig.call(session, m.Delete(id=1, namespace=number), keys.tobytes())
        await rig.call(session, m.Flush(id=1))
        assert not store.blocks
        assert rig.manager.copies.host.used_bytes() == 0

    run(scenario, store)


@pytest.mark.parametrize("disabled", [False, True])
def test_what_was_decoded_is_never_written_as_if_it_were_exact(disabled: bool) -> None:
    """Its copy on nvme is gone, it has become hot or compression is off, and a read offers it to the disk again."""
    store = MemoryStore()

    async def fill(rig, session, number) -> None:
        await rig.store(session, number, rig.keys(3), PLAIN)
        await rig.call(session, m.Flush(id=1))

    async def scenario(rig, session, number) -> None:
        keys = rig.keys(3)
        await rig.fetch(session, number, keys)
        for key in keys:
            again.reclaim(rig.space.digest(), key.tobytes())
        for _ in range(12):
            await rig.fetch(session, number, keys)
        await rig.call(session, m.Flush(id=1))
        codecs = [again.codecs[extent.offset] for extent, _, _ in again.blocks.values()]
        assert codecs == [Codec.FP8_E4M3] * 3
        await rig.call(session, m.Purge(id=1, namespace=number, tiers=["host"]))
        blocks, named = await rig.fetch(session, number, keys)
        assert named == bytes([2] * 3)
        # Encoded from what was decoded: keys were turned back and rounded to bf16 in between.
        for key, block in zip(keys, blocks, strict=True):
            once = _floats(rig.lossy(key))
            assert np.linalg.norm(_floats(block) - once) < 2e-3 * np.linalg.norm(once)

    run(fill, store)
    again = MemoryStore(store)
    run(scenario, again, threshold=0 if not disabled else 10, enabled=not disabled)


def test_no_room_for_the_smaller_form_leaves_blocks_exact_and_counts_them() -> None:
    store = MemoryStore()

    async def scenario(rig, session, number) -> None:
        host = rig.manager.copies.host
        cls = rig.manager.copies.host_class(rig.manager.copies.namespaces.entries[0])
        while host.spare:  # every chunk belongs to the exact form
            host.attach_slab(cls, host.spare.pop())
        keys = rig.keys(2)
        await rig.store(session, number, keys, PLAIN)
        reply, _ = await rig.acquire(session, number, keys, ttl_ms=60_000)
        held = host.pool.take(cls, cls.free_count)
        host.pool.row[held] = -2
        host.pool.hold(held)
        await rig.call(session, m.Flush(id=1))
        assert set(store.codecs.values()) == {Codec.RAW}
        assert rig.manager.stats()["compress_put_off_blocks"] == 2
        host.release(cls, held)
        await rig.release(session, reply)
        blocks, codecs = await rig.fetch(session, number, keys)
        assert codecs == b""
        assert all((block == rig.exact(key)).all() for key, block in zip(keys, blocks, strict=True))

    run(scenario, store)


def test_errors_stored_with_a_block_are_those_of_its_groups() -> None:
    store = MemoryStore()

    async def scenario(rig, session, number) -> None:
        keys = rig.keys(1)
        await rig.store(session, number, keys, PLAIN)
        await rig.call(session, m.Flush(id=1))
        (_, data, _) = next(iter(store.blocks.values()))
        shapes = compress_work.shapes_of(PLAIN)
        rows = data.reshape(PLAIN.layers, shapes.form.layer_stride)[:, shapes.errors].view(np.float32)
        slot = np.zeros((PLAIN.layers, PLAIN.layer_stride), np.uint8)
        slot[:, : PLAIN.layer_bytes] = rig.exact(keys[0]).reshape(PLAIN.layers, -1)[:, : PLAIN.layer_bytes]
        slot = slot.reshape(-1)
        for layer in range(PLAIN.layers):
            for group, values in enumerate(layer_groups(slot, PLAIN, layer)):
                wanted = encode_group(values)
                assert rows[layer, group] == pytest.approx(wanted.relative_l2, rel=1e-3)
                assert rows[layer, shapes.form.groups + group] == pytest.approx(wanted.largest_error, rel=1e-3)

    run(scenario, store)


def _floats(block) -> np.ndarray:
    return (np.ascontiguousarray(block).view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
