"""An I/O engine that fails on demand: every call is numbered, and a plan says what goes wrong with it.

    io = FaultyIo(PosixIo(), fail_call(7, Fault(errno.EIO)))

A plan sees each call before it is made and returns a Fault or None. Replaying a run means giving the same plan.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from kvtierd.core.checksum import Bytes
from kvtierd.storage.interface import IoMode
from kvtierd.storage.io import SegmentFile, Space, StorageIo
from kvtierd.storage.metadata import MetadataFiles, metadata_of
from kvtierd.storage.space import Punchable

Operation = Literal[
    "create", "open", "read", "write", "punch", "sync", "remove", "sync_directory",
    "list_small", "read_small", "create_small", "append_small", "sync_small", "replace_small", "remove_small",
]  # fmt: skip
"""What a call does; `…_small` are calls about the small files, journal and checkpoints."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call to the engine: its number from 0, what it does, on which file, and where (0 bytes where that is moot)."""

    number: int
    operation: Operation
    name: str
    offset: int = 0
    length: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong: after `bytes_moved` bytes the call raises `errno`, or returns short where `errno` is 0.

    A write that raises after some bytes is torn: they are on the disk, and the caller is told of a failure. With
    `bytes_moved` None all bytes are moved before it raises.
    """

    errno: int = errno.EIO
    bytes_moved: int | None = 0

    def raise_if_error(self) -> None:
        """Raise the OSError."""
        if self.errno:
            raise OSError(self.errno, os.strerror(self.errno))


FAULTS = {
    "fails": Fault(errno.EIO),
    "disk full": Fault(errno.ENOSPC),
    "short": Fault(0, 4096),
    "no progress": Fault(0, 0),
    "torn within the header": Fault(errno.EIO, 512),
    "torn behind the header": Fault(errno.EIO, 4096 + 512),
    "fails though all bytes moved": Fault(errno.EIO, None),
}
"""What can go wrong with a call, by name: a run of each call in turn goes through all of them."""


Plan = Callable[[Call], Fault | None]


def fail_call(number: int, fault: Fault) -> Plan:
    """A plan in which one call goes wrong."""
    return lambda call: fault if call.number == number else None


def fail_operation(operation: Operation, fault: Fault) -> Plan:
    """A plan in which every call of a kind goes wrong."""
    return lambda call: fault if call.operation == operation else None


class FaultyIo:
    """A StorageIo around another. `plan` may be changed at any time; `calls` lists what was called so far."""

    def __init__(self, inner: StorageIo, plan: Plan | None = None) -> None:
        self.inner = inner
        self.plan = plan
        self.calls: list[Call] = []
        self._guard = threading.Lock()

    @property
    def mode(self) -> IoMode:
        """The inner engine's mode."""
        return self.inner.mode

    @property
    def direct(self) -> bool:
        """Whether the inner engine bypasses the page cache."""
        return self.inner.direct

    @property
    def notes(self) -> list[str]:
        """The inner engine's notes."""
        return self.inner.notes

    @notes.setter
    def notes(self, notes: list[str]) -> None:
        self.inner.notes = notes

    async def wait_small(self, operation: Operation) -> None:
        """Wait as long as a call about a small file takes longer than it should: these are awaited on the loop."""

    def fault_of(self, operation: Operation, name: str, offset: int = 0, length: int = 0) -> Fault | None:
        """Number a call and ask the plan about it."""
        with self._guard:
            call = Call(len(self.calls), operation, name, offset, length)
            self.calls.append(call)
        return self.plan(call) if self.plan is not None else None

    def _before(self, operation: Operation, path: Path) -> None:
        if (fault := self.fault_of(operation, path.name)) is not None:
            fault.raise_if_error()

    def probe(self, directory: Path) -> None:
        """Passed through: what is probed is the inner engine."""
        self.inner.probe(directory)

    def metadata(self, directory: Path) -> FaultyMetadata:
        """The inner engine's small files, or those of the file system; their calls are numbered with the others."""
        return FaultyMetadata(self, metadata_of(self.inner, directory))

    def names(self, directory: Path) -> list[str]:
        """Passed through."""
        return self.inner.names(directory)

    def create(self, path: Path, size_bytes: int) -> SegmentFile:
        """Make a file, or fail before it exists."""
        self._before("create", path)
        return FaultyFile(self, self.inner.create(path, size_bytes), path.name)

    def open(self, path: Path) -> SegmentFile:
        """Open a file, or fail."""
        self._before("open", path)
        return FaultyFile(self, self.inner.open(path), path.name)

    def remove(self, path: Path) -> None:
        """Remove a file, or fail before it is gone."""
        self._before("remove", path)
        self.inner.remove(path)

    def sync_directory(self, directory: Path) -> None:
        """Sync the directory, or fail before."""
        self._before("sync_directory", directory)
        self.inner.sync_directory(directory)

    def space(self, directory: Path) -> Space:
        """Passed through."""
        return self.inner.space(directory)


class FaultyFile:
    """A SegmentFile around another."""

    def __init__(self, io: FaultyIo, inner: SegmentFile, name: str) -> None:
        self._io = io
        self._inner = inner
        self._name = name

    @property
    def alignment(self) -> int:
        """The inner file's alignment."""
        return self._inner.alignment

    def size_bytes(self) -> int:
        """Passed through."""
        return self._inner.size_bytes()

    def allocated_bytes(self) -> int:
        """Passed through."""
        return self._inner.allocated_bytes()

    def read(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Read all, part, or nothing."""
        return self._transfer("read", self._inner.read, buffers, offset)

    def write(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Write all, part, or nothing."""
        return self._transfer("write", self._inner.write, buffers, offset)

    def _transfer(
        self,
        operation: Operation,
        transfer: Callable[[Sequence[Bytes], int], int],
        buffers: Sequence[Bytes],
        offset: int,
    ) -> int:
        length = sum(buffer.size for buffer in buffers)
        fault = self._io.fault_of(operation, self._name, offset, length)
        if fault is None:
            return transfer(buffers, offset)
        wanted = length if fault.bytes_moved is None else min(fault.bytes_moved, length)
        moved = transfer(_first(buffers, wanted), offset) if wanted else 0
        fault.raise_if_error()
        return moved

    def punch(self, offset: int, length: int) -> None:
        """Punch, or fail before; a file that cannot says so."""
        if (fault := self._io.fault_of("punch", self._name, offset, length)) is not None:
            fault.raise_if_error()
        if not isinstance(self._inner, Punchable):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self._inner.punch(offset, length)

    def sync(self) -> None:
        """Sync, or fail before."""
        if (fault := self._io.fault_of("sync", self._name)) is not None:
            fault.raise_if_error()
        self._inner.sync()

    def close(self) -> None:
        """Passed through."""
        self._inner.close()


class FaultyMetadata:
    """MetadataFiles around others."""

    def __init__(self, io: FaultyIo, inner: MetadataFiles) -> None:
        self._io = io
        self._inner = inner

    async def _before(self, operation: Operation, name: str = "", length: int = 0) -> Fault | None:
        await self._io.wait_small(operation)
        fault = self._io.fault_of(operation, name, 0, length)
        if fault is not None and not fault.bytes_moved and fault.bytes_moved is not None:
            fault.raise_if_error()
        return fault

    async def names(self) -> list[str]:
        """List, or fail."""
        _raise(await self._before("list_small"))
        return await self._inner.names()

    async def read(self, name: str) -> bytes:
        """Read all, part, or nothing."""
        fault = await self._before("read_small", name)
        _raise(fault)
        data = await self._inner.read(name)
        return data if fault is None else data[: fault.bytes_moved]

    async def create(self, name: str) -> None:
        """Make a file, or fail: before, or when it is there."""
        fault = await self._before("create_small", name)
        await self._inner.create(name)
        _raise(fault)

    async def append(self, name: str, data: bytes) -> None:
        """Append all, or part and fail."""
        fault = await self._before("append_small", name, len(data))
        await self._inner.append(name, data if fault is None else data[: fault.bytes_moved])
        _raise(fault)

    async def sync(self, name: str) -> None:
        """Sync, or fail before."""
        _raise(await self._before("sync_small", name))
        await self._inner.sync(name)

    async def replace(self, name: str, parts: Iterable[bytes]) -> None:
        """Make a file, or fail before it has its name."""
        _raise(await self._before("replace_small", name))
        await self._inner.replace(name, parts)

    async def remove(self, names: Iterable[str]) -> None:
        """Remove files, or fail before they are gone."""
        _raise(await self._before("remove_small"))
        await self._inner.remove(names)

    async def close(self) -> None:
        """Passed through."""
        await self._inner.close()


def _raise(fault: Fault | None) -> None:
    if fault is not None:
        fault.raise_if_error()


def _first(buffers: Sequence[Bytes], count: int) -> list[Bytes]:
    """The first `count` bytes of a list of buffers, as views."""
    head: list[Bytes] = []
    for buffer in buffers:
        if count <= 0:
            break
        head.append(buffer[:count])
        count -= buffer.size
    return head
