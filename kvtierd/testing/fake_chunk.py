"""One real chunk of an arena: sealed memory files, as the daemon hands them out."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.protocol.service import ChunkFiles

CHUNK = 7
"""The number of the only chunk: not 0, so that nobody gets away with ignoring it."""


class FakeChunk:
    """One sealed memfd of slots and one of generations, mapped here for writing."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes, self.slots = slot_bytes, slots
        self.data_fd, self._data_map = sealed_file("data", slot_bytes * slots)
        self.generations_fd, self._table_map = sealed_file("generations", 8 * slots)
        self.data = np.frombuffer(self._data_map, np.uint8)
        self.generations = np.frombuffer(self._table_map, "<u8")
        self.generations[:] = 1
        self.free = list(range(slots))

    def slot(self, index: int) -> Bytes:
        """Bytes of one slot."""
        return self.data[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def take(self) -> int:
        """A free slot under a new generation."""
        index = self.free.pop()
        self.generations[index] += 1
        return index

    def files(self) -> ChunkFiles:
        """What the arena socket hands out."""
        size = self.slot_bytes * self.slots
        return ChunkFiles(CHUNK, size, self.slot_bytes, self.slots, self.data_fd, self.generations_fd)

    def close(self) -> None:
        """Close the files; the memory goes with its last view."""
        os.close(self.data_fd)
        os.close(self.generations_fd)


def sealed_file(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    """A memory file that cannot be resized, and our mapping of it."""
    descriptor = os.memfd_create(f"kvtierd-fake-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor, mmap.mmap(descriptor, nbytes)
