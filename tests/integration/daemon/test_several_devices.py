"""The daemon on several devices, as an operator configures them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.client import Client

GEOMETRY = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=32, v_dim=32, dtype="fp16")
COUNT = 64


def test_blocks_come_back_from_all_devices_after_a_restart(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    settings = {
        "nvme__directory": ":".join(map(str, folders)),
        "nvme__capacity": "16MiB",
        "nvme__segment_bytes": "1MiB",
        "host__capacity": "64MiB",
        "gpu__capacity": 0,
    }
    keys = np.random.default_rng(1).integers(0, 256, (COUNT, 32), np.uint8)
    blocks = np.random.default_rng(2).integers(0, 256, (COUNT, GEOMETRY.block_bytes), np.uint8)
    with EmbeddedDaemon(tmp_path / "d", **settings) as daemon:
        with Client(daemon.endpoint) as client:
            handle = client.register(Namespace(model="m", geometry=GEOMETRY))
            for at in range(0, COUNT, 8):
                assert client.store(handle, keys[at : at + 8], blocks[at : at + 8]).stored == 8
                client.flush()
            stats = client.stats()
            assert (stats["nvme_devices"], stats["nvme_failed_devices"]) == (2, 0)
            assert stats["nvme_live_extents"] == COUNT
        assert all(list(folder.glob("segment-*")) for folder in folders)
        daemon.restart()
        with Client(daemon.endpoint) as client:
            handle = client.register(Namespace(model="m", geometry=GEOMETRY))
            found = client.fetch(handle, keys)
            assert found.count == COUNT
            assert np.array_equal(found.blocks, blocks)
