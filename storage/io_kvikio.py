"""KvikIO: CuFile over segments. GPUDirect Storage where the machine has it, KvikIO's compat mode otherwise.

The library is imported when this engine is probed, never before: nobody else pays for it. Its settings are of the
whole process: thread count, task size and direct I/O are set once here, for every file of ours.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import MIB, PAGE_BYTES
from kvtierd.storage.interface import IoMode
from kvtierd.storage.io import Space, compare_transfers
from kvtierd.storage.io_posix import PROBE_NAME, PosixIo, discard, make_allocated
from kvtierd.storage.kvikio_trial import Trial, Verdict, run_trial
from kvtierd.storage.punch import punch_and_claim

TASK_BYTES = 4 * MIB
PROBE_BYTES = 2 * PAGE_BYTES

_ERRNOS = {os.strerror(number): number for number in errno.errorcode}


def import_kvikio() -> ModuleType:
    """The library. Raises StartupError (78) with what to install where it is not there or does not load."""
    try:
        module = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")
    except ImportError as error:
        raise StartupError(
            ExitCode.CONFIG,
            f"nvme.io is kvikio, and KvikIO does not load ({error}); "
            "install kvtierd[gpu], or set nvme.io to auto or posix",
        ) from error
    return module


def configure(kvikio: Any, *, threads: int, task_bytes: int, direct: bool) -> None:
    """Set KvikIO's process-wide settings. Raises ValueError where its own environment variables are wrong."""
    defaults = kvikio.defaults
    chosen = {"num_threads": threads, "task_size": task_bytes}
    chosen |= {"auto_direct_io_read": direct, "auto_direct_io_write": direct}
    if defaults.get("compat_mode") == kvikio.CompatMode.OFF:
        # Without GPUDirect Storage it hangs in this mode; nvme.require says the same and fails with a word.
        chosen["compat_mode"] = kvikio.CompatMode.AUTO
    # A change of the thread count waits for what is under way and makes new threads: only where there is one.
    if changed := {name: value for name, value in chosen.items() if defaults.get(name) != value}:
        defaults.set(changed)


class KvikioFile:
    """A CuFile; see SegmentFile. Buffers may also be device memory (`__cuda_array_interface__`, `size` in bytes)."""

    __slots__ = ("_file",)

    def __init__(self, file: Any) -> None:
        self._file = file

    @property
    def alignment(self) -> int:
        """KvikIO copies what is not aligned through buffers of its own."""
        return 1

    def size_bytes(self) -> int:
        """Length of the file."""
        return os.fstat(self._file.fileno()).st_size

    def allocated_bytes(self) -> int:
        """Blocks that the file holds, in bytes."""
        return os.fstat(self._file.fileno()).st_blocks * 512

    def read(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Read all buffers at once; 0 at the end of the file, where KvikIO would raise."""
        return _transfer(self._file.pread, buffers, offset, self.size_bytes())

    def write(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Write all buffers at once."""
        return _transfer(self._file.pwrite, buffers, offset, None)

    def punch(self, offset: int, length: int) -> None:
        """Give pages back to the device; the space stays ours."""
        punch_and_claim(self._file.fileno(), offset, length)

    def sync(self) -> None:
        """Fdatasync: both of KvikIO's descriptors are of the same file."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file; again does nothing."""
        if not self._file.closed:
            self._file.close()


def _transfer(start: Callable[..., Any], buffers: Sequence[Bytes], offset: int, end: int | None) -> int:
    """One request for each buffer, all under way together; returns the length of the leading part that succeeded."""
    futures: list[tuple[Any, int]] = []
    failure: OSError | None = None
    for buffer in buffers:
        wanted = buffer.size if end is None else min(buffer.size, end - offset)
        if wanted <= 0:
            break
        try:
            futures.append((start(buffer, wanted, offset), wanted))
        except (RuntimeError, ValueError) as error:
            failure = as_os_error(error)
            break
        offset += wanted
    return _finish(futures, failure)


def _finish(futures: list[tuple[Any, int]], failure: OSError | None) -> int:
    """Wait for every request, whatever happens: until then the memory is in use. Raises if the first one failed."""
    total, whole = 0, True
    for future, wanted in futures:
        try:
            done = future.get()
        except RuntimeError as error:
            failure, whole = failure if not whole else as_os_error(error), False
            continue
        total += done if whole else 0
        whole = whole and done == wanted
    if total == 0 and failure is not None:
        raise failure
    return total


def as_os_error(error: Exception) -> OSError:
    """KvikIO raises RuntimeError whose text ends with the system's words; EIO where these are none."""
    cause = str(error).rpartition(": ")[2].strip()
    number = _ERRNOS.get(cause, errno.EIO)
    return OSError(number, cause if number == errno.EIO else os.strerror(number))


class KvikioIo:
    """The engine over KvikIO. `trial` tries the library in a process of its own, because it may hang or crash."""

    def __init__(
        self,
        wanted: Literal["auto", "direct", "buffered"] = "auto",
        *,
        threads: int = 4,
        task_bytes: int = TASK_BYTES,
        trial: Callable[[Trial], Verdict] = run_trial,
    ) -> None:
        self._posix = PosixIo(wanted)
        self._threads = threads
        self._task_bytes = task_bytes
        self._trial = trial
        self._kvikio: Any = None
        self.mode = IoMode.KVIKIO
        self.notes: list[str] = []
        self.why_no_gds = "it was not tried yet"

    @property
    def direct(self) -> bool:
        """Whether bytes bypass the page cache."""
        return self._posix.direct

    def probe(self, directory: Path) -> None:
        """Try the file system, then KvikIO elsewhere, then KvikIO here. Raises StartupError where one of them fails."""
        self._posix.probe(directory)
        trial = Trial(str(directory), self._threads, self._task_bytes, direct=self.direct)
        verdict = self._trial(trial)
        self.load(trial)
        self.mode, self.why_no_gds = (IoMode.GDS if verdict.gds else IoMode.KVIKIO), verdict.why
        self.notes = list(self._posix.notes)
        if not verdict.gds:
            self.notes.append(f"KvikIO works in compat mode, without GPUDirect Storage: {verdict.why}")

    def load(self, trial: Trial) -> None:
        """Import and configure the library in this process, and compare what it writes with what it reads."""
        self._kvikio = import_kvikio()
        try:
            configure(self._kvikio, threads=trial.threads, task_bytes=trial.task_bytes, direct=trial.direct)
            self._compare(Path(trial.directory, PROBE_NAME))
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            raise StartupError(ExitCode.IO, f"KvikIO cannot store in {trial.directory}: {cause}") from error

    def _compare(self, path: Path) -> None:
        discard(path)
        file = self.create(path, PROBE_BYTES)
        try:
            compare_transfers(file)
        finally:
            file.close()
            discard(path)

    def names(self, directory: Path) -> list[str]:
        """Names of all files in the directory, sorted."""
        return self._posix.names(directory)

    def create(self, path: Path, size_bytes: int) -> KvikioFile:
        """Make a file and allocate it; it is removed again when that fails, or when KvikIO does not open it."""
        make_allocated(path, size_bytes)
        try:
            return self.open(path)
        except OSError:
            discard(path)
            raise

    def open(self, path: Path) -> KvikioFile:
        """Open an existing file; KvikIO holds two descriptors of it."""
        try:
            return KvikioFile(self._kvikio.CuFile(path, "r+"))
        except RuntimeError as error:
            raise as_os_error(error) from error

    def remove(self, path: Path) -> None:
        """Unlink."""
        self._posix.remove(path)

    def sync_directory(self, directory: Path) -> None:
        """Fsync the directory."""
        self._posix.sync_directory(directory)

    def space(self, directory: Path) -> Space:
        """From statvfs."""
        return self._posix.space(directory)
