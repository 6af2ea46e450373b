"""Several sequences share a staging ring that cannot hold what all of them want: each goes on, and no part is lost."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from kvtierd.config.schema import Attention
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.testing.attention import AttendRig, random_kv
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, small_settings
from tests.unit.tiers.attending import check

SHAPE = Geometry(block_size=64, layers=3, kv_heads=2, k_dim=64, v_dim=64)
BLOCKS, CLIENTS, TURNS = 24, 4, 40


def test_sequences_that_crowd_the_ring_take_from_what_came_ahead_and_all_go_on():
    kv = random_kv(SHAPE, BLOCKS, seed=2)
    settings = msgspec.structs.replace(
        small_settings(capacity=16 * MIB, chunk_bytes=4 * MIB), attention=Attention(staging_bytes=MIB)
    )
    trouble = []

    async def client(rig, number):
        session = rig.session()
        made = AttendRig(rig, kv, session, await rig.register(session, kv.namespace))
        sequence = await made.open()
        q = np.random.default_rng(number).standard_normal((1, 4, 64))
        for turn in range(TURNS):
            await check(made, sequence, q, turn % SHAPE.layers)

    async def body():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: trouble.append(context))
        async with Rig(settings, MemoryStore()) as rig:
            await (await AttendRig.make(rig, kv)).place(["nvme"] * BLOCKS)
            await asyncio.wait_for(asyncio.gather(*(client(rig, number) for number in range(CLIENTS))), 100)

    asyncio.run(body())
    assert not trouble
