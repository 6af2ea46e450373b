"""Full pools for a while: what the daemon holds does not grow, and its accounts are what its pools hold."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, Geometry, Namespace, block_keys
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.testing.waiting import wait_for

MIB = 1 << 20
HOST, GPU, NVME = 32 * MIB, 8 * MIB, 96 * MIB
FULL = {
    "host__capacity": "32MiB",
    "host__chunk_bytes": "8MiB",
    "gpu__capacity": "8MiB",
    "nvme__capacity": "96MiB",
    "nvme__segment_bytes": "8MiB",
    "max_blocks": "8192",
    "server__session_idle_s": "16",  # asks every 4 s who is gone: nobody hangs up for a client without the arena
}
SPACES = [
    Namespace(model="small", geometry=Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)),
    Namespace(model="large", geometry=Geometry(block_size=64, layers=4, kv_heads=4, k_dim=64, v_dim=64)),
]
GROWTH_BYTES = 16 * MIB
"""Columns and caches of new blocks are touched as they come; a leak of a block a request is more."""


class Load:
    """Clients that come and go, store and fetch at random, and leave some things behind."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self._endpoint = endpoint
        self._rng = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self.requests = 0

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            arena = self._rng.random() < 0.7
            with Client(self._endpoint, timeout_s=20, transfer_timeout_s=20, arena=arena) as client:
                for _ in range(20):
                    self._once(client)

    def _once(self, client: Client) -> None:
        space = self._rng.choice(SPACES)
        handle, size = client.register(space), space.geometry.block_size
        first = self._rng.randrange(200) * 1_000_000
        keys = block_keys(handle.digest, range(first, first + self._rng.randint(1, 12) * size), size)
        self.requests += 1
        kind = self._rng.random()
        if kind < 0.5:
            blocks = self._numbers.integers(0, 256, (len(keys), space.geometry.block_bytes), np.uint8)
            client.store(handle, keys, blocks)
        elif kind < 0.85:
            client.fetch(handle, keys)
        elif kind < 0.9:
            client.prefetch(handle, keys, tier="gpu", wait=True)
        elif kind < 0.93:
            client.delete(handle, keys[:1])
        elif kind < 0.96:
            client.pin(handle, keys[:2])  # ends with the session
        else:
            client.lookup(handle, keys)


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=[pytest.mark.torture, pytest.mark.timeout(300)])])
def test_case_19_at_full_pools_memory_stays_flat_and_accounts_equal_the_pools(tmp_path: Path, seconds: int) -> None:
    with EmbeddedDaemon(tmp_path / "d", **FULL) as daemon:
        load = Load(daemon.endpoint, seed=5)
        with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as watcher:
            load.run(max(6, seconds / 3))
            filled = watcher.stats()
            assert filled["host_evicted_blocks"] > 0, "the host tier has been full"
            assert filled["nvme_reclaimed_blocks"] > 0 or filled["nvme_used_bytes"] > NVME // 2
            load.run(seconds)
            after = watcher.stats()
            assert after["daemon_resident_bytes"] <= filled["daemon_resident_bytes"] + GROWTH_BYTES
            check_accounts(watcher)
            watcher.register(SPACES[0])
            watcher.purge()
            watcher.flush()
            wait_for(lambda: watcher.stats()["host_used_bytes"] == 0)
            empty = watcher.stats()
            assert (empty["gpu_used_bytes"], empty["host_blocks"], empty["nvme_blocks"]) == (0, 0, 0)
        assert "ERROR" not in daemon.logs()
        assert load.requests > seconds, "it was a load"


def check_accounts(watcher: Client) -> None:
    """With nobody at work, what is in use is what blocks there are."""
    watcher.flush()
    wait_for(lambda: watcher.stats()["server_sessions"] == 1)
    wait_for(lambda: watcher.stats()["write_queue_bytes"] == 0)
    stats = watcher.stats()
    assert (stats["leases"], stats["reservations"], stats["pinned_bytes"]) == (0, 0, 0)
    assert stats["host_used_bytes"] <= stats["host_capacity_bytes"] == HOST
    assert stats["gpu_used_bytes"] <= stats["gpu_capacity_bytes"] == GPU
    assert stats["nvme_used_bytes"] <= NVME
    sizes = [space.geometry.slot_bytes for space in SPACES]
    for tier in ("host", "gpu"):
        blocks, used = stats[f"{tier}_blocks"], stats[f"{tier}_used_bytes"]
        # So many blocks of these two sizes and no slot more: used = small x s + large x (blocks - s).
        small, rest = divmod(blocks * max(sizes) - used, max(sizes) - min(sizes))
        assert rest == 0, (tier, blocks, used)
        assert 0 <= small <= blocks, (tier, blocks, used)
