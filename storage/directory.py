"""The store's directory: made if its parent exists, and locked against a second daemon."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from kvtierd.core.errors import ExitCode, StartupError

LOCK_NAME = "lock"


def prepare(directory: Path) -> None:
    """Make the directory, mode 0700, if only its last part is missing. Raises StartupError (74)."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise StartupError(ExitCode.IO, f"nvme.directory {directory} is not a directory") from None
    except FileNotFoundError:
        raise StartupError(
            ExitCode.IO,
            f"nvme.directory {directory} is missing and so is its parent: make {directory.parent}",
        ) from None
    except OSError as error:
        raise StartupError(ExitCode.IO, f"cannot make nvme.directory {directory}: {error.strerror}") from error


def what_failed(error: Exception) -> str:
    """The reason in the system's words, and the file where the error has one."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{Path(error.filename).name}: {error.strerror}" if isinstance(error.filename, str) else error.strerror


class DirectoryLock:
    """flock on DIRECTORY/lock; the kernel lets go of it however the process ends."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._fd = -1

    def acquire(self) -> None:
        """Lock and leave our process id. Raises StartupError: 75 naming the holder, 74 when it cannot be written."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                raise self._held(holder) from None
            raise self._unusable(error) from error
        self._fd = fd

    def release(self) -> None:
        """Let go; the file stays, empty, because removing a lock file is a race."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)
        self._fd = -1

    def _held(self, holder: str) -> StartupError:
        who = f"process {holder}" if holder else "another process"
        return StartupError(
            ExitCode.LOCKED,
            f"{self._path.parent} is in use by {who}; stop it, or give this daemon another nvme.directory",
        )

    def _unusable(self, error: OSError) -> StartupError:
        return StartupError(ExitCode.IO, f"cannot write in nvme.directory {self._path.parent}: {error.strerror}")
