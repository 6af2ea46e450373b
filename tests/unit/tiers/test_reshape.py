"""Split and merge: extents change, keys and bytes never, and whoever holds a lease notices nothing."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.token_spans import of_tokens
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.parts import TOKENS, Stored, acquire_part, read_part, right
from kvtierd.testing.rig import make_keys, pattern, reply_of


def in_loop(scenario):
    @functools.wraps(scenario)
    def test(**arguments):
        asyncio.run(scenario(**arguments))

    return test


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize(
    "parts",
    [
        [128, 128, 256, 64, 192, 256],
        [64] * 16,
        [512, 512],
        [256, 512, 256],
        [192, 64, 512, 64, 128, 64],
        [256] * 4,
    ],
)
@in_loop
async def test_blocks_come_back_byte_for_byte_from_any_extents(layout, parts):
    async with Stored(layout=layout) as stored:
        assert await stored.reshape(parts) == 4
        stored.rig.check_accounts()
        for begin, end in ((0, 1024), (100, 101), (64, 320), (500, 900), (255, 257)):
            await stored.part_is_right(begin, end)
        assert await stored.rig.lookup(stored.session, stored.number, stored.keys) == 4
        stored.rig.check_accounts()
        await stored.whole_is_right()
        assert stored.rig.manager.copies.shapes.extents == 0
        await stored.part_is_right(10, 1000)


@in_loop
async def test_a_split_lets_a_part_be_read_alone():
    async with Stored() as stored:
        _, _, spans, _ = await stored.part_is_right(300, 310)
        assert spans["tokens"].tolist() == [256]
        assert await stored.reshape([64, 64, 128], stored.keys[1:2]) == 1
        _, _, spans, _ = await stored.part_is_right(300, 310)
        assert spans["tokens"].tolist() == [64]
        _, _, spans, _ = await stored.part_is_right(0, 1024)
        assert spans["tokens"].tolist() == [256, 64, 64, 128, 256, 256]


@in_loop
async def test_a_merge_is_one_extent_for_several_blocks():
    async with Stored() as stored:
        assert await stored.reshape([512], stored.keys[1:3]) == 2
        _, _, spans, _ = await stored.part_is_right(256, 768)
        assert spans.tolist() == [(256, 512, 512, 0)]
        _, _, spans, _ = await stored.part_is_right(600, 700)
        assert spans.tolist() == [(576, 128, 512, 320)]


@in_loop
async def test_readers_with_leases_keep_what_they_read():
    async with Stored() as stored:
        rig, wanted = stored.rig, right(stored.keys, stored.shape)
        before = await stored.acquire()
        was = [rig.generation(descriptor, stored.shape) for descriptor in before[1]]
        assert await stored.reshape([64, 192, 512, 128, 128]) == 4
        split = await stored.part(begin=0, end=1024)
        assert await stored.reshape([512, 512]) == 4
        merged = await stored.part(begin=0, end=1024)
        await stored.whole_is_right()
        assert [rig.generation(descriptor, stored.shape) for descriptor in before[1]] == was
        for key, descriptor in zip(stored.keys, before[1], strict=True):
            assert (rig.read(descriptor, stored.shape) == pattern(key, stored.shape)).all()
        for found in (split, merged):
            assert (read_part(rig, stored.shape, found)[0] == wanted).all()
        rig.check_accounts()
        for reply in (before[0], split[0], merged[0]):
            await rig.release(stored.session, reply)
        assert rig.manager.copies.host.pool.holds.sum() == 0


@in_loop
async def test_memory_of_former_extents_is_free_when_the_last_reader_goes():
    async with Stored() as stored:
        used = stored.rig.manager.copies.host.used_bytes
        before, parts = used(), 16 * of_tokens(stored.shape, 64).slot_bytes
        lease, _ = await stored.acquire()
        assert await stored.reshape([64] * 16) == 4
        assert used() == before + parts
        await stored.rig.release(stored.session, lease)
        assert used() == parts


@in_loop
async def test_deleted_blocks_leave_nothing_of_their_extents():
    async with Stored() as stored:
        assert await stored.reshape([64, 192, 512, 256]) == 4
        await stored.rig.call(stored.session, m.Delete(id=1, namespace=stored.number), stored.keys[:2].tobytes())
        stored.rig.check_accounts()
        await stored.rig.call(stored.session, m.Delete(id=1, namespace=stored.number), stored.keys.tobytes())
        copies = stored.rig.manager.copies
        assert copies.host.used_bytes() == 0
        assert (copies.shapes.extents, copies.shapes.known, len(copies.blocks.table)) == (0, 0, 0)
        assert await stored.rig.store(stored.session, stored.number, stored.keys, stored.shape) == 4
        await stored.whole_is_right()


@in_loop
async def test_a_part_stays_while_the_rest_of_its_block_is_evicted():
    async with Stored(store=MemoryStore()) as stored:
        rig, copies = stored.rig, stored.rig.manager.copies
        await rig.call(stored.session, m.Flush(id=1))
        assert await stored.reshape([64, 192], stored.keys[1:2]) == 1
        cls = copies.host.class_for(of_tokens(stored.shape, 192).slot_bytes, 2, "default")
        (cold,) = (slot for slot in range(copies.host.pool.slots_max) if _is_slot_of(copies, cls, slot))
        copies.evict_host(cls, np.array([cold], np.int32))
        rig.check_accounts()
        assert await rig.lookup(stored.session, stored.number, stored.keys) == 4
        onboarded = copies.counters["onboarded_blocks"]
        _, _, spans, _ = await stored.part_is_right(256, 320)
        assert spans["tokens"].tolist() == [64]
        assert copies.counters["onboarded_blocks"] == onboarded
        _, _, spans, _ = await stored.part_is_right(256, 512)
        assert spans["tokens"].tolist() == [256]
        assert copies.counters["onboarded_blocks"] == onboarded + 1
        await stored.whole_is_right()


def _is_slot_of(copies, cls, slot):
    row = copies.host.pool.row[slot]
    return row > 0 and copies.host.pool.class_of(slot) is cls


@in_loop
async def test_a_block_without_another_copy_goes_with_the_first_of_its_parts():
    async with Stored() as stored:
        copies = stored.rig.manager.copies
        assert await stored.reshape([64, 192, 256, 256, 256]) == 4
        place = copies.shapes.pieces(copies.blocks.find(stored.keys[:1], 0), TOKENS, 64, 128)[0, 2]
        slot = copies.blocks.table.host_slot[[place]]
        copies.evict_host(copies.host.pool.class_of(int(slot[0])), slot)
        assert await stored.rig.lookup(stored.session, stored.number, stored.keys) == 0
        assert copies.counters["host_lost_blocks"] == 1
        assert copies.shapes.extents == 0


@in_loop
async def test_pinned_blocks_stay_as_they_are():
    async with Stored() as stored:
        await stored.rig.call(stored.session, m.Pin(id=1, namespace=stored.number), stored.keys[:1].tobytes())
        assert await stored.reshape([64, 192], stored.keys[:1]) == 0
        await stored.rig.call(stored.session, m.Unpin(id=1, namespace=stored.number), stored.keys[:1].tobytes())
        assert await stored.reshape([64, 192], stored.keys[:1]) == 1


@in_loop
async def test_blocks_that_are_not_there_are_not_reshaped():
    async with Stored() as stored:
        more = make_keys(6, namespace=stored.space)
        assert await stored.reshape([256] * 4 + [512], more) == 0


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([100, 924], "100 tokens"),
        ([1024], "1024 tokens"),
        ([256, 256, 256], "768 tokens are not the 4 blocks"),
        ([128, 256, 512, 128], "128..384"),
        ([0, 512, 512], "0 tokens"),
        ([], "0 tokens are not"),
    ],
)
@in_loop
async def test_extents_that_cannot_be_are_refused(parts, text):
    async with Stored() as stored:
        with pytest.raises(RequestError, match=text) as refused:
            await stored.reshape(parts)
        assert refused.value.code == ErrorCode.BAD_ARGUMENT


@pytest.mark.parametrize(("tokens", "layout"), [(48, "nhd"), (1024, "nhd"), (256, "opaque:mine")])
@in_loop
async def test_blocks_without_parts_are_refused(tokens, layout):
    async with Stored(blocks=1, tokens=tokens, layout=layout) as stored:
        for work in (stored.reshape([tokens]), stored.part(begin=0, end=1)):
            with pytest.raises(RequestError) as refused:
                await work
            assert refused.value.code == ErrorCode.BAD_ARGUMENT
        assert (await stored.acquire())[0].count == 1


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (-1, 5), (0, 1025), (1024, 0)])
@in_loop
async def test_tokens_outside_the_keys_are_refused(begin, end):
    async with Stored() as stored:
        with pytest.raises(RequestError, match="within the 1024"):
            await stored.part(begin=begin, end=end)


@in_loop
async def test_a_part_beyond_the_leading_run_is_a_miss():
    async with Stored() as stored:
        keys = make_keys(6, namespace=stored.space)
        reply, *_ = await acquire_part(stored.rig, stored.session, stored.number, keys, begin=1024, end=1100)
        assert (reply.lease, reply.count) == (0, 0)
        reply, _, spans, _ = await acquire_part(stored.rig, stored.session, stored.number, keys, begin=1000)
        assert spans.tolist() == [(960, 64, 256, 192)]
        await stored.rig.release(stored.session, reply)


@in_loop
async def test_purge_of_host_copies_takes_scattered_blocks_too():
    async with Stored(store=MemoryStore()) as stored:
        await stored.rig.call(stored.session, m.Flush(id=1))
        assert await stored.reshape([64, 192, 512, 256]) == 4
        answer = await stored.rig.call(stored.session, m.Purge(id=1, namespace=stored.number, tiers=["host"]))
        assert reply_of(answer, m.CountReply).count == 4
        assert stored.rig.manager.copies.host.used_bytes() == 0
        await stored.whole_is_right()


async def turn(stored, until):
    """Let the ticker run until something holds; fails after a hundred turns of it."""
    for _ in range(100):
        if until():
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"never came: {stored.rig.manager.stats()}")


@in_loop
async def test_the_policy_splits_a_block_whose_part_is_read_again_and_again():
    async with Stored() as stored:
        counters = stored.rig.manager.copies.counters
        for _ in range(20):
            await stored.part_is_right(320, 340)
        await turn(stored, lambda: counters["reshaped_parts"])
        _, _, spans, _ = await stored.part_is_right(256, 512)
        assert spans["tokens"].tolist() == [64, 64, 128]
        for _ in range(20):
            await stored.part_is_right(256, 512)
        await turn(stored, lambda: counters["gathered_blocks"])
        _, _, spans, _ = await stored.part_is_right(256, 512)
        assert spans["tokens"].tolist() == [256]


@in_loop
async def test_the_policy_merges_neighbours_that_are_read_together():
    async with Stored() as stored:
        counters = stored.rig.manager.copies.counters
        for _ in range(20):
            await stored.part_is_right(0, 1024)
        await turn(stored, lambda: counters["reshaped_merges"] >= 2)
        _, _, spans, _ = await stored.part_is_right(0, 1024)
        assert spans["tokens"].tolist() == [512, 512]
        await stored.whole_is_right()


@in_loop
async def test_the_policy_lets_leased_blocks_be():
    async with Stored() as stored:
        counters = stored.rig.manager.copies.counters
        lease, _ = await stored.acquire()
        for _ in range(20):
            await stored.part_is_right(320, 340)
        await turn(stored, lambda: counters["reshapes_put_off"])
        assert counters["reshaped_parts"] == 0
        await stored.rig.release(stored.session, lease)


@in_loop
async def test_blocks_that_nobody_reads_in_parts_any_more_are_not_counted_any_more():
    async with Stored() as stored:
        await stored.part_is_right(0, 1024)
        shapes = stored.rig.manager.copies.shapes
        assert shapes.known == 4
        for _ in range(3):
            stored.rig.clock.advance(61)
            await asyncio.sleep(0.2)
        assert shapes.known == 0
        await stored.whole_is_right()
