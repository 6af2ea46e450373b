"""What clients tell a real daemon with a real disk: how fast they compute, and what comes before a piece."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from kvtierd import AsyncClient, Client, Geometry, Namespace, block_keys
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol import transfers

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


@pytest.mark.parametrize("arena", [True, False])
def test_the_pieces_of_a_long_prefix_say_what_comes_before_them(
    tmp_path: Path, arena: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 3 * SPACE.geometry.slot_bytes)
    # Without the arena a piece is what a message holds: one block.
    settings = {"nvme__admission": "second-access", "server__max_message_bytes": "1MiB"}
    with (
        EmbeddedDaemon(tmp_path / "d", **SMALL, **settings) as daemon,
        Client(daemon.endpoint, timeout_s=5, arena=arena) as client,
    ):
        handle = client.register(SPACE)
        keys = block_keys(handle.digest, range(BLOCKS * 16), 16)
        blocks = np.zeros((BLOCKS, SPACE.geometry.block_bytes), np.uint8)
        assert client.store(handle, keys, blocks).stored == BLOCKS
        client.flush()
        first = client.stats()
        assert first["nvme_blocks"] == 0
        assert 0 < first["offload_behind_hole_blocks"] < BLOCKS, "pieces behind the first follow a hole"
        assert client.fetch(handle, keys).count == BLOCKS
        client.flush()
        second = client.stats()
        assert second["nvme_blocks"] == BLOCKS, "the second use writes all of it, piece by piece in order"
        assert second["offload_behind_hole_blocks"] == first["offload_behind_hole_blocks"]
