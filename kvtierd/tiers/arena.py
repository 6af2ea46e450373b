"""The host tier's memory: chunks that the daemon and its local clients map together.

A chunk is a memfd, wholly allocated before anybody else maps it (so nobody meets SIGBUS and the memory is charged to
the daemon), sealed against resizing, and left out of core dumps. Beside it lies a generation table, one u64 a slot,
that only the daemon can write (F_SEAL_FUTURE_WRITE): a reader that was paused beyond its lease compares generations
after copying and so learns that its bytes may be another block's.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import PAGE_BYTES, align_up

_SEAL_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the fcntl module has no name for it

Generations = npt.NDArray[np.uint64]


class Chunk:
    """One chunk: `memory` is its bytes, `generations` the table that clients see read-only."""

    def __init__(self, number: int, chunk_bytes: int) -> None:
        self.number = number
        self.chunk_bytes = chunk_bytes
        self.data_fd = os.memfd_create(f"kvtierd-chunk-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.generations_fd = -1
        try:
            self._map = _map_whole(self.data_fd, chunk_bytes)
            fcntl.fcntl(self.data_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            table_bytes = align_up(chunk_bytes // PAGE_BYTES * 8)
            self.generations_fd = os.memfd_create(
                f"kvtierd-generations-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
            self._table = _map_whole(self.generations_fd, table_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.generations_fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            self._close_files()
            raise
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)
        self.generations: Generations = np.frombuffer(self._table, np.uint64)

    def close(self) -> None:
        """Let go of the memory; clients that still map it keep it alive until they unmap."""
        self.memory = np.empty(0, np.uint8)
        self.generations = np.empty(0, np.uint64)
        for mapping in (self._map, self._table):
            try:
                mapping.close()
            except BufferError:
                # A worker thread still has a view; the mapping goes with its last view.
                continue
        self._close_files()

    def _close_files(self) -> None:
        for fd in (self.data_fd, self.generations_fd):
            if fd >= 0:
                os.close(fd)
        self.data_fd = self.generations_fd = -1


def _map_whole(fd: int, size: int) -> mmap.mmap:
    """Size a memfd, have every page allocated, and map it; OSError when the memory is not there.

    fallocate rather than MADV_POPULATE_WRITE: both report a lack of memory instead of raising SIGBUS, but only the
    first runs without the GIL, and a chunk takes a tenth of a second.
    """
    os.ftruncate(fd, size)
    os.posix_fallocate(fd, 0, size)
    mapping = mmap.mmap(fd, size)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping
