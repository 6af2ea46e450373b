"""A daemon that is killed, and the blocks that it had flushed: found after the next start, byte for byte."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.storage.checker import Verdict, check_store

SPACE = Namespace(model="killed", geometry=Geometry(block_size=16, layers=4, kv_heads=2, k_dim=64, v_dim=64))
COUNT = 24


def keys_of(turn: int) -> np.ndarray:
    return np.random.default_rng(turn).integers(0, 256, (COUNT, 32), np.uint8)


def blocks_of(turn: int) -> np.ndarray:
    return np.random.default_rng(1000 + turn).integers(0, 256, (COUNT, SPACE.geometry.block_bytes), np.uint8)


def verify(client: Client, turns: range) -> None:
    handle = client.register(SPACE)
    for turn in turns:
        found = client.fetch(handle, keys_of(turn))
        assert found.count == COUNT, f"blocks of turn {turn} are gone"
        assert np.array_equal(found.blocks[:COUNT], blocks_of(turn))


@pytest.mark.timeout(110)
def test_case_10_flushed_blocks_are_found_after_each_kill(tmp_path: Path) -> None:
    fields = {"host__capacity": "64MiB", "host__chunk_bytes": "8MiB", "gpu__capacity": 0, "nvme__segment_bytes": "4MiB"}
    with EmbeddedDaemon(tmp_path / "d", nvme__capacity="64MiB", **fields) as daemon:
        for turn in range(4):
            with Client(daemon.endpoint, timeout_s=20.0, transfer_timeout_s=20.0) as client:
                verify(client, range(turn))
                handle = client.register(SPACE)
                assert client.store(handle, keys_of(turn), blocks_of(turn)).stored == COUNT
                client.flush()
            daemon.kill()
            report = asyncio.run(check_store(daemon.data_dir, verify_data=True))
            assert report.verdict is Verdict.CLEAN, report.findings
            assert report.live_blocks == (turn + 1) * COUNT
            if turn == 2:
                for path in [*daemon.data_dir.glob("checkpoint-*"), *daemon.data_dir.glob("journal-*")]:
                    path.unlink()
            daemon.start()
        with Client(daemon.endpoint, timeout_s=20.0, transfer_timeout_s=20.0) as client:
            verify(client, range(4))


def test_case_06_daemon_on_a_directory_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    fields = {"host__capacity": "16MiB", "host__chunk_bytes": "1MiB", "gpu__capacity": 0, "nvme__segment_bytes": "4MiB"}
    with EmbeddedDaemon(tmp_path / "d", nvme__capacity="64MiB", **fields) as daemon:
        command = [sys.executable, "-m", "kvtierd.daemon.main", "--set", f"nvme.directory={daemon.data_dir}"]
        options = {"server.runtime_dir": tmp_path / "run", "host.capacity": "16MiB", "host.chunk_bytes": "1MiB"}
        (tmp_path / "run").mkdir(mode=0o700)
        command += [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 75, second.stderr
        assert f"in use by process {daemon.pid}" in second.stderr
        with Client(daemon.endpoint, timeout_s=20.0) as client:
            assert client.stats()["nvme_state"] == "ok"
