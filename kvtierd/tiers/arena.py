"""The host tier's memory: chunks that the daemon and its local clients map together.

A chunk is a memfd, wholly allocated before anybody else maps it (so nobody meets SIGBUS and the memory is charged to
the daemon), sealed against resizing, and left out of core dumps. Generation tables, one u64 a slot, lie in files of
their own that only the daemon can write: a reader that was paused beyond its lease compares generations after copying
and so learns that its bytes may be another block's.

Data lies in huge pages where the kernel gives them (Linux 6.1; whatever transparent_hugepage/shmem_enabled says but
"deny"), for all who map it: see _allocate.

A table of a single life is sealed against new writable mappings (F_SEAL_FUTURE_WRITE). That cannot be undone, and a
reader may be paused across a restart; so one that is to outlive the daemon is not sealed so, but belongs to its user
alone (mode 0600), and clients get a descriptor that is open for reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import align_up
from kvtierd.protocol.mapping import HUGE_PAGE_BYTES, SharedMapping
from kvtierd.storage.punch import punch

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the fcntl module has no name for it

Generations = npt.NDArray[np.uint64]
GENERATION_BYTES: Final = 8

log = logging.getLogger(__name__)


class Chunk:
    """One chunk: `memory` is its bytes. With `allocate` False they are unbacked: to measure what lies beside it."""

    __slots__ = ("chunk_bytes", "data_fd", "memory", "number")

    def __init__(self, number: int, chunk_bytes: int, *, allocate: bool = True) -> None:
        self._hold(number, chunk_bytes, *_chunk_file(number, chunk_bytes, allocate=allocate))

    @classmethod
    def again(cls, number: int, chunk_bytes: int, fd: int) -> Self:
        """The chunk of an earlier life that `fd` is; ValueError when it is none of this size. Takes `fd` over."""
        chunk = cls.__new__(cls)
        _check_again(fd, chunk_bytes)
        chunk._hold(number, chunk_bytes, fd, _mapped(fd, chunk_bytes))
        return chunk

    def _hold(self, number: int, chunk_bytes: int, fd: int, mapping: SharedMapping) -> None:
        self.number = number
        self.chunk_bytes = chunk_bytes
        self.data_fd = fd
        self.memory: Bytes = np.asarray(mapping)

    def discard(self) -> None:
        """Give the memory back to the kernel now, whoever maps it: they read zeros from here on. And let go of it.

        A client that asks for nothing does not hear that it should unmap, and its mapping would keep the memory beyond
        the tier's capacity. Reading zeros harms nobody: no slot of the chunk is held, and generations have moved on.
        Not for the loop: it takes some milliseconds.
        """
        try:
            punch(self.data_fd, 0, self.chunk_bytes)
        except OSError as error:
            log.warning("chunk %d stays in memory until its clients unmap it: %s", self.number, error.strerror or error)
        self.close()

    def close(self) -> None:
        """Let go of the memory; clients that still map it keep it alive until they unmap."""
        self.memory = np.empty(0, np.uint8)  # A worker thread may still have a view: the mapping goes with the last.
        os.close(self.data_fd)


class GenerationTable:
    """Generations of the slots of some chunks of one class, one u64 a slot: what their clients see read-only.

    Chunks share a table because a page holds 512 generations, and a chunk of large slots has a few dozen. The slots of
    chunk `part` of it begin at `part` * slots_per_chunk.
    """

    def __init__(self, slots_per_chunk: int, *, lasting: bool = False) -> None:
        self._cut(slots_per_chunk)
        own_fd, mapping = _sealed_file("generations", self._bytes, read_only=not lasting)
        if lasting:
            os.fchmod(own_fd, 0o600)
        self._hold(own_fd, mapping, lasting=lasting)

    @classmethod
    def again(cls, slots_per_chunk: int, own_fd: int) -> Self:
        """The table of an earlier life that `own_fd` is; ValueError when it is none for such chunks. Takes it over."""
        table = cls.__new__(cls)
        table._cut(slots_per_chunk)
        table._hold(own_fd, _map_again(own_fd, table._bytes), lasting=True)
        return table

    def _cut(self, slots_per_chunk: int) -> None:
        self._bytes = align_up(slots_per_chunk * GENERATION_BYTES)
        self.parts = self._bytes // (slots_per_chunk * GENERATION_BYTES)
        self.free_parts = list(range(self.parts - 1, -1, -1))

    def _hold(self, own_fd: int, mapping: mmap.mmap, *, lasting: bool) -> None:
        self.own_fd, self._map = own_fd, mapping
        self.number = 0
        """Which of the daemon's tables it is, where that matters."""
        self.closed = False
        self.fd = _open_to_read(own_fd) if lasting else own_fd
        """What clients get."""
        self.generations: Generations = np.frombuffer(self._map, np.uint64)

    def close(self) -> None:
        """Let go of the memory."""
        self.closed = True
        self.generations = np.empty(0, np.uint64)
        if self.fd != self.own_fd:
            os.close(self.fd)
        _close(self._map, self.own_fd)


class LastingFile:
    """Memory that only the daemon maps, to be kept for its next life; `memory` is its bytes, backed as it is used."""

    def __init__(self, name: str, size: int, fd: int = -1) -> None:
        if fd >= 0:
            self.fd, self._map = fd, _map_again(fd, size)
        else:
            self.fd, self._map = _sealed_file(name, size, allocate=False)
            os.fchmod(self.fd, 0o600)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)

    def back(self, begin: int, size: int) -> None:
        """Have the pages of these bytes allocated; OSError when there is no memory for them."""
        os.posix_fallocate(self.fd, begin, size)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory = np.empty(0, np.uint8)
        _close(self._map, self.fd)


def _open_to_read(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def _map_again(fd: int, size: int) -> mmap.mmap:
    """Map a memfd that somebody passed us; ValueError as `_check_again` has it."""
    _check_again(fd, size)
    mapping = mmap.mmap(fd, size)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def _check_again(fd: int, size: int) -> None:
    """ValueError when what somebody passed us is no memfd of this size, or could be resized under us."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"a passed file is no memory file: {error.strerror}") from error
    if (found := os.fstat(fd).st_size) != size:
        raise ValueError(f"a passed file has {found} bytes, not {size}")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("a passed file is not sealed against shrinking")


def _chunk_file(number: int, size: int, *, allocate: bool) -> tuple[int, SharedMapping]:
    """A memfd of a size that stays, every page allocated, mapped here. May raise OSError."""
    with _new_file(f"chunk-{number}", size) as fd:
        mapping = _mapped(fd, size)
        if allocate:
            _allocate(fd, mapping)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd, mapping


def _mapped(fd: int, size: int) -> SharedMapping:
    mapping = SharedMapping(fd, size, writable=True)
    mapping.advise(mmap.MADV_DONTDUMP)
    return mapping


def _allocate(fd: int, mapping: SharedMapping) -> None:
    """Have every page allocated, in huge pages as far as the kernel has them; OSError when the memory is not there.

    One small page is put into the place of each huge one, and the kernel then makes that huge: this takes half the time
    of allocating small pages, and does not depend on a setting that is off in every distribution. Where it is refused,
    small pages it is. fallocate rather than MADV_POPULATE_WRITE: both report a lack of memory instead of raising
    SIGBUS, but only the first runs without the GIL, and a chunk takes a tenth of a second.
    """
    for begin in range(0, mapping.nbytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        os.posix_fallocate(fd, begin, mmap.PAGESIZE)
    if error := mapping.collapse():
        log.debug("a chunk has not all of its memory in huge pages: %s", os.strerror(error))
    os.posix_fallocate(fd, 0, mapping.nbytes)


def _sealed_file(name: str, size: int, *, allocate: bool = True, read_only: bool = False) -> tuple[int, mmap.mmap]:
    """A memfd of a size that stays, mapped here; `read_only` for everybody who maps it after us. May raise OSError."""
    with _new_file(name, size) as fd:
        if allocate:
            os.posix_fallocate(fd, 0, size)
        mapping = mmap.mmap(fd, size)
        mapping.madvise(mmap.MADV_DONTDUMP)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | (_SEAL_FUTURE_WRITE if read_only else 0))
    return fd, mapping


@contextlib.contextmanager
def _new_file(name: str, size: int) -> Iterator[int]:
    """A memfd of this size, which is closed if what is done with it fails."""
    fd = os.memfd_create(f"kvtierd-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        yield fd
    except BaseException:
        os.close(fd)
        raise


def _close(mapping: mmap.mmap, fd: int) -> None:
    # A worker thread may still have a view; the mapping goes with its last view.
    with contextlib.suppress(BufferError):
        mapping.close()
    os.close(fd)
