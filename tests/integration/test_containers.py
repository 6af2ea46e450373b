"""Engines in containers: what the kernel's namespaces let through, and what the daemon makes of what they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtierd.daemon.embedded import EmbeddedDaemon

ROOT = Path(__file__).parents[2]
SMALL = {"host__capacity": "16MiB", "host__chunk_bytes": "8MiB", "gpu__capacity": "0", "nvme__directory": ""}
CONTAINER = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--ipc", "--net", "--uts"]
CLIENT = """
import json, sys
import numpy as np
from kvtierd import Client, Geometry, Namespace, block_keys
space = Namespace(model="m", geometry=Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64))
with Client(sys.argv[1], timeout_s=20, transfer_timeout_s=20) as client:
    handle = client.register(space)
    keys = block_keys(handle.digest, range(8 * 16), 16)
    blocks = np.random.default_rng(1).integers(0, 256, (8, space.geometry.block_bytes), np.uint8)
    stored = client.store(handle, keys, blocks).stored
    same = bool((client.fetch(handle, keys).blocks == blocks).all())
    stats = client.stats()
    print(json.dumps({"stored": stored, "same": same, "attached": stats.get("server_arena_attached_total", 0),
                      "refused": stats.get("server_arena_refused_total", 0)}))
"""


def may_unshare() -> bool:
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not may_unshare(), reason="namespaces cannot be made here: not root, or forbidden")


def contained_client(endpoint: str) -> dict[str, object]:
    command = [*CONTAINER, sys.executable, "-P", "-c", CLIENT, endpoint]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_engine_in_a_container_uses_the_arena_of_a_daemon_outside(tmp_path: Path) -> None:
    with EmbeddedDaemon(tmp_path / "d", **SMALL) as daemon:
        assert contained_client(daemon.endpoint) == {"stored": 8, "same": True, "attached": 1, "refused": 0}


def test_daemon_that_cannot_see_a_process_serves_it_in_frames(tmp_path: Path) -> None:
    daemon = EmbeddedDaemon(tmp_path / "d", **SMALL)
    # An interpreter that is in a pid namespace of its own, as a container without --pid=host is.
    contained = tmp_path / "python"
    contained.write_text(f'#!/bin/sh\nexec unshare --pid --fork --kill-child {sys.executable} "$@"\n')
    contained.chmod(0o755)
    daemon.python = str(contained)
    daemon.start()
    try:
        found = contained_client(daemon.endpoint)
        assert (found["stored"], found["same"], found["attached"]) == (8, True, 0)
        assert int(str(found["refused"])) >= 1
        assert "pid=1" in daemon.logs()
    finally:
        daemon.kill()  # `unshare` passes no other signal on
        daemon.close()
