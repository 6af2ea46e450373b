"""A daemon whose memory outlives it: engines go on, also after a crash, and nothing is read from disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, Geometry, Namespace, block_keys
from kvtierd.daemon.embedded import EmbeddedDaemon, EmbeddedDaemonError
from kvtierd.testing.waiting import wait_for

SHAPE = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)
SETTINGS = {
    "host__capacity": "32MiB",
    "host__chunk_bytes": "4MiB",
    "gpu__capacity": 0,
    "nvme__capacity": "64MiB",
    "nvme__segment_bytes": "4MiB",
    "max_blocks": 65536,
}
BLOCKS = np.random.default_rng(3).integers(0, 256, (200, SHAPE.block_bytes), np.uint8)


def fetched(client: Client, model, keys) -> int:
    found = client.fetch(model, keys)
    assert (found.blocks == BLOCKS[: found.count]).all()
    return found.count


def test_case_15_client_goes_on_over_restarts_and_crashes_with_what_was_in_host(tmp_path: Path) -> None:
    with EmbeddedDaemon.warm(tmp_path / "d", **SETTINGS) as daemon, Client(daemon.endpoint, timeout_s=10) as client:
        model = client.register(Namespace(model="m", geometry=SHAPE))
        keys = block_keys(model.digest, range(200 * 16), 16)
        assert client.store(model, keys, BLOCKS).stored == 200
        for end in (daemon.kill, daemon.stop, daemon.kill):
            end()
            daemon.start()
            wait_for(lambda: client.lookup(model, keys).count == 200)
            assert fetched(client, model, keys) == 200
            stats = client.stats()
            assert (stats["warm_adopted_blocks"], stats["warm_corrupt_blocks"]) == (200, 0)
            assert stats["onboarded_blocks"] == 0
        client.flush()


def test_reservation_over_a_restart_is_out_of_use_until_the_client_lets_go_of_it(tmp_path: Path) -> None:
    with EmbeddedDaemon.warm(tmp_path / "d", **SETTINGS) as daemon, Client(daemon.endpoint, timeout_s=10) as client:
        model = client.register(Namespace(model="m", geometry=SHAPE))
        keys = block_keys(model.digest, range(200 * 16), 16)
        with client.reserve(model, keys[:10]) as mine:
            assert sum(view is not None for view in mine.views) == 10
            daemon.kill()
            daemon.start()
            wait_for(lambda: client.store(model, keys[10:], BLOCKS[10:]).stored == 190)
            assert client.stats()["warm_quarantined_slots"] == 10
            for view in mine.views:
                view[:] = 0xAA
            assert client.fetch(model, keys[10:]).count == 190
        wait_for(lambda: client.stats()["warm_quarantined_slots"] == 0)
        assert client.store(model, keys[:10], BLOCKS[:10]).stored == 10
        assert fetched(client, model, keys) == 200


def test_full_stop_drops_the_memory_and_what_is_on_disk_is_read_again(tmp_path: Path) -> None:
    with EmbeddedDaemon.warm(tmp_path / "d", **SETTINGS) as daemon, Client(daemon.endpoint, timeout_s=10) as client:
        model = client.register(Namespace(model="m", geometry=SHAPE))
        keys = block_keys(model.digest, range(200 * 16), 16)
        client.store(model, keys, BLOCKS)
        daemon.stop()
        daemon.drop_memory()
        daemon.start()
        wait_for(lambda: client.lookup(model, keys).count == 200)
        assert fetched(client, model, keys) == 200
        stats = client.stats()
        assert (stats["warm_adopted_blocks"], stats["warm_refusal"]) == (0, "")
        assert stats["onboarded_blocks"] == 200


def test_switched_off_it_begins_cold_and_keeps_nothing(tmp_path: Path) -> None:
    with EmbeddedDaemon.warm(tmp_path / "d", host__warm_restart=False, **SETTINGS) as daemon:
        with Client(daemon.endpoint, timeout_s=10) as client:
            model = client.register(Namespace(model="m", geometry=SHAPE))
            client.store(model, block_keys(model.digest, range(200 * 16), 16), BLOCKS)
        assert daemon._holder is not None
        daemon._holder.settle()
        assert daemon._holder.held == []


def test_daemon_that_was_not_made_warm_has_no_memory_to_drop(tmp_path: Path) -> None:
    daemon = EmbeddedDaemon(tmp_path / "d", **SETTINGS)
    with pytest.raises(EmbeddedDaemonError, match="nothing is held"):
        daemon.drop_memory()
    daemon.close()
