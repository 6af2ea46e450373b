"""preadv and pwritev, with O_DIRECT where the file system takes it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.interface import IoMode
from kvtierd.storage.io import Space, compare_transfers
from kvtierd.storage.punch import punch_and_claim

REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""How file systems say that they have no O_DIRECT, at open or at the first transfer."""
IOV_MAX = 1024
PROBE_NAME = "probe"

OpenFile = Callable[[Path, int, int], int]


class PosixFile:
    """A file descriptor; see SegmentFile."""

    __slots__ = ("_alignment", "_fd")

    def __init__(self, fd: int, alignment: int) -> None:
        self._fd = fd
        self._alignment = alignment

    @property
    def alignment(self) -> int:
        """A page with O_DIRECT, else 1."""
        return self._alignment

    @property
    def queue_descriptor(self) -> int:
        """See kvtierd.storage.parts.PartReads: through the page cache a batch would be read one by one."""
        return self._fd if self._alignment > 1 else -1

    def size_bytes(self) -> int:
        """Length of the file."""
        return os.fstat(self._fd).st_size

    def allocated_bytes(self) -> int:
        """Blocks that the file holds, in bytes."""
        return os.fstat(self._fd).st_blocks * 512

    def allocate(self, size_bytes: int) -> None:
        """Take all the space now, so that a later write cannot find the disk full."""
        os.posix_fallocate(self._fd, 0, size_bytes)

    def read(self, buffers: Sequence[Bytes], offset: int) -> int:
        """One preadv."""
        return os.preadv(self._fd, [buffer.data for buffer in buffers[:IOV_MAX]], offset)

    def write(self, buffers: Sequence[Bytes], offset: int) -> int:
        """One pwritev."""
        return os.pwritev(self._fd, [buffer.data for buffer in buffers[:IOV_MAX]], offset)

    def punch(self, offset: int, length: int) -> None:
        """Give pages back to the device; the space stays ours."""
        punch_and_claim(self._fd, offset, length)

    def sync(self) -> None:
        """Fdatasync: O_DIRECT leaves the device's cache and the file's metadata to be flushed."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the descriptor; again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PosixIo:
    """The engine over POSIX calls. `open_file` is `os.open` unless a test plays another file system."""

    def __init__(
        self, wanted: Literal["auto", "direct", "buffered"] = "auto", *, open_file: OpenFile | None = None
    ) -> None:
        self._wanted = wanted
        self._open_file = open_file if open_file is not None else os.open
        self.mode = IoMode.BUFFERED if wanted == "buffered" else IoMode.DIRECT
        self.notes: list[str] = []

    @property
    def direct(self) -> bool:
        """Whether bytes bypass the page cache; true after `probe`."""
        return self.mode is IoMode.DIRECT

    def probe(self, directory: Path) -> None:
        """Write, read back and compare; fall back to buffered I/O if that is allowed."""
        try:
            self._try(directory)
        except OSError as error:
            if self.mode is not IoMode.DIRECT or error.errno not in REFUSED:
                raise _unusable(directory, error) from error
            if self._wanted == "direct":
                raise StartupError(
                    ExitCode.IO,
                    f"the file system of {directory} refuses O_DIRECT ({error.strerror}) and nvme.mode is direct; "
                    "set nvme.mode to auto, or nvme.directory to another file system",
                ) from error
            self.mode = IoMode.BUFFERED
            self.notes.append(f"the file system of {directory} refuses O_DIRECT ({error.strerror}); I/O is buffered")
            self._try_buffered(directory)

    def _try_buffered(self, directory: Path) -> None:
        try:
            self._try(directory)
        except OSError as error:
            raise _unusable(directory, error) from error

    def _try(self, directory: Path) -> None:
        path = directory / PROBE_NAME
        file = self._open(path, os.O_CREAT | os.O_TRUNC)
        try:
            compare_transfers(file)
        finally:
            file.close()
            path.unlink()

    def names(self, directory: Path) -> list[str]:
        """Names of all files in the directory, sorted."""
        return sorted(os.listdir(directory))  # noqa: PTH208 - names are wanted, not paths

    def create(self, path: Path, size_bytes: int) -> PosixFile:
        """Make a file and allocate it; it is removed again when that fails."""
        file = self._open(path, os.O_CREAT | os.O_EXCL)
        try:
            file.allocate(size_bytes)
        except OSError:
            file.close()
            discard(path)
            raise
        return file

    def open(self, path: Path) -> PosixFile:
        """Open an existing file."""
        return self._open(path, 0)

    def _open(self, path: Path, flags: int) -> PosixFile:
        direct = self.mode is IoMode.DIRECT
        extra = os.O_DIRECT if direct else 0
        fd = self._open_file(path, os.O_RDWR | os.O_CLOEXEC | flags | extra, 0o600)
        return PosixFile(fd, PAGE_BYTES if direct else 1)

    def remove(self, path: Path) -> None:
        """Unlink."""
        path.unlink()

    def sync_directory(self, directory: Path) -> None:
        """Fsync the directory."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def space(self, directory: Path) -> Space:
        """From statvfs: the part of root's reserve does not count as free."""
        info = os.statvfs(directory)
        return Space(info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize)


def open_to_read(path: Path) -> PosixFile:
    """Open a file that may be another process's: writing to it fails with EBADF."""
    return PosixFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), 1)


def make_allocated(path: Path, size_bytes: int) -> None:
    """Make a new file with all its space taken; leaves nothing behind when it fails."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        discard(path)
        raise
    finally:
        os.close(fd)


def discard(path: Path) -> None:
    """Remove a file that is of no use, if it is there and can be removed."""
    with contextlib.suppress(OSError):
        path.unlink()


def _unusable(directory: Path, error: OSError) -> StartupError:
    return StartupError(ExitCode.IO, f"cannot store in {directory}: {error.strerror or error}")
