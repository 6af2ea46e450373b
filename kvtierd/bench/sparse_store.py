"""A store whose records lie as far apart as real ones, though only their headers are on the disk: payloads are holes.

So a bench can have 50 GiB of blocks that a start must find, on a disk that has not that much room. Nothing reads the
payloads. Run as a module it fills such a store and kills itself, as a daemon that crashes would end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtierd.bench.rows import BenchError
from kvtierd.bench.workload import namespace, random_keys
from kvtierd.config.schema import Nvme
from kvtierd.core.checksum import Bytes, layer_sums
from kvtierd.core.clock import SystemClock
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import GIB, MIB, PAGE_BYTES
from kvtierd.storage import Extent, SegmentStore, WriteItem
from kvtierd.storage.buffers import page_buffer
from kvtierd.storage.io import SegmentFile
from kvtierd.storage.io_posix import PosixFile, PosixIo

SPACED = Geometry(block_size=128, layers=1, kv_heads=8, k_dim=128, v_dim=128)
"""A block of 512 KiB in one layer: one hash a block, so that filling is quick."""
BATCH = 500
FLUSH_EVERY = 20
"""Batches between two flushes: about what a busy daemon would make durable at once."""


def settings(directory: Path) -> Nvme:
    """A store of 56 GiB in segments of the default size."""
    return Nvme(directory=str(directory), capacity=56 * GIB, segment_bytes=256 * MIB)


class SparseFile:
    """A SegmentFile that writes pages of headers and leaves holes for the rest."""

    def __init__(self, inner: SegmentFile) -> None:
        self._inner = inner
        self.alignment = inner.alignment
        self.size_bytes = inner.size_bytes
        self.allocated_bytes = inner.allocated_bytes
        self.read = inner.read
        self.sync = inner.sync
        self.close = inner.close

    def write(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Write those buffers that are one page; payloads here are longer."""
        at = offset
        for buffer in buffers:
            if buffer.size == PAGE_BYTES and self._inner.write([buffer], at) != PAGE_BYTES:
                raise OSError(0, "short write of a header")
            at += buffer.size
        return at - offset


class SparseIo(PosixIo):
    """PosixIo whose new files are not allocated."""

    def create(self, path: Path, size_bytes: int) -> SegmentFile:  # type: ignore[override]
        """Make a file of a size that takes no space."""
        path.touch(0o600, exist_ok=False)
        os.truncate(path, size_bytes)
        return self.open(path)

    def open(self, path: Path) -> SegmentFile:  # type: ignore[override]
        """Open a file for headers."""
        inner: PosixFile = super().open(path)
        return SparseFile(inner)


def fill_and_crash(directory: Path, count: int, seed: int) -> None:
    """Let a process of its own store `count` blocks, flush, and be killed. Raises BenchError when it ends otherwise."""
    command = [sys.executable, "-m", "kvtierd.bench.sparse_store", str(directory), str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != -signal.SIGKILL:
        raise BenchError(f"filling the store ended with {done.returncode}: {done.stderr.strip()[-500:]}")


async def fill(directory: Path, count: int, seed: int) -> None:
    """Store blocks and flush; the store is left open."""
    store = SegmentStore(settings(directory), clock=SystemClock(), io=SparseIo())
    await store.open()
    space = namespace(SPACED)
    digest = space.digest()
    store.register(digest, space)
    data = page_buffer(SPACED.slot_bytes)
    sums = layer_sums(data, SPACED)
    keys = random_keys(count, seed)
    for number, begin in enumerate(range(0, count, BATCH)):
        names = [key.tobytes() for key in keys[begin : begin + BATCH]]
        items = [WriteItem(digest, name, SPACED, data, sums, begin + at) for at, name in enumerate(names)]
        for result in await store.write(items):
            if not isinstance(result, Extent):
                raise BenchError(f"a block could not be stored: {result}")
        if number % FLUSH_EVERY == FLUSH_EVERY - 1:
            await store.flush()
    await store.flush()


def drop_caches(directory: Path) -> None:
    """Take the store's files out of the page cache, as a machine that was started anew would find them."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def main() -> None:
    """Fill the store named on the command line and crash."""
    directory, count, seed = sys.argv[1:]
    asyncio.run(_fill_and_die(Path(directory), int(count), int(seed)))


async def _fill_and_die(directory: Path, count: int, seed: int) -> None:
    await fill(directory, count, seed)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
