"""What the benches store: a namespace of a given block size, keys, and a daemon with a client on top."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.rows import BenchError
from kvtierd.core.checksum import CopyParts
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import MIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.client import Client

BATCH = 32
BLOCK_BYTES = 2 * MIB
LARGE = Geometry(block_size=64, layers=32, kv_heads=2, k_dim=128, v_dim=128)
"""A block of 2 MiB: 32 layers of 64 KiB."""
SMALL = Geometry(block_size=16, layers=1, kv_heads=1, k_dim=64, v_dim=64)
"""A block of one page: for what does not look at the bytes."""
TIMEOUT_S = 60.0
"""For every call: a stall is a slow figure, and no miss."""

assert LARGE.block_bytes == LARGE.slot_bytes == BLOCK_BYTES


def namespace(geometry: Geometry) -> Namespace:
    """The namespace that a bench stores in."""
    return Namespace(model="kvtierd-bench", geometry=geometry)


def random_keys(count: int, seed: int) -> Keys:
    """`count` keys, [count, 32] uint8: as evenly spread as hashes are."""
    return np.random.default_rng(seed).integers(0, 256, (count, KEY_BYTES), np.uint8)


@contextlib.contextmanager
def daemon_and_client(folder: Path, copy_threads: int, **settings: object) -> Iterator[tuple[EmbeddedDaemon, Client]]:
    """A daemon with the `gpu` tier on ordinary memory and one client, for the length of the block."""
    with EmbeddedDaemon(folder, gpu__device="host", **settings) as daemon, connected(daemon, copy_threads) as client:
        await_memory(client)
        yield daemon, client


def connected(daemon: EmbeddedDaemon, copy_threads: int, copies: CopyParts | None = None) -> Client:
    """A client, patient as benches are, that moves blocks with `copies`."""
    return Client(
        daemon.endpoint, timeout_s=TIMEOUT_S, transfer_timeout_s=TIMEOUT_S, copy_threads=copy_threads, copies=copies
    )


def await_memory(client: Client) -> None:
    """Wait until the arena is allocated: it comes in pieces after READY, and stores before that are refused."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        stats = client.stats()
        if stats["memory_error"]:
            raise BenchError(f"the daemon has no memory for its host tier: {stats['memory_error']}")
        if stats["host_ready_bytes"] >= stats["host_capacity_bytes"]:
            return
        if time.monotonic() > deadline_s:
            raise BenchError(f"the host tier has {stats['host_ready_bytes']} bytes after {TIMEOUT_S} s")
        time.sleep(0.01)


def expect(what: str, got: int, wanted: int) -> None:
    """A figure over fewer blocks than it claims is no figure: raise BenchError."""
    if got != wanted:
        raise BenchError(f"{what}: {got} of {wanted} blocks")
