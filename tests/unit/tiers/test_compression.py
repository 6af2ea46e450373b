"""Cold blocks become FP8 where their namespace allows loss, and nowhere else; a reader is always told."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Codec, EncodedLayout
from kvtierd.gpu.attend import to_fp32
from kvtierd.gpu.codec import BlockCodec
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import reply_of
from tests.unit.tiers.lossy_blocks import PLAIN, SHAPES, LossyRig, all_of, count, flush, run


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
        rig.manager.copies.evict_host(*all_of(rig))
        after, codecs = await rig.fetch(session, number, keys)
        assert codecs == b""
        assert [block.tobytes() for block in before] == [block.tobytes() for block in after]
        assert count(rig, "compressed_blocks") == 0

    run(scenario, store, **options)


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
        assert codecs == bytes([2] * 5)
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


def test_block_is_compressed_again_only_after_a_longer_rest_and_loses_hardly_more() -> None:
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
            assert codecs == bytes([2] * 3)
            # Keys were turned back and rounded to bf16 in between: the least numbers among them may get another code.
            for one, other in zip(first, again, strict=True):
                before, after = (to_fp32(block.view(np.uint16)) for block in (one, other))
                assert np.linalg.norm(after - before) < 2e-3 * np.linalg.norm(before)
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
