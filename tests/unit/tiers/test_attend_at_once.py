"""Several sequences at once: small ones are computed side by side, and a ring too small for all keeps none waiting."""

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
from tests.unit.tiers import attending
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


def test_requests_of_similar_length_are_computed_as_one_batch():
    async def scenario(made):
        await made.place(["host"] * attending.BLOCKS)
        sequences, q = [await made.open() for _ in range(4)], attending.queries()
        counters = made.rig.manager.copies.counters
        alone = [await made.attend(sequence, q, 0) for sequence in sequences]
        assert counters["attend_batches"] == 0
        together = await asyncio.gather(*(made.attend(sequence, q, 0) for sequence in sequences))
        assert counters["attend_batches"] > 0
        assert counters["attend_batched_pieces"] >= 2 * counters["attend_batches"]
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], other[0])

    attending.run(scenario)
