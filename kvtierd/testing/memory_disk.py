"""A disk in memory that can lose power: it keeps what was synced, and of the rest whatever it likes.

Durability can only be shown on such a model: a process that is killed leaves the page cache behind, a disk that
loses power does not.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.storage.interface import IoMode
from kvtierd.storage.io import Space
from kvtierd.testing.memory_metadata import MemoryMetadata, SmallFiles

SECTOR_BYTES = 512
"""What a disk writes whole or not at all."""


class _Image:
    """A file: what it holds now, what is on stable storage, and the writes between."""

    def __init__(self, size_bytes: int) -> None:
        self.now = np.zeros(size_bytes, np.uint8)
        self.stable = np.zeros(size_bytes, np.uint8)
        self.unsynced: list[tuple[int, Bytes]] = []
        self.name_is_stable = False

    def after_power_loss(self, luck: random.Random | None) -> _Image:
        """The file as it is found later; `luck` decides for each sector of each unsynced write, None keeps none."""
        found = _Image(self.stable.size)
        found.stable[:] = self.stable
        found.name_is_stable = True
        for offset, data in self.unsynced if luck is not None else ():
            share = luck.choice((0.0, 0.5, 0.9, 1.0)) if luck is not None else 0.0
            for begin in range(0, data.size, SECTOR_BYTES):
                if luck is not None and luck.random() < share:
                    sector = data[begin : begin + SECTOR_BYTES]
                    found.stable[offset + begin : offset + begin + sector.size] = sector
        found.now[:] = found.stable
        return found


class MemoryDisk:
    """Files by name, under one lock; `capacity_bytes` is when it is full."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.capacity_bytes = capacity_bytes
        self.files: dict[str, _Image] = {}
        self.removed: dict[str, _Image] = {}
        self.metadata = SmallFiles()
        self.guard = threading.Lock()

    def used_bytes(self) -> int:
        """Bytes of all files."""
        return sum(image.now.size for image in self.files.values())

    def as_it_is(self) -> MemoryDisk:
        """A copy of the disk as a process that is killed leaves it: everything that was written is there."""
        found = MemoryDisk(self.capacity_bytes)
        with self.guard:
            for name, image in self.files.items():
                copy = found.files[name] = _Image(image.now.size)
                copy.now[:] = copy.stable[:] = image.now
                copy.name_is_stable = True
            found.metadata = self.metadata.as_they_are()
        return found

    def after_power_loss(self, luck: random.Random | None = None) -> MemoryDisk:
        """The disk as a later start finds it: files whose name was synced, with what was synced in them."""
        found = MemoryDisk(self.capacity_bytes)
        with self.guard:
            for name, image in (self.removed | self.files).items():
                if image.name_is_stable:
                    found.files[name] = image.after_power_loss(luck)
            found.metadata = self.metadata.after_power_loss(luck)
        return found


class MemoryFile:
    """An open file of a MemoryDisk; see SegmentFile."""

    def __init__(self, disk: MemoryDisk, image: _Image) -> None:
        self._disk = disk
        self._image = image

    @property
    def alignment(self) -> int:
        """Any memory will do."""
        return 1

    def size_bytes(self) -> int:
        """Length of the file."""
        return self._image.now.size

    def allocated_bytes(self) -> int:
        """Length of the file."""
        return self._image.now.size

    def read(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Copy out, up to the end of the file."""
        moved = 0
        with self._disk.guard:
            for buffer in buffers:
                part = self._image.now[offset + moved : offset + moved + buffer.size]
                buffer[: part.size] = part
                moved += part.size
        return moved

    def write(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Copy in; the file does not grow."""
        data = np.concatenate(list(buffers))
        if offset + data.size > self._image.now.size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        with self._disk.guard:
            self._image.now[offset : offset + data.size] = data
            self._image.unsynced.append((offset, data))
        return data.size

    def punch(self, offset: int, length: int) -> None:
        """Zeros, at once or never: until a sync a loss of power may undo it."""
        self.write([np.zeros(length, np.uint8)], offset)

    def sync(self) -> None:
        """Make what was written stable."""
        with self._disk.guard:
            for offset, data in self._image.unsynced:
                self._image.stable[offset : offset + data.size] = data
            self._image.unsynced.clear()

    def close(self) -> None:
        """Nothing to let go of."""


class MemoryIo:
    """A StorageIo over a MemoryDisk, journal and checkpoints with it. Lock and superblock stay on the real file system:
    they are synced at each step, so that there is nothing in between to lose."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk
        self.mode = IoMode.BUFFERED
        self.direct = False
        self.notes: list[str] = []

    def metadata(self, directory: Path) -> MemoryMetadata:  # noqa: ARG002
        """Journal and checkpoints, on the same disk."""
        return MemoryMetadata(self.disk.metadata)

    def probe(self, directory: Path) -> None:
        """Memory always works."""

    def names(self, directory: Path) -> list[str]:  # noqa: ARG002
        """Names of all files."""
        return sorted(self.disk.files)

    def create(self, path: Path, size_bytes: int) -> MemoryFile:
        """Make a file of zeros."""
        with self.disk.guard:
            if path.name in self.disk.files:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            if self.disk.used_bytes() + size_bytes > self.disk.capacity_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            image = self.disk.files[path.name] = _Image(size_bytes)
        return MemoryFile(self.disk, image)

    def open(self, path: Path) -> MemoryFile:
        """Open a file."""
        with self.disk.guard:
            if path.name not in self.disk.files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return MemoryFile(self.disk, self.disk.files[path.name])

    def remove(self, path: Path) -> None:
        """Remove a file; it comes back with a loss of power unless the directory is synced."""
        with self.disk.guard:
            if path.name not in self.disk.files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            self.disk.removed[path.name] = self.disk.files.pop(path.name)

    def sync_directory(self, directory: Path) -> None:  # noqa: ARG002
        """Make names stable."""
        with self.disk.guard:
            self.disk.removed.clear()
            for image in self.disk.files.values():
                image.name_is_stable = True

    def space(self, directory: Path) -> Space:  # noqa: ARG002
        """What the files leave of the capacity."""
        with self.disk.guard:
            return Space(self.disk.capacity_bytes - self.disk.used_bytes(), self.disk.capacity_bytes)
