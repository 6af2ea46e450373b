"""The superblock: which store this is, in which format, and how often it was opened (FORMAT.md §2)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import aiofiles
import xxhash

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.layout import CHECKED_FROM, FORMAT_VERSION, READABLE_VERSIONS, SUPERBLOCK, SUPERBLOCK_MAGIC
from kvtierd.storage.metadata import AioMetadata

NAME = "superblock"
COPIES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Superblock:
    """Identity of a store and the number of its openings."""

    uuid: bytes
    epoch: int
    version: int = FORMAT_VERSION


def encode(superblock: Superblock, copy: int) -> bytes:
    """One copy, [4096] bytes."""
    page = bytearray(PAGE_BYTES)
    fields = (superblock.version, copy, superblock.uuid, superblock.epoch)
    SUPERBLOCK.pack_into(page, 0, SUPERBLOCK_MAGIC, 0, *fields)
    page[8:16] = xxhash.xxh3_64_digest(memoryview(page)[CHECKED_FROM:])[::-1]
    return bytes(page)


def decode(page: bytes) -> Superblock | None:
    """Read one copy; None when it is not valid. Any version is returned: refusing is the caller's."""
    if len(page) < PAGE_BYTES:
        return None
    magic, checksum, version, _, uuid, epoch = SUPERBLOCK.unpack_from(page)
    valid = magic == SUPERBLOCK_MAGIC and xxhash.xxh3_64_intdigest(page[CHECKED_FROM:PAGE_BYTES]) == checksum
    return Superblock(uuid, epoch, version) if valid else None


async def load(directory: Path) -> Superblock | None:
    """Read the store's superblock; None when no copy is valid or there is no file.

    Raises StartupError (74) for a store of a newer format, OSError when it cannot be read.
    """
    try:
        async with aiofiles.open(directory / NAME, "rb") as file:
            data = await file.read(COPIES * PAGE_BYTES)
    except FileNotFoundError:
        return None
    copies = [decode(data[at : at + PAGE_BYTES]) for at in range(0, COPIES * PAGE_BYTES, PAGE_BYTES)]
    valid = [copy for copy in copies if copy is not None]
    for copy in valid:
        if copy.version not in READABLE_VERSIONS:
            known = " and ".join(map(str, READABLE_VERSIONS))
            raise StartupError(
                ExitCode.IO,
                f"the store in {directory} has format {copy.version}, this kvtierd reads format {known}; "
                "nothing was changed: use the kvtierd that made it, or another nvme.directory",
            )
    return max(valid, key=lambda copy: copy.epoch, default=None)


async def create(directory: Path) -> Superblock:
    """Make a store's superblock, whole or not at all; epoch 0."""
    superblock = Superblock(os.urandom(16), 0)
    # Its name is on stable storage too: segments without a superblock would be refused.
    await AioMetadata(directory).replace(NAME, [encode(superblock, copy) for copy in range(COPIES)])
    return superblock


async def update(directory: Path, superblock: Superblock) -> None:
    """Replace both copies in place, the second when the first is on stable storage."""
    async with aiofiles.open(directory / NAME, "r+b") as file:
        for copy in range(COPIES):
            await file.seek(copy * PAGE_BYTES)
            await file.write(encode(superblock, copy))
            await file.flush()
            await asyncio.to_thread(os.fdatasync, file.fileno())
