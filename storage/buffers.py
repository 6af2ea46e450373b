"""Page-aligned memory for headers and for sources that are not aligned; made once per I/O thread."""

from __future__ import annotations

import mmap

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import MIB, PAGE_BYTES
from kvtierd.storage.aio import AsyncReads

HEADERS_BYTES = MIB
"""For the headers of one request."""


def page_buffer(size: int) -> Bytes:
    """Page-aligned, zeroed memory of its own, [size] uint8; freed with the last view of it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8)


def huge_buffer(size: int) -> Bytes:
    """As `page_buffer`, in huge pages where the system has them, and left out of core dumps: it is for KV, and direct
    I/O pins its pages with every request."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTDUMP)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def address(buffer: Bytes) -> int:
    """Where an array's memory begins."""
    found: int = buffer.__array_interface__["data"][0]  # `ctypes` makes an object of it, for a microsecond
    return found


def is_aligned(buffer: Bytes, alignment: int) -> bool:
    """Whether O_DIRECT takes this memory as it is."""
    return address(buffer) % alignment == 0 and buffer.size % alignment == 0 and buffer.flags.c_contiguous


class HeaderMemory:
    """Page-aligned memory for headers that outlives a step of a thread: pieces of [HEADERS_BYTES], used again."""

    def __init__(self) -> None:
        self._spare: list[Bytes] = []

    def take(self) -> Bytes:
        """A piece; any thread may take one."""
        try:
            return self._spare.pop()
        except IndexError:
            return page_buffer(HEADERS_BYTES)

    def give(self, memory: Bytes) -> None:
        """Nobody uses this piece any more."""
        self._spare.append(memory)


class Scratch:
    """What one I/O thread works with: `headers` for record headers, `bounce` for bytes that are not aligned, and a
    queue for batches of reads once there was one (kvtierd.storage.parts).

    Pages are taken from the system when first touched, so a thread that only moves aligned blocks costs a few of them.
    """

    __slots__ = ("bounce", "headers", "queue", "queue_asked")

    BOUNCE_BYTES = MIB

    def __init__(self) -> None:
        self.headers = page_buffer(HEADERS_BYTES)
        self.bounce = page_buffer(self.BOUNCE_BYTES)
        self.queue: AsyncReads | None = None
        self.queue_asked = False

    def close(self) -> None:
        """Give back what the system lends."""
        if self.queue is not None:
            self.queue.close()
        self.queue = None


assert Scratch.BOUNCE_BYTES % PAGE_BYTES == 0
