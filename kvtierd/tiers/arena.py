"""The host tier's memory: chunks that the daemon and its local clients map together.

A chunk is a memfd, wholly allocated before anybody else maps it (so nobody meets SIGBUS and the memory is charged to
the daemon), sealed against resizing, and left out of core dumps. Generation tables, one u64 a slot, lie in files of
their own that only the daemon can write (F_SEAL_FUTURE_WRITE): a reader that was paused beyond its lease compares
generations after copying and so learns that its bytes may be another block's.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import align_up

_SEAL_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the fcntl module has no name for it

Generations = npt.NDArray[np.uint64]
GENERATION_BYTES: Final = 8


class Chunk:
    """One chunk: `memory` is its bytes. With `allocate` False they are unbacked: to measure what lies beside it."""

    __slots__ = ("_map", "chunk_bytes", "data_fd", "memory", "number")

    def __init__(self, number: int, chunk_bytes: int, *, allocate: bool = True) -> None:
        self.number = number
        self.chunk_bytes = chunk_bytes
        self.data_fd, self._map = _sealed_file(f"chunk-{number}", chunk_bytes, allocate=allocate)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Let go of the memory; clients that still map it keep it alive until they unmap."""
        self.memory = np.empty(0, np.uint8)
        _close(self._map, self.data_fd)


class GenerationTable:
    """Generations of the slots of some chunks of one class, one u64 a slot: what their clients see read-only.

    Chunks share a table because a page holds 512 generations, and a chunk of large slots has a few dozen. The slots of
    chunk `part` of it begin at `part` * slots_per_chunk.
    """

    def __init__(self, slots_per_chunk: int) -> None:
        table_bytes = align_up(slots_per_chunk * GENERATION_BYTES)
        self.parts = table_bytes // (slots_per_chunk * GENERATION_BYTES)
        self.free_parts = list(range(self.parts - 1, -1, -1))
        self.fd, self._map = _sealed_file("generations", table_bytes, read_only=True)
        self.generations: Generations = np.frombuffer(self._map, np.uint64)

    def close(self) -> None:
        """Let go of the memory."""
        self.generations = np.empty(0, np.uint64)
        _close(self._map, self.fd)


def _sealed_file(name: str, size: int, *, allocate: bool = True, read_only: bool = False) -> tuple[int, mmap.mmap]:
    """A memfd of a size that stays, mapped here; `read_only` for everybody who maps it after us. May raise OSError."""
    fd = os.memfd_create(f"kvtierd-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        mapping = _map_whole(fd, size, allocate=allocate)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | (_SEAL_FUTURE_WRITE if read_only else 0))
    except BaseException:
        os.close(fd)
        raise
    return fd, mapping


def _close(mapping: mmap.mmap, fd: int) -> None:
    # A worker thread may still have a view; the mapping goes with its last view.
    with contextlib.suppress(BufferError):
        mapping.close()
    os.close(fd)


def _map_whole(fd: int, size: int, *, allocate: bool) -> mmap.mmap:
    """Size a memfd, have every page allocated, and map it; OSError when the memory is not there.

    fallocate rather than MADV_POPULATE_WRITE: both report a lack of memory instead of raising SIGBUS, but only the
    first runs without the GIL, and a chunk takes a tenth of a second.
    """
    os.ftruncate(fd, size)
    if allocate:
        os.posix_fallocate(fd, 0, size)
    mapping = mmap.mmap(fd, size)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping
