"""A manager with a sequence of random KV, and the check that attention over it is right and leaves nothing behind."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from kvtierd.config.schema import Attention
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.testing.attention import AttendRig, random_kv
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, small_settings

SHAPE = Geometry(block_size=16, layers=3, kv_heads=2, k_dim=32, v_dim=32)
BLOCKS = 7


def queries(geometry=SHAPE, count=2, group=3, seed=9):
    return np.random.default_rng(seed).standard_normal((count, geometry.kv_heads * group, geometry.k_dim))


async def attending(rig, kv):
    """A client of its own with a sequence."""
    return await AttendRig.make(rig, kv)


def run(scenario, kv=None, *, staging=MIB, store=None, attention=None, **host):
    """Run a scenario over stored KV; afterwards nothing may be held, kept or taken."""
    fields = {"staging_bytes": staging, **(attention or {})}
    settings = msgspec.structs.replace(small_settings(**host), attention=Attention(**fields))
    known = kv or random_kv(SHAPE, BLOCKS)

    async def body():
        async with Rig(settings, store or MemoryStore()) as rig:
            made = await attending(rig, known)
            await scenario(made)
            rig.manager.session_detached(made.session)
            await asyncio.sleep(0.02)
            copies, table = rig.manager.copies, rig.manager.copies.blocks.table
            assert not copies.host.pool.holds.any(), "something of host is held for ever"
            assert not copies.gpu.pool.holds.any(), "something of gpu is held for ever"
            if not copies.shapes.extents:
                assert not table.moves.any(), "a row is kept for ever"
            assert rig.manager._attention.ring.used_bytes == 0, "a part of the ring was not given back"
            assert rig.manager.stats()["attend_running"] == 0
            rig.check_accounts()

    asyncio.run(body())


async def check(made, sequence, q, layer=0, length=None, **options):
    """Attend, compare with the oracle; the reply."""
    lengths = {} if length is None else {"lengths": [length]}
    output, lse, reply = await made.attend(sequence, q, layer, **lengths, **options)
    size = length or len(made.kv.names) * made.kv.geometry.block_size
    expected, expected_lse = made.kv.reference(q.astype(np.float32), layer, size, **options)
    assert relative_error(output, expected) <= 1e-5
    assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    return reply
