"""Blocks of a tenant on their way from nvme: reads into host take what room there is, attention waits in line."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from kvtierd.config.schema import Attention, Tenant
from kvtierd.protocol.messages import TIER_NVME
from kvtierd.testing.attention import AttendRig, random_kv
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, small_settings
from kvtierd.tiers.under_way import UnderWay
from tests.unit.tiers.attending import SHAPE, check, queries

ROWS = np.arange(16, dtype=np.int32)
A = ("a", "nvme")


def under_way(limit: int) -> UnderWay:
    """All blocks are on nvme."""
    found = UnderWay(cast("Any", SimpleNamespace(residency=lambda rows: np.full(rows.size, TIER_NVME, np.uint8))))
    found.limits = {A: limit}
    return found


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_what_waits_in_line_sets_out_in_the_order_of_asking():
    async def body():
        way, order = under_way(8), []
        assert way.try_enter("a", 6)
        assert not way.try_enter("a", 1), "a quarter of the places is left to reads into host"

        async def ask(blocks):
            await way.enter("a", blocks)
            order.append(blocks)

        tasks = [asyncio.create_task(ask(blocks)) for blocks in (5, 1, 2)]
        await turn()
        assert order == []
        way.leave("a", 6)
        await turn()
        assert order == [5, 1], "the third finds no room"
        way.leave("a", 5)
        await asyncio.gather(*tasks)
        assert way.count("a", "nvme") == 3
        assert way.try_enter("b", 100), "another tenant has no limit"

    asyncio.run(body())


def test_reads_into_host_and_attention_do_not_keep_each_other_out():
    async def body():
        way = under_way(8)
        way.changed("a", way.leading("a", ROWS).size, gpu=False)
        assert way.count("a", "nvme") == 8
        task = asyncio.create_task(way.enter("a", 4))
        await turn()
        way.changed("a", -2, gpu=False)
        assert way.leading("a", ROWS).size == 0, "while somebody waits, no more than a quarter"
        way.changed("a", -4, gpu=False)
        await task
        assert way.count("a", "nvme") == 2 + 4
        assert way.leading("a", ROWS).size == 2

    asyncio.run(body())


def test_who_gives_up_waiting_leaves_no_trace():
    async def body():
        way = under_way(4)
        assert way.try_enter("a", 3)
        first, second = (asyncio.create_task(way.enter("a", blocks)) for blocks in (3, 1))
        await turn()
        first.cancel()
        await turn()
        way.leave("a", 3)
        await second
        third = asyncio.create_task(way.enter("a", 3))
        await turn()
        way.leave("a", 1)
        third.cancel()  # it was let go and does not know yet
        await asyncio.gather(third, return_exceptions=True)
        assert way.count("a", "nvme") == 0
        assert way.try_enter("a", 3)

    asyncio.run(body())


def test_a_limit_that_is_lifted_lets_all_go_and_what_is_over_a_lowered_one_goes_alone():
    async def body():
        way = under_way(2)
        assert way.try_enter("a", 1)
        tasks = [asyncio.create_task(way.enter("a", 5)) for _ in range(3)]
        await turn()
        way.leave("a", 1)
        await turn()
        assert way.count("a", "nvme") == 5, "more than may ever be: alone"
        way.limits = {}
        await asyncio.gather(*tasks)
        assert way.count("a", "nvme") == 15
        assert way.most("a") is None

    asyncio.run(body())


class Counting(MemoryStore):
    """Counts parts that are read at one time; a read lasts some turns of the loop."""

    now, highest = 0, 0

    async def read_layers(self, parts):
        self.now += len(parts)
        self.highest = max(self.highest, self.now)
        await asyncio.sleep(0.001)
        self.now -= len(parts)
        return await super().read_layers(parts)


def test_attention_reads_no_more_blocks_at_once_than_its_tenant_may():
    blocks = 24
    kv = random_kv(SHAPE, blocks, seed=3)

    async def attend(limit):
        tenants = {"default": Tenant(nvme_inflight=limit)}
        settings = msgspec.structs.replace(small_settings(), attention=Attention(), tenants=tenants)
        store = Counting()
        async with Rig(settings, store) as rig:
            made = await AttendRig.make(rig, kv)
            await made.place(["nvme"] * blocks)
            sequences = [await made.open() for _ in range(2)]
            replies = await asyncio.gather(
                *(check(made, sequence, queries(), layer) for sequence in sequences for layer in range(SHAPE.layers))
            )
            assert [reply.nvme_parts for reply in replies] == [blocks] * len(replies)
            rig.manager.session_detached(made.session)
            await asyncio.sleep(0.02)
            assert rig.manager.copies.under_way.count("default", "nvme") == 0
        return store.highest

    async def body():
        assert await attend(0) > 8
        for limit in (1, 4, 8):
            assert await attend(limit) <= limit

    asyncio.run(body())
