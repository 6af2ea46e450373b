"""A server as a process that can be frozen and killed, and clients with short deadlines."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys, block_keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.client import Client
from kvtierd.testing.fake_daemon import ProcessDaemon

SPACE = Namespace(model="m", geometry=Geometry(block_size=4, layers=3, kv_heads=2, k_dim=8, v_dim=4, dtype="fp32"))
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvt-") as path:
        yield Path(path)


@pytest.fixture
def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/kvtierd.sock"


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[], ProcessDaemon]]:
    """Start daemons on the same folder, one after the other."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(ProcessDaemon(folder))


@pytest.fixture(params=["arena", "frames"])
def client(request: pytest.FixtureRequest, endpoint: str) -> Iterator[Client]:
    with Client(endpoint, timeout_s=0.3, transfer_timeout_s=0.6, arena=request.param == "arena") as made:
        yield made


def keys_of(count: int, first_token: int = 0) -> Keys:
    size = SPACE.geometry.block_size
    return block_keys(SPACE.digest(), range(first_token, first_token + count * size), size)


def blocks_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SPACE.geometry.block_bytes), np.uint8)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens in another process; 40 s are for a busy machine."""
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def python(*arguments: str, **options: object) -> subprocess.Popen[str]:
    """A Python process of its own, in the repository."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)  # type: ignore[call-overload, no-any-return]
