"""What the store asks of a disk: the I/O interface. Engines implement it; a test wraps one to inject faults.

Calls block and are made from the store's I/O threads, several at once on one file. They raise OSError as the system
does; the store turns that into StorageError with the place. Offsets and lengths are multiples of a page.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.buffers import Scratch, is_aligned, page_buffer
from kvtierd.storage.interface import IoMode


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the file system: what an ordinary user may still take, and all of it."""

    free_bytes: int
    total_bytes: int


class SegmentFile(Protocol):
    """An open segment. `alignment` is what memory must be aligned to (1: anything goes)."""

    @property
    def alignment(self) -> int:
        """Bytes that addresses of buffers must be a multiple of."""
        ...

    def size_bytes(self) -> int:
        """Length of the file."""
        ...

    def allocated_bytes(self) -> int:
        """What the file takes on the disk."""
        ...

    def read(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Fill buffers in turn; returns the bytes read, which may be fewer (0 at the end of the file)."""
        ...

    def write(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Write buffers in turn; returns the bytes written, which may be fewer."""
        ...

    def sync(self) -> None:
        """Return when everything written is on stable storage."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class StorageIo(Protocol):
    """One way to reach a disk. `mode` is true after `probe`; `notes` says what an operator should know about it."""

    notes: list[str]

    @property
    def mode(self) -> IoMode:
        """How bytes reach the disk."""
        ...

    @property
    def direct(self) -> bool:
        """Whether they bypass the page cache."""
        ...

    def probe(self, directory: Path) -> None:
        """Write, read and compare for real; choose the mode. Raises StartupError when the directory cannot be used."""
        ...

    def names(self, directory: Path) -> list[str]:
        """Names of all files in the directory."""
        ...

    def create(self, path: Path, size_bytes: int) -> SegmentFile:
        """Make a new file with all its space allocated; leaves nothing behind when it fails."""
        ...

    def open(self, path: Path) -> SegmentFile:
        """Open an existing file for reading and writing."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Return when names made and removed are on stable storage."""
        ...

    def space(self, directory: Path) -> Space:
        """Free and total bytes of the file system."""
        ...


def read_exact(file: SegmentFile, buffers: Sequence[Bytes], offset: int, scratch: Scratch) -> None:
    """Fill all buffers, over short reads; OSError when the file ends before."""
    if all(is_aligned(buffer, file.alignment) for buffer in buffers):
        _repeat(file.read, list(buffers), offset, "read")
        return
    for buffer in buffers:
        for begin in range(0, buffer.size, scratch.bounce.size):
            piece = scratch.bounce[: min(scratch.bounce.size, buffer.size - begin)]
            _repeat(file.read, [piece], offset, "read")
            buffer[begin : begin + piece.size] = piece
            offset += piece.size


def write_exact(file: SegmentFile, buffers: Sequence[Bytes], offset: int, scratch: Scratch) -> None:
    """Write all buffers, over short writes; one request where memory is aligned."""
    if all(is_aligned(buffer, file.alignment) for buffer in buffers):
        _repeat(file.write, list(buffers), offset, "write")
        return
    for buffer in buffers:
        for begin in range(0, buffer.size, scratch.bounce.size):
            source = buffer[begin : begin + scratch.bounce.size]
            piece = scratch.bounce[: source.size]
            piece[:] = source
            _repeat(file.write, [piece], offset, "write")
            offset += piece.size


def compare_transfers(file: SegmentFile) -> None:
    """Write two pages in one request, sync, read them back; OSError when other bytes come back, or fewer."""
    pattern, back = page_buffer(2 * PAGE_BYTES), page_buffer(2 * PAGE_BYTES)
    pattern[:] = bytearray(os.urandom(pattern.size))
    moved = file.write([pattern[:PAGE_BYTES], pattern[PAGE_BYTES:]], 0), file.read([back], 0)
    file.sync()
    if moved != (pattern.size, back.size) or not (pattern == back).all():
        raise OSError(errno.EIO, f"a probe of {pattern.size} bytes came back as something else")


class _Transfer(Protocol):
    def __call__(self, buffers: Sequence[Bytes], offset: int) -> int: ...


def _repeat(transfer: _Transfer, buffers: list[Bytes], offset: int, verb: str) -> None:
    """Go on after a short transfer from the last page boundary: O_DIRECT takes no other offset."""
    wanted = sum(buffer.size for buffer in buffers)
    while wanted:
        done = transfer(buffers, offset)
        if done == wanted:
            return
        whole = done // PAGE_BYTES * PAGE_BYTES
        if whole == 0:
            raise OSError(0, f"short {verb}: {done} of {wanted} bytes")
        buffers, offset, wanted = _skip(buffers, whole), offset + whole, wanted - whole


def _skip(buffers: list[Bytes], count: int) -> list[Bytes]:
    rest = list(buffers)
    while count >= rest[0].size:
        count -= rest.pop(0).size
    rest[0] = rest[0][count:]
    return rest
