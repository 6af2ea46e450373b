"""A host tier whose working set is larger than itself: some hit, streams flow, and the rest is told to come back."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Grant, Rig, make_keys
from kvtierd.tiers.pressure import PASSING_SHARE

SLOTS = (2 << 20) // SHAPE.slot_bytes
PROMPT = 17
PROMPTS = 3 * SLOTS // (2 * PROMPT)
"""A working set of one and a half times host."""
LARGE = Geometry(block_size=64, layers=4, kv_heads=4, k_dim=64, v_dim=64, dtype="bf16")


def run(scenario, *, store=True):
    async def body():
        async with Rig(store=MemoryStore() if store else None) as rig:
            rig.manager._reads.prefetcher.window = 0
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            rig.check_accounts()

    asyncio.run(body())


async def read(rig, session, ns, keys):
    """(blocks read, of them found in host)."""
    reply, descriptors = await rig.acquire(session, ns, keys)
    if reply.lease:
        await rig.release(session, reply)
    return reply.count, int(np.count_nonzero(descriptors["source"] & m.TIER_HOST))


async def go_round(rig, session, ns, prompts, *, seconds=1):
    """Read every prompt once: (blocks read, found in host)."""
    found = np.zeros(2, np.int64)
    for keys in prompts:
        found += await read(rig, session, ns, keys)
        rig.clock.advance(seconds)
    return found.tolist()


async def stored(rig, session, ns, count=PROMPTS):
    prompts = [make_keys(PROMPT, start=number) for number in range(count)]
    for keys in prompts:
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        rig.clock.advance(1)
    return prompts


async def thrashing(rig, session, ns):
    prompts = await stored(rig, session, ns)
    for _ in range(4):
        await go_round(rig, session, ns, prompts)
    assert rig.manager.stats()["thrash_active_classes"] == 1
    return prompts


def test_a_working_set_over_capacity_is_seen_and_then_some_of_it_hits():
    async def scenario(rig, session, ns):
        prompts = await stored(rig, session, ns)
        assert rig.manager.stats()["thrash_active_classes"] == 0
        for _ in range(4):
            await go_round(rig, session, ns, prompts)
        stats = rig.manager.stats()
        assert stats["thrash_active_classes"] == stats["thrash_episodes"] == 1
        assert stats["thrash_refetched_share"] > 0.9
        blocks, in_host = await go_round(rig, session, ns, prompts)
        assert blocks == PROMPTS * PROMPT, "nobody was turned away: reads pass through"
        assert in_host > blocks * 0.4, "LRU alone would have found none"

    run(scenario)


def test_what_finds_no_place_is_told_when_to_come_back():
    async def scenario(rig, session, ns):
        prompts = await thrashing(rig, session, ns)
        leases = []
        refused = None
        for keys in prompts:
            try:
                reply, _ = await rig.acquire(session, ns, keys)
            except RequestError as error:
                refused = error
                break
            leases.append(reply)
        assert refused is not None, "leases held every passing slot"
        assert refused.code == ErrorCode.BUSY
        assert 10 <= refused.retry_after_ms <= 10_000
        assert rig.manager.stats()["thrash_refused_blocks"] > 0
        grant = await rig.call(session, m.Reserve(id=1, namespace=ns), make_keys(5, start=900).tobytes())
        assert grant.reply.granted == 0
        assert grant.reply.retry_after_ms >= 10
        for lease in leases:
            await rig.release(session, lease)
        assert await rig.store(session, ns, make_keys(5, start=900)) == 5

    run(scenario)


def test_stores_pass_through_too():
    async def scenario(rig, session, ns):
        await thrashing(rig, session, ns)
        for number in range(100, 130):
            assert await rig.store(session, ns, make_keys(PROMPT, start=number)) == PROMPT
            await rig.call(session, m.Flush(id=1))
            rig.clock.advance(0.01)
        assert await rig.lookup(session, ns, make_keys(PROMPT, start=100)) == PROMPT

    run(scenario)


@pytest.mark.parametrize("pieces", [1, 3])
def test_what_passes_through_leaves_no_hole_before_a_block_that_stays(pieces):
    async def scenario(rig, session, ns):
        prompts = [make_keys(PROMPT, start=number) for number in range(PROMPTS)]
        pages = rig.manager.copies.blocks.pages
        active = 0
        for number in range(6 * PROMPTS):
            keys = prompts[number % PROMPTS]
            parent = b""
            for piece in np.array_split(keys, pieces):
                answer = await rig.call(session, m.Reserve(id=1, namespace=ns, parent=parent), piece.tobytes())
                grant = Grant(answer.reply.reservation, np.frombuffer(answer.frames[0], m.SLOT_DTYPE))
                if grant.id:
                    await rig.commit(session, grant, rig.fill(grant, piece))
                if (grant.descriptors["status"] == m.SLOT_BUSY).any():
                    break  # what comes behind would have a hole before it by the client's choice
                parent = piece[-1].tobytes()
            rig.clock.advance(1)
            active += rig.manager.stats()["thrash_active_classes"]
            if number % 7 == 0:
                for others in prompts:
                    there = pages.lookup(others, 0) >= 0
                    assert there[: int(there.sum())].all(), "a block stayed without the one before it"
        assert active > PROMPTS, "the guard was not active: nothing was tested"

    run(scenario, store=False)


def test_the_guard_leaves_when_the_load_does():
    async def scenario(rig, session, ns):
        prompts = await thrashing(rig, session, ns)
        few = prompts[: PROMPTS // 3]
        for _ in range(8):
            await go_round(rig, session, ns, few, seconds=10)
            await asyncio.sleep(0.12)
        stats = rig.manager.stats()
        assert (stats["thrash_active_classes"], stats["thrash_episodes"]) == (0, 1)
        assert await go_round(rig, session, ns, few) == [len(few) * PROMPT] * 2

    run(scenario)


def test_the_guard_leaves_when_nobody_asks():
    async def scenario(rig, session, ns):
        await thrashing(rig, session, ns)
        for _ in range(2):  # the window that was under way when the load ended, and an empty one
            rig.clock.advance(1000)
            await asyncio.sleep(0.12)
        assert rig.manager.stats()["thrash_active_classes"] == 0

    run(scenario)


def test_a_stream_of_new_prompts_is_no_thrashing():
    async def scenario(rig, session, ns):
        for number in range(3 * PROMPTS):
            assert await rig.store(session, ns, make_keys(PROMPT, start=number)) == PROMPT
            rig.clock.advance(1)
        assert rig.manager.stats()["thrash_episodes"] == 0

    run(scenario, store=False)


@pytest.mark.parametrize("order", ["small first", "large first"])
def test_namespaces_of_different_block_sizes_do_not_starve_each_other(order):
    async def scenario(rig, session, small):
        large = await rig.register(session, Namespace(model="large", geometry=LARGE))
        prompts = [
            make_keys(2, start=number, namespace=Namespace(model="large", geometry=LARGE)) for number in range(2)
        ]

        async def use_large():
            for keys in prompts:
                await rig.store(session, large, keys, LARGE)
                await rig.call(session, m.Flush(id=1))

        if order == "large first":
            await use_large()
        turns = await stored(rig, session, small)
        served = []
        for turn in range(8):
            await go_round(rig, session, small, turns[turn % 2 :: 2])
            await asyncio.sleep(0.06)  # a chunk that changes its class is made anew
            await rig.manager.memory_ready()
            await use_large()
            served.append((await go_round(rig, session, large, prompts))[0])
        assert rig.manager.stats()["thrash_episodes"] >= 1, "the small ones thrash"
        assert served[2:] == [4] * 6, "and the large ones are served all the same"
        slabs = [len(cls.slabs) for cls in rig.manager.copies.host.pool.classes if cls.slabs]
        assert slabs == [1, 1]
        passing = SLOTS // 2 // PASSING_SHARE
        for keys in turns[:3]:
            assert (await read(rig, session, small, keys))[0] >= passing

    run(scenario)
