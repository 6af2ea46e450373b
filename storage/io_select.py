"""Which engine reaches the disk: chosen at start by trying, or named by the settings."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from kvtierd.config.schema import Nvme
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.storage.interface import IoMode
from kvtierd.storage.io import SegmentFile, Space, StorageIo
from kvtierd.storage.io_posix import PosixIo


def kvikio_may_load() -> str:
    """Why KvikIO cannot be of use in this process, found without importing it; "" where it is worth trying."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")  # KvikIO refuses every read and write without it, those of host memory too
    except OSError:
        return "there is no CUDA driver (libcuda.so.1)"
    return ""


class SelectedIo:
    """A StorageIo that is one of the engines once it is probed.

    With `nvme.io: auto` that is KvikIO where GPUDirect Storage works, else our own O_DIRECT reader and writer: for
    host memory KvikIO's compat mode does the same system calls with a hop to threads of its own before each.
    """

    def __init__(self, settings: Nvme) -> None:
        self._settings = settings
        self._engine: StorageIo = PosixIo(settings.mode)
        self.notes: list[str] = []

    @property
    def mode(self) -> IoMode:
        """The engine's mode."""
        return self._engine.mode

    @property
    def direct(self) -> bool:
        """Whether bytes bypass the page cache."""
        return self._engine.direct

    def probe(self, directory: Path) -> None:
        """Choose the engine and probe it; see StorageIo. Raises StartupError too when what is required is not there."""
        why_no_gds = self._choose(directory)
        self.notes = list(self._engine.notes)
        match self._settings.require:
            case "gds" if self.mode is not IoMode.GDS:
                raise _missing("gds", f"GPUDirect Storage does not work in {directory}: {why_no_gds}")
            case "kvikio" if self.mode not in {IoMode.GDS, IoMode.KVIKIO}:
                raise _missing("kvikio", f"KvikIO does not work in {directory}: {why_no_gds}")
            case "o_direct" if not self.direct:
                raise _missing("o_direct", f"the file system of {directory} refuses O_DIRECT")

    def _choose(self, directory: Path) -> str:
        """Set and probe the engine; returns why it does not have GPUDirect Storage ("" where it does)."""
        settings = self._settings
        if settings.io == "kvikio":
            return self._try_kvikio(directory)
        why = "nvme.io is posix" if settings.io == "posix" else kvikio_may_load()
        if not why:
            try:
                why = self._try_kvikio(directory)
            except StartupError as error:
                why = str(error)
            if not why or settings.require == "kvikio":
                return why
        self._engine = PosixIo(settings.mode)
        self._engine.probe(directory)
        if settings.io == "auto" and not why.startswith(("kvikio is not", "there is no CUDA")):
            # Where KvikIO could not be expected there is nothing to say.
            self._engine.notes.append(f"KvikIO is not used: {why}")
        return why

    def _try_kvikio(self, directory: Path) -> str:
        from kvtierd.storage.io_kvikio import KvikioIo  # only who chooses KvikIO pays for it

        settings = self._settings
        engine = KvikioIo(settings.mode, threads=settings.io_threads, task_bytes=settings.kvikio_task_bytes)
        engine.probe(directory)
        self._engine = engine
        return engine.why_no_gds

    def names(self, directory: Path) -> list[str]:
        """See StorageIo."""
        return self._engine.names(directory)

    def create(self, path: Path, size_bytes: int) -> SegmentFile:
        """See StorageIo."""
        return self._engine.create(path, size_bytes)

    def open(self, path: Path) -> SegmentFile:
        """See StorageIo."""
        return self._engine.open(path)

    def remove(self, path: Path) -> None:
        """See StorageIo."""
        self._engine.remove(path)

    def sync_directory(self, directory: Path) -> None:
        """See StorageIo."""
        self._engine.sync_directory(directory)

    def space(self, directory: Path) -> Space:
        """See StorageIo."""
        return self._engine.space(directory)


def _missing(required: str, cause: str) -> StartupError:
    return StartupError(ExitCode.IO, f'nvme.require is {required}, and {cause}; set nvme.require to "" to go without')
