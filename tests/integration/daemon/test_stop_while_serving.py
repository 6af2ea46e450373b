"""SIGTERM under load: what is dirty is written first, and everything of it is there afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from kvtierd import Client, Geometry, Namespace, block_keys
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.testing.waiting import wait_for

SHAPE = Geometry(block_size=64, layers=32, kv_heads=2, k_dim=128, v_dim=128)
BLOCKS = 96
SETTINGS = {"host__capacity": "512MiB", "gpu__capacity": 0, "nvme__capacity": "512MiB", "nvme__segment_bytes": "64MiB"}


def test_term_writes_the_backlog_and_loses_nothing_while_a_reader_looks_on(tmp_path: Path) -> None:
    blocks = np.random.default_rng(5).integers(0, 256, (BLOCKS, SHAPE.block_bytes), np.uint8)
    with EmbeddedDaemon(tmp_path, **SETTINGS) as daemon:
        with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=60) as client:
            model = client.register(Namespace(model="m", geometry=SHAPE))
            keys = block_keys(model.digest, range(BLOCKS * SHAPE.block_size), SHAPE.block_size)
            wait_for(lambda: client.stats()["host_ready_bytes"] == 512 << 20, timeout_s=60)
            assert client.store(model, keys, blocks).stored == BLOCKS
            stopped = threading.Event()
            found: list[int] = []

            def look() -> None:
                with Client(daemon.endpoint, timeout_s=0.5) as reader:
                    handle = reader.register(Namespace(model="m", geometry=SHAPE))
                    while not stopped.is_set():
                        found.append(reader.lookup(handle, keys).count)

            reading = threading.Thread(target=look)
            reading.start()
            wait_for(lambda: bool(found))
            code = daemon.stop()
            stopped.set()
            reading.join()
        log = daemon.logs()
        assert code == 0
        # A hit of every block or, once the daemon has gone, of none: never a part.
        assert set(found) <= {0, BLOCKS}
        assert "flushing" in log
        assert log.rstrip().endswith("stopped")
        daemon.start()
        with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=60) as client:
            model = client.register(Namespace(model="m", geometry=SHAPE))
            again = client.fetch(model, keys)
            assert again.count == BLOCKS
            assert (again.blocks == blocks).all()
