"""The device interface: the one place that knows whether there is a GPU.

A device owns one allocation, its pool, which the tiers cut into slots. Copies run in the caller's worker threads and
return when the bytes are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import KvtierdError
from kvtierd.gpu.attend import AttentionDevice


class DeviceError(KvtierdError):
    """The device failed at something, or has no memory for it; the text says at what."""


class Device(Protocol):
    """Memory of the `gpu` tier on one device.

    `name` is `host` or `cuda:N`; `capacity_bytes` is the size of its pool; `address` is where the pool begins for the
    processor's own loads, 0 where only copies reach it; `compute_address` where it begins for what `attention` gives,
    0 where that does not reach it. No host memory has addresses of a pool.
    """

    name: str
    capacity_bytes: int
    address: int
    compute_address: int

    def attention(self, on_host: AttentionDevice) -> AttentionDevice:
        """What computes attention over blocks in the pool and in host memory; the same one each time.

        `on_host` is the processors' own, for what this device leaves to them. Loads what it needs when it is called
        first: not for the loop. Raises DeviceError where that cannot be had.
        """
        ...

    def copy_in(self, offset: int, source: Bytes) -> None:
        """Copy host bytes into the pool at `offset`."""
        ...

    def copy_out(self, offset: int, target: Bytes) -> None:
        """Copy pool bytes at `offset` into host memory."""
        ...

    def register_host(self, memory: Bytes) -> bool:
        """Pin host memory for this device; False where the device has no use for it."""
        ...

    def register_pieces(self, memory: Bytes) -> Iterator[int]:
        """The same piece by piece: after each, how many bytes are pinned. Nothing where the device has no use for it.

        Raises KvtierdError, with what to do, where it is not allowed; what was pinned stays until `unregister_host`.
        """
        ...

    def unregister_host(self, memory: Bytes) -> None:
        """Undo `register_host` or `register_pieces`; the memory may then be unmapped."""
        ...

    def has_client(self, client: str) -> bool:
        """Whether device memory of a client's is mapped here."""
        ...

    def close_client(self, client: str) -> int:
        """Unmap all of it; how many allocations that were. May wait for copies."""
        ...

    def close(self) -> None:
        """Free the pool."""
        ...
