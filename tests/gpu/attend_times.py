"""Attend as the daemon serves it, timed on a GPU: blocks in each tier, and in all three, for tests/gpu/run.sh.

Through the tier manager, without sockets: what a client would wait for, less the way to it. Each answer is compared
with the float64 oracle first. The nvme tier is a store in memory (`kvtierd.testing.memory_store`), so that its row
says what the ring, the checksums and the bus take, and not the disk. It has not run on a GPU yet.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from kvtierd.config.schema import Attention, Gpu, Host, Leases, Nvme, Settings
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.protocol.messages import CloseSequence, Tier
from kvtierd.testing.attention import AttendRig, random_kv
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig

SHAPE = Geometry(block_size=128, layers=1, kv_heads=8, k_dim=128, v_dim=128)
HEADS, ROUNDS = 32, 20
PLACES: Mapping[str, Sequence[Tier]] = {
    "gpu": ["gpu"],
    "host": ["host"],
    "nvme": ["nvme"],
    "all three": ["gpu", "host", "nvme"],
}
TOLERANCE = 2e-5
"""Of tensor cores with q and weights in two halves of 8 bits; on CUDA cores it is 1e-5."""


def settings(device: str, blocks: int) -> Settings:
    """Room for all blocks in gpu and in host."""
    room = max(2 * blocks * SHAPE.slot_bytes, 128 * MIB)
    return Settings(
        host=Host(capacity=room, chunk_bytes=64 * MIB, watermark=0.95),
        gpu=Gpu(device=device, capacity=room),
        nvme=Nvme(write_queue_bytes=room // 4),
        leases=Leases(max_leases=64),
        attention=Attention(staging_bytes=64 * MIB, kept_share=0.9),
        max_blocks=65_536,
    )


def attend_seconds(device: str, blocks: int = 256) -> dict[str, float]:
    """Median time of a call by where the blocks lie; AssertionError for an answer that is wrong."""
    return asyncio.run(_all(device, blocks))


async def _all(device: str, blocks: int) -> dict[str, float]:
    kv = random_kv(SHAPE, blocks)
    q = np.random.default_rng(3).standard_normal((1, HEADS, SHAPE.k_dim)).astype(np.float32)
    expected, expected_lse = kv.reference(q, 0, blocks * SHAPE.block_size)
    found: dict[str, float] = {}
    async with Rig(settings(device, blocks), MemoryStore()) as rig:
        await rig.manager._room.pinning.settled()
        made = await AttendRig.make(rig, kv)
        for name, tiers in PLACES.items():
            await made.place([tiers[i % len(tiers)] for i in range(blocks)])
            sequence = await made.open()
            output, lse, reply = await made.attend(sequence, q)
            assert relative_error(output, expected) <= TOLERANCE, f"blocks in {name}: the answer is wrong"
            assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5), f"blocks in {name}: log-sum-exp is wrong"
            where = {"gpu": reply.gpu_parts, "host": reply.host_parts, "nvme": reply.nvme_parts}
            assert all(bool(where[tier]) == (tier in tiers) for tier in where), f"blocks in {name} lay in {where}"
            found[name] = await _median(made, sequence, q)
            await rig.call(made.session, CloseSequence(id=1, sequences=[sequence]))  # it holds the blocks there
    return found


async def _median(made: AttendRig, sequence: int, q: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float:
    times = []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        await made.attend(sequence, q)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)
