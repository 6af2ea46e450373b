"""One daemon per runtime folder: a second bind would silently take over the first one's ipc path."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvtierd.core.errors import ExitCode, StartupError


class RuntimeLock:
    """Holds `flock` on a file that names the holder's pid; the kernel lets go of it when the process ends.

    Raises StartupError: 75 where another daemon holds it, 74 where the file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError as error:
            raise StartupError(ExitCode.IO, f"the lock file {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            who = f"another daemon, pid {holder}," if holder else "another daemon"
            raise StartupError(
                ExitCode.LOCKED, f"{who} runs on {path.parent}; stop it, or choose another folder with --runtime-dir"
            ) from None
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._fd)
            raise StartupError(ExitCode.IO, f"the lock file {path} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Let go; the file stays, since removing it could unlock a daemon that has just opened it."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)
