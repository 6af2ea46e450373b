"""The life of a block in the real manager: stored, found, moved through the tiers, forgotten."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.telemetry.metrics import METRICS
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, pattern, reply_of, small_settings

PER_CHUNK = (1 << 20) // SHAPE.slot_bytes


def run(scenario, **options):
    async def body():
        async with Rig(**options) as rig:
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            rig.check_accounts()

    asyncio.run(body())


def test_a_stored_prefix_is_found_and_read_back_byte_for_byte():
    async def scenario(rig, session, ns):
        keys = make_keys(5)
        assert await rig.store(session, ns, keys) == 5
        assert await rig.lookup(session, ns, keys) == 5
        reply, descriptors = await rig.acquire(session, ns, keys)
        assert reply.count == 5
        for key, descriptor in zip(keys, descriptors, strict=True):
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        await rig.release(session, reply)

    run(scenario)


def test_a_block_is_a_miss_until_it_is_committed():
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        grant = await rig.reserve(session, ns, keys)
        assert await rig.lookup(session, ns, keys) == 0
        sums = rig.fill(grant, keys)
        await rig.commit(session, grant, sums[[0, 2]], index=[0, 2])
        assert await rig.lookup(session, ns, keys) == 1
        await rig.commit(session, grant, sums[1:2], index=[1])
        assert await rig.lookup(session, ns, keys) == 3

    run(scenario)


def test_case_27_one_cold_prompt_is_found_again():
    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(4))
        assert await rig.lookup(session, ns, make_keys(4)) == 4

    run(scenario)


def test_a_hole_ends_the_prefix():
    async def scenario(rig, session, ns):
        keys = make_keys(6)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Delete(id=1, namespace=ns), keys[2].tobytes())
        assert await rig.lookup(session, ns, keys) == 2

    run(scenario)


def test_blocks_in_use_are_never_evicted_and_the_rest_makes_room():
    async def scenario(rig, session, ns):
        held = make_keys(10, start=1)
        await rig.store(session, ns, held)
        reply, descriptors = await rig.acquire(session, ns, held)
        for start in range(2, 14):
            await rig.store(session, ns, make_keys(20, start=start))
        assert rig.manager.copies.counters["host_evicted_blocks"] > 0
        assert await rig.lookup(session, ns, held) == 10
        for key, descriptor in zip(held, descriptors, strict=True):
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        await rig.release(session, reply)

    run(scenario)


def test_when_every_slot_is_held_a_store_is_refused_at_once_with_a_hint():
    async def scenario(rig, session, ns):
        total = 2 * PER_CHUNK
        await rig.store(session, ns, make_keys(total))
        reply, _ = await rig.acquire(session, ns, make_keys(total))
        assert reply.count == total
        answer = await rig.call(session, m.Reserve(id=1, namespace=ns), make_keys(2, start=9).tobytes())
        refused = reply_of(answer, m.ReserveReply)
        assert (refused.reservation, refused.granted) == (0, 0)
        assert refused.retry_after_ms > 0
        await rig.release(session, reply)
        assert await rig.store(session, ns, make_keys(2, start=9)) == 2

    run(scenario)


def test_a_block_survives_in_nvme_when_host_forgets_it():
    async def scenario(rig, session, ns):
        keys = make_keys(8)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["gpu", "host"]))
        counts = rig.manager.copies.tier_counts()
        assert (counts["host_blocks"], counts["nvme_blocks"]) == (0, 8)
        reply, descriptors = await rig.acquire(session, ns, keys)
        assert reply.count == 8
        assert set(descriptors["source"].tolist()) == {m.TIER_NVME}
        for key, descriptor in zip(keys, descriptors, strict=True):
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        await rig.release(session, reply)

    run(scenario, store=MemoryStore())


def test_a_block_goes_up_to_gpu_and_comes_back():
    async def scenario(rig, session, ns):
        keys = make_keys(8)
        await rig.store(session, ns, keys)
        answer = await rig.call(session, m.Prefetch(id=1, namespace=ns, tier="gpu", wait=True), keys.tobytes())
        assert reply_of(answer, m.CountReply).count == 8
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        reply, descriptors = await rig.acquire(session, ns, keys)
        assert set(descriptors["source"].tolist()) == {m.TIER_GPU}
        for key, descriptor in zip(keys, descriptors, strict=True):
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        await rig.release(session, reply)

    run(scenario)


def test_purge_of_a_tier_never_drops_the_last_copy():
    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(4))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        assert await rig.lookup(session, ns, make_keys(4)) == 4

    run(scenario)


def test_the_gpu_tier_stays_under_its_watermark():
    async def scenario(rig, session, ns):
        for start in range(6):
            keys = make_keys(20, start=start)
            await rig.store(session, ns, keys)
            await rig.call(session, m.Prefetch(id=1, namespace=ns, tier="gpu", wait=True), keys.tobytes())
        for _ in range(4):
            await asyncio.sleep(0.06)
        gpu = rig.manager.copies.gpu
        assert gpu.used_bytes() <= 0.8 * gpu.device.capacity_bytes
        assert rig.manager.copies.counters["gpu_evicted_blocks"] > 0

    run(scenario)


def test_a_warm_start_finds_what_the_store_kept():
    store = MemoryStore()

    async def first(rig, session, ns):
        await rig.store(session, ns, make_keys(5))
        await rig.call(session, m.Flush(id=1))

    async def second(rig, session, ns):
        assert await rig.lookup(session, ns, make_keys(5)) == 5
        reply, descriptors = await rig.acquire(session, ns, make_keys(5))
        for key, descriptor in zip(make_keys(5), descriptors, strict=True):
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        await rig.release(session, reply)

    run(first, store=store)
    run(second, store=MemoryStore(store))


def test_deleted_blocks_are_gone_from_the_store_too():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(5))
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Delete(id=1, namespace=ns), make_keys(5)[3:].tobytes())
        await rig.call(session, m.Flush(id=1))
        assert len(store.blocks) == 3

    run(scenario, store=store)


def test_put_and_get_do_the_same_through_frames():
    async def scenario(rig, _session, _ns):
        remote = rig.session(attached=False)
        ns = await rig.register(remote)
        keys = make_keys(3)
        blocks = [pattern(key, SHAPE) for key in keys]
        sums = [reference_sum(block) for block in blocks]
        frames = [keys.tobytes(), np.array(sums, np.uint64).tobytes(), *(block.tobytes() for block in blocks)]
        assert reply_of(await rig.call(remote, m.Put(id=1, namespace=ns), *frames), m.PutReply).stored == 3
        assert reply_of(await rig.call(remote, m.Put(id=1, namespace=ns), *frames), m.PutReply).existed == 3
        answer = await rig.call(remote, m.Get(id=1, namespace=ns), keys.tobytes())
        assert reply_of(answer, m.GetReply).count == 3
        for frame, block in zip(answer.frames[1:], blocks, strict=True):
            assert bytes(frame) == block.tobytes()

    run(scenario)


def reference_sum(packed):
    import xxhash

    parts = packed.reshape(SHAPE.layers, SHAPE.layer_bytes)
    sums = [xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts]
    return xxhash.xxh3_64_intdigest(np.array(sums, "<u8").tobytes())


def test_pins_keep_blocks_in_host_and_end_with_the_session():
    async def scenario(rig, session, ns):
        keys = make_keys(4)
        await rig.store(session, ns, keys)
        owner = rig.session()
        mine = await rig.register(owner)
        assert reply_of(await rig.call(owner, m.Pin(id=1, namespace=mine), keys.tobytes()), m.CountReply).count == 4
        assert reply_of(await rig.call(owner, m.Pin(id=1, namespace=mine), keys.tobytes()), m.CountReply).count == 0
        for start in range(2, 14):
            await rig.store(session, ns, make_keys(20, start=start))
        assert await rig.lookup(session, ns, keys) == 4
        rig.manager.process_gone(owner)
        for start in range(14, 28):
            await rig.store(session, ns, make_keys(20, start=start))
        assert await rig.lookup(session, ns, keys) < 4
        assert rig.manager.stats()["pinned_bytes"] == 0

    run(scenario)


def test_case_18_an_unpin_of_somebody_elses_pin_changes_nothing():
    async def scenario(rig, session, ns):
        keys = make_keys(4)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Pin(id=1, namespace=ns), keys.tobytes())
        other = rig.session()
        theirs = await rig.register(other)
        answer = await rig.call(other, m.Unpin(id=1, namespace=theirs), keys.tobytes())
        assert reply_of(answer, m.CountReply).count == 0
        assert rig.manager.stats()["pinned_bytes"] == 4 * SHAPE.slot_bytes
        answer = await rig.call(session, m.Unpin(id=1, namespace=ns), keys.tobytes() * 2)
        assert reply_of(answer, m.CountReply).count == 4
        assert reply_of(await rig.call(session, m.Unpin(id=1, namespace=ns), keys.tobytes()), m.CountReply).count == 0
        assert rig.manager.stats()["pinned_bytes"] == 0

    run(scenario)


def test_models_of_different_block_sizes_share_the_budget():
    big = Geometry(block_size=64, layers=2, kv_heads=4, k_dim=64, v_dim=64)

    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(2 * PER_CHUNK))
        space = Namespace(model="big", geometry=big)
        other = await rig.register(session, space)
        keys = make_keys(3, namespace=space)
        theirs = [os.dup(chunk.data_fd) for chunk in rig.manager.copies.host.chunks()]
        assert await rig.store(session, other, keys, big) == 3, "the first store waits for the chunk that it is given"
        assert sorted(os.fstat(fd).st_blocks > 0 for fd in theirs) == [False, *([True] * (len(theirs) - 1))], (
            "clients that have mapped the old chunk do not keep its memory"
        )
        for fd in theirs:
            os.close(fd)
        assert await rig.lookup(session, other, keys) == 3
        assert rig.manager.copies.counters["host_chunks_moved"] == 1
        assert await rig.store(session, ns, make_keys(5, start=8)) == 5

    run(scenario)


def test_a_lookup_over_ranks_answers_their_common_prefix():
    async def scenario(rig, session, _ns):
        ranks = [Namespace(model="test", geometry=SHAPE, tp_rank=rank, tp_size=2) for rank in range(2)]
        numbers = [await rig.register(session, rank) for rank in ranks]
        keys = [make_keys(6, namespace=rank) for rank in ranks]
        await rig.store(session, numbers[0], keys[0])
        await rig.store(session, numbers[1], keys[1][:4])
        answer = await rig.call(session, m.Lookup(id=1, namespaces=numbers), *(part.tobytes() for part in keys))
        assert reply_of(answer, m.LookupReply).hit == 4

    run(scenario)


def test_without_a_gpu_tier_prefetch_to_it_says_so():
    settings = small_settings()
    no_gpu = type(settings)(
        **{name: getattr(settings, name) for name in settings.__struct_fields__ if name != "gpu"},
        gpu=type(settings.gpu)(device="host", capacity=0),
    )

    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(2))
        with pytest.raises(RequestError) as caught:
            await rig.call(session, m.Prefetch(id=1, namespace=ns, tier="gpu"), make_keys(2).tobytes())
        assert caught.value.code == ErrorCode.UNAVAILABLE

    run(scenario, settings=no_gpu)


def test_every_statistic_has_its_row_and_every_row_its_statistic():
    async def scenario(rig, _session, _ns):
        mine = {name for name in rig.manager.stats() if not name.startswith("nvme_") or name in METRICS}
        assert mine == {name for name in METRICS if not name.startswith(("server_", "daemon_"))}

    run(scenario, store=MemoryStore())


def test_a_prefix_that_was_extended_loses_its_tail_before_its_head():
    async def scenario(rig, session, ns):
        keys = make_keys(30)
        await rig.store(session, ns, keys[:10])
        await rig.store(session, ns, make_keys(PER_CHUNK, start=2))
        await rig.store(session, ns, keys)
        await rig.store(session, ns, make_keys(2 * PER_CHUNK - 15, start=3))
        left = await rig.lookup(session, ns, keys)
        assert left == 15
        visible = rig.manager.copies.blocks.find(keys, 0)
        assert visible.size == left, "a hole was left in front of a kept tail"

    run(scenario)
