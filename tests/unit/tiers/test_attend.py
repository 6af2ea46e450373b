"""Attention through the manager: what comes back is what the float64 oracle says, wherever the blocks lie."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from kvtierd.config.schema import Attention
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.testing.attention import AttendRig, random_kv
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, small_settings

SHAPE = Geometry(block_size=16, layers=3, kv_heads=2, k_dim=32, v_dim=32)


def queries(geometry, count=2, group=3, seed=9):
    return np.random.default_rng(seed).standard_normal((count, geometry.kv_heads * group, geometry.k_dim))


def run(scenario, kv=None, *, staging=MIB, store=None, **host):
    settings = msgspec.structs.replace(small_settings(**host), attention=Attention(staging_bytes=staging))
    known = kv or random_kv(SHAPE, 7)

    async def body():
        disk = store or MemoryStore()
        async with Rig(settings, disk) as rig:
            made = await AttendRig.make(rig, known)
            await scenario(made)
            rig.manager.session_detached(made.session)
            await asyncio.sleep(0.01)
            assert not rig.manager.copies.host.pool.holds.any(), "something of host is held for ever"
            assert not rig.manager.copies.gpu.pool.holds.any(), "something of gpu is held for ever"
            assert not rig.manager.copies.blocks.table.moves.any(), "a row is kept for ever"
            assert rig.manager._attention.ring.used_bytes == 0, "a part of the ring was not given back"
            rig.check_accounts()

    asyncio.run(body())


async def check(made, sequence, q, layer=0, length=None, **options):
    lengths = {} if length is None else {"lengths": [length]}
    output, lse, reply = await made.attend(sequence, q, layer, **lengths, **options)
    size = length or len(made.kv.names) * made.kv.geometry.block_size
    expected, expected_lse = made.kv.reference(q.astype(np.float32), layer, size, **options)
    assert relative_error(output, expected) <= 1e-5
    assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    return reply


@pytest.mark.parametrize("tier", ["gpu", "host", "nvme"])
def test_every_layer_of_blocks_in_one_tier(tier):
    async def scenario(made):
        await made.place([tier] * 7)
        sequence = await made.open()
        for layer in range(SHAPE.layers):
            reply = await check(made, sequence, queries(SHAPE), layer)
            assert [reply.gpu_parts, reply.host_parts, reply.nvme_parts] == [
                7 * (tier == t) for t in ("gpu", "host", "nvme")
            ]

    run(scenario)
