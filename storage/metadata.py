"""The store's small files, journal and checkpoints, behind an interface of their own: a test plays a disk with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

NEW_SUFFIX = ".new"
"""What a file is called until it is whole."""


class MetadataFiles(Protocol):
    """Files by name in the store's directory. Every method raises OSError as the system does."""

    async def names(self) -> list[str]:
        """Names of all files, sorted."""
        ...

    async def read(self, name: str) -> bytes:
        """All of a file."""
        ...

    async def create(self, name: str) -> None:
        """Make an empty file whose name is on stable storage."""
        ...

    async def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file; `sync` makes it durable."""
        ...

    async def sync(self, name: str) -> None:
        """Return when what was appended is on stable storage."""
        ...

    async def replace(self, name: str, parts: Iterable[bytes]) -> None:
        """Make a file of these parts, whole or not at all, contents and name on stable storage."""
        ...

    async def remove(self, names: Iterable[str]) -> None:
        """Remove files, those that are there."""
        ...

    async def close(self) -> None:
        """Let go of open files."""
        ...


@runtime_checkable
class OwnMetadata(Protocol):
    """An I/O engine that keeps the small files too, as a model of a disk does."""

    def metadata(self, directory: Path) -> MetadataFiles:
        """The files of a directory."""
        ...


def metadata_of(io: object, directory: Path) -> MetadataFiles:
    """The engine's own small files where it keeps them, else those of the file system."""
    return io.metadata(directory) if isinstance(io, OwnMetadata) else AioMetadata(directory)


class AioMetadata:
    """MetadataFiles over aiofiles. A file that was appended to stays open until it is removed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, AsyncFileIO] = {}

    async def names(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(await asyncio.to_thread(os.listdir, self._directory))

    async def read(self, name: str) -> bytes:
        """All of a file."""
        async with aiofiles.open(self._directory / name, "rb") as file:
            return await file.read()

    async def create(self, name: str) -> None:
        """Make an empty file whose name is on stable storage; what a failed attempt left is emptied."""
        if (file := self._open.pop(name, None)) is not None:
            await file.close()
        self._open[name] = await aiofiles.open(self._directory / name, "wb", buffering=0)
        await self._sync_directory()

    async def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file."""
        if name not in self._open:
            self._open[name] = await aiofiles.open(self._directory / name, "ab", buffering=0)
        await _write_all(self._open[name], data)

    async def sync(self, name: str) -> None:
        """Fdatasync: a size that has grown is part of it."""
        await asyncio.to_thread(os.fdatasync, self._open[name].fileno())

    async def replace(self, name: str, parts: Iterable[bytes]) -> None:
        """Write NAME.new, sync it, rename it, sync the directory."""
        new = self._directory / (name + NEW_SUFFIX)
        try:
            async with aiofiles.open(new, "wb", buffering=0) as file:
                for part in parts:
                    await _write_all(file, part)
                await asyncio.to_thread(os.fdatasync, file.fileno())
            await asyncio.to_thread(os.replace, new, self._directory / name)
            await self._sync_directory()
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise

    async def remove(self, names: Iterable[str]) -> None:
        """Unlink; a name that comes back after a loss of power is removed at the next start."""
        for name in names:
            if (file := self._open.pop(name, None)) is not None:
                await file.close()
            await asyncio.to_thread((self._directory / name).unlink, missing_ok=True)

    async def close(self) -> None:
        """Close what is open."""
        while self._open:
            _, file = self._open.popitem()
            await file.close()

    async def _sync_directory(self) -> None:
        await asyncio.to_thread(_sync_directory, self._directory)


async def _write_all(file: AsyncFileIO, data: bytes) -> None:
    """An unbuffered file may take less than it was given."""
    view = memoryview(data)
    while view:
        view = view[await file.write(view) :]


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
