"""A device made of ordinary memory: the `gpu` tier of a machine without a GPU, and of every test."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.gpu.attend import AttentionDevice


class HostDevice:
    """One anonymous mapping as the pool. Pages are taken as they are first written."""

    name = "host"

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._map = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The pool is KV of users' prompts: it does not belong into a core dump.
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory: Bytes = np.frombuffer(self._map, np.uint8)
        self.address = self.compute_address = int(self._memory.ctypes.data)

    def attention(self, on_host: AttentionDevice) -> AttentionDevice:
        """The processors compute here, too."""
        return on_host

    def copy_in(self, offset: int, source: Bytes) -> None:
        """Copy host bytes into the pool at `offset`."""
        self._memory[offset : offset + source.size] = source

    def copy_out(self, offset: int, target: Bytes) -> None:
        """Copy pool bytes at `offset` into host memory."""
        target[:] = self._memory[offset : offset + target.size]

    def register_host(self, memory: Bytes) -> bool:  # noqa: ARG002
        """Ordinary memory needs no pinning: always False."""
        return False

    def register_pieces(self, memory: Bytes) -> Iterator[int]:  # noqa: ARG002
        """Nothing."""
        return iter(())

    def unregister_host(self, memory: Bytes) -> None:
        """Nothing was registered."""

    def has_client(self, client: str) -> bool:  # noqa: ARG002
        """Clients have no memory on this device."""
        return False

    def close_client(self, client: str) -> int:  # noqa: ARG002
        """There is nothing to unmap."""
        return 0

    def close(self) -> None:
        """Free the pool."""
        self._memory = np.empty(0, np.uint8)
        self._map.close()
