"""Heat, ghost hits and the page table's figures, as statistics of a running manager."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys

SLOTS = (2 << 20) // SHAPE.slot_bytes
HOUR = 3600


def run(scenario):
    async def body():
        async with Rig(store=MemoryStore()) as rig:
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            rig.check_accounts()

    asyncio.run(body())


async def read(rig, session, ns, keys):
    reply, _ = await rig.acquire(session, ns, keys)
    await rig.release(session, reply)
    return reply.count


def heat(rig, keys):
    rows = rig.manager.copies.blocks.find_prefix(keys, 0)
    return rig.manager._demand.heat(rows).tolist()


def test_heat_is_the_sum_of_uses_and_halves_with_time():
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        await rig.store(session, ns, keys)
        await read(rig, session, ns, keys[:2])
        await rig.call(session, m.Get(id=1, namespace=ns), keys[:1].tobytes())
        assert heat(rig, keys) == [3, 2, 1]
        rig.clock.advance(HOUR)
        assert heat(rig, keys) == [1.5, 1, 0.5]
        await rig.lookup(session, ns, keys)
        assert heat(rig, keys) == [1.5, 1, 0.5]
        await read(rig, session, ns, keys)
        assert heat(rig, keys) == [2.5, 2, 1.5]

    run(scenario)


def test_heat_is_seen_in_the_statistics():
    async def scenario(rig, session, ns):
        assert [rig.manager.stats()[name] for name in ("heat_mean", "heat_max", "heat_cold_share")] == [0, 0, 0]
        await rig.store(session, ns, make_keys(4))
        for _ in range(11):
            await read(rig, session, ns, make_keys(1))
        stats = rig.manager.stats()
        assert (stats["heat_max"], stats["heat_mean"]) == (12, (12 + 3) / 4)
        assert stats["heat_cold_share"] == pytest.approx(0.75)

    run(scenario)


def test_a_new_block_in_the_row_of_a_hot_one_is_cold():
    async def scenario(rig, session, ns):
        keys = make_keys(1)
        await rig.store(session, ns, keys)
        for _ in range(9):
            await read(rig, session, ns, keys)
        await rig.call(session, m.Delete(id=1, namespace=ns), keys.tobytes())
        await rig.store(session, ns, make_keys(1, start=4))
        assert heat(rig, make_keys(1, start=4)) == [1]

    run(scenario)


def test_ghost_hits_say_what_more_memory_would_have_given():
    async def scenario(rig, session, ns):
        prompts = [make_keys(SLOTS // 4, start=number) for number in range(6)]
        for _ in range(3):
            for keys in prompts:
                await rig.store(session, ns, keys)
                await rig.call(session, m.Flush(id=1))
                rig.clock.advance(10)
                await rig.call(session, m.Delete(id=1, namespace=ns), keys.tobytes())
        stats = rig.manager.stats()
        accesses = 18 * (SLOTS // 4)
        assert stats["host_ghost_accesses"] == accesses
        # A working set of one and a half times host: LRU of its size hits nothing, a tier of 1.5 times everything.
        found = [stats[f"host_ghost_hits_{name}"] for name in ("1x", "1_25x", "1_5x", "2x", "4x")]
        assert found == [0, 0, accesses * 2 // 3, accesses * 2 // 3, accesses * 2 // 3]
        assert stats["gpu_ghost_hits_2x"] == 0
        assert stats["gpu_ghost_hits_4x"] == accesses * 2 // 3
        assert stats["nvme_ghost_accesses"] == 0, "a store that does not tell its size has no ghosts"

    run(scenario)


def test_lookups_and_blocks_that_a_store_finds_are_no_use():
    async def scenario(rig, session, ns):
        keys = make_keys(5)
        await rig.store(session, ns, keys[:3])
        await rig.lookup(session, ns, keys)
        await rig.store(session, ns, keys)
        assert rig.manager.stats()["host_ghost_accesses"] == 5

    run(scenario)


def test_the_page_tables_figures_are_exported():
    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(5))
        await rig.lookup(session, ns, make_keys(5))
        stats = rig.manager.stats()
        assert stats["index_blocks"] == 5
        assert 1 <= stats["index_buckets_touched_mean"] <= stats["index_buckets_touched_max"] <= 2

    run(scenario)
