"""The small files of a store on a disk in memory that can lose power: names and contents are kept once synced."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
from collections.abc import Iterable

SECTOR_BYTES = 512


@dataclasses.dataclass(slots=True)
class SmallFile:
    """What a file holds now, and how much of its beginning is on stable storage."""

    data: bytearray
    stable_bytes: int = 0


class SmallFiles:
    """Files by name; `stable` is the directory as it was last synced, with the files that it named then."""

    def __init__(self) -> None:
        self.now: dict[str, SmallFile] = {}
        self.stable: dict[str, SmallFile] = {}

    def sync_directory(self) -> None:
        """Make names stable."""
        self.stable = dict(self.now)

    def as_they_are(self) -> SmallFiles:
        """A copy in which everything is stable."""
        found = SmallFiles()
        found.now = {name: SmallFile(bytearray(file.data), len(file.data)) for name, file in self.now.items()}
        found.sync_directory()
        return found

    def after_power_loss(self, luck: random.Random | None) -> SmallFiles:
        """What a later start finds: names as synced, or by luck as they were; of what was appended since a sync any
        number of whole sectors from its beginning, and by luck garbage behind."""
        found = SmallFiles()
        names = self.stable if luck is None or luck.random() < 0.5 else self.now
        for name, file in names.items():
            kept = file.stable_bytes
            if luck is not None:
                kept += min(len(file.data) - kept, luck.randrange(0, 9) * SECTOR_BYTES)
            data = bytearray(file.data[:kept])
            if luck is not None and kept < len(file.data) and luck.random() < 0.3:
                data += bytes(min(SECTOR_BYTES, len(file.data) - kept))  # the size grew, the bytes did not arrive
            found.now[name] = SmallFile(data, len(data))
        found.sync_directory()
        return found


class MemoryMetadata:
    """MetadataFiles over SmallFiles."""

    def __init__(self, files: SmallFiles) -> None:
        self.files = files

    async def names(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(self.files.now)

    async def read(self, name: str) -> bytes:
        """All of a file."""
        return bytes(self._file(name).data)

    async def create(self, name: str) -> None:
        """Make an empty file and sync the directory."""
        self.files.now[name] = SmallFile(bytearray())
        self.files.sync_directory()

    async def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file."""
        self._file(name).data += data

    async def sync(self, name: str) -> None:
        """Make what was appended stable."""
        file = self._file(name)
        file.stable_bytes = len(file.data)

    async def replace(self, name: str, parts: Iterable[bytes]) -> None:
        """Make a file, whole and synced."""
        data = bytearray(b"".join(parts))
        self.files.now[name] = SmallFile(data, len(data))
        self.files.sync_directory()

    async def remove(self, names: Iterable[str]) -> None:
        """Remove files; they may come back with a loss of power."""
        for name in names:
            self.files.now.pop(name, None)

    async def close(self) -> None:
        """Nothing to let go of."""

    def _file(self, name: str) -> SmallFile:
        if name not in self.files.now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self.files.now[name]
