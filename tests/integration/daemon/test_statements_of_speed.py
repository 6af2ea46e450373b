"""A client that says how fast it computes, against a real daemon with a real disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from kvtierd import AsyncClient, Client, Geometry, Namespace, block_keys
from kvtierd.daemon.embedded import EmbeddedDaemon

SPACE = Namespace(model="m", geometry=Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64))
SMALL = {"host__capacity": "8MiB", "host__chunk_bytes": "4MiB", "gpu__capacity": "0", "nvme__segment_bytes": "4MiB"}
BLOCKS = 12


async def _asked_by_the_other_client(endpoint: str, keys: np.ndarray) -> int | None:
    client = AsyncClient(endpoint, timeout_s=5)
    try:
        handle = await client.register(SPACE)
        return (await client.lookup(handle, keys, prefill_tokens_per_s=1.0)).load
    finally:
        await client.close()


def test_slow_engines_load_fast_ones_compute_and_silent_ones_get_no_advice(tmp_path: Path) -> None:
    with EmbeddedDaemon(tmp_path / "d", **SMALL) as daemon, Client(daemon.endpoint, timeout_s=5) as client:
        handle = client.register(SPACE)
        keys = block_keys(handle.digest, range(BLOCKS * 16), 16)
        assert client.lookup(handle, keys, prefill_tokens_per_s=1.0).load == 0, "nothing is stored yet"
        blocks = np.zeros((BLOCKS, SPACE.geometry.block_bytes), np.uint8)
        assert client.store(handle, keys, blocks).stored == BLOCKS
        client.flush()
        client.purge(handle, tiers=["host"])
        assert client.lookup(handle, keys).load is None
        slow = client.lookup(handle, keys, prefill_tokens_per_s=1.0)
        assert slow.count == slow.load == BLOCKS
        assert slow.load_ns > 0
        fast = client.lookup(handle, keys, prefill_tokens_per_s=1e12)
        assert (fast.count, fast.load, fast.load_ns) == (BLOCKS, 0, 0)
        assert client.lookup_group([handle], [keys], prefill_tokens_per_s=1.0).load == BLOCKS
        assert asyncio.run(_asked_by_the_other_client(daemon.endpoint, keys)) == BLOCKS
        stats = client.stats()
        assert stats["advised_against_blocks"] == BLOCKS
        assert stats["nvme_ghost_accesses"] == BLOCKS, "a real store tells its size"
