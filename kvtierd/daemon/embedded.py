"""A daemon of one's own, as a child process below a folder: for demos, benches and tests.

It reads no system configuration. It stops when its owner stops it, leaves the `with` block, or dies: the daemon
watches a pipe that only the owner holds open.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtierd.daemon.holder import DescriptorHolder

START_TIMEOUT_S = 240.0
"""Compiling kernels takes a minute or two where `kvtierctl precompile` has not run."""
STOP_TIMEOUT_S = 60.0
_RUNTIME_BYTES = 80
"""Longest runtime folder that leaves room for a tenant and a socket in the kernel's 107 bytes of an ipc path."""


class EmbeddedDaemonError(RuntimeError):
    """The daemon did not start or stop; the text ends with the last lines of its log."""


class EmbeddedDaemon:
    """A real `kvtierd` process with folders `data`, `run` and the file `log` below `directory`.

    Settings are given by dotted key with `__` for the dot, as in the environment:
    `EmbeddedDaemon(folder, host__capacity="256MiB", nvme__directory="")`. Without a directory a temporary one is
    made, and removed by `stop`. `start` returns when the daemon is ready; a context manager starts and stops it.
    """

    python = sys.executable
    """The interpreter of the daemon's environment; a subclass may name another one than ours."""

    def __init__(self, directory: str | Path | None = None, **overrides: object) -> None:
        self._owns_directory = directory is None
        self.directory = Path(directory) if directory is not None else Path(tempfile.mkdtemp(prefix="kvtierd-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory = self.directory.resolve()
        self.log_path = self.directory / "log"
        self.endpoint = ""
        self.exit_code: int | None = None
        self._overrides = overrides
        self._runtime = self._runtime_folder()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_pipe = -1
        self._holder: DescriptorHolder | None = None

    @classmethod
    def warm(cls, directory: str | Path | None = None, **overrides: object) -> Self:
        """One whose host tier outlives it, as under systemd.

        The owner holds its memory until `close`, or the owner's end; the next `start` begins with it, also after
        `kill`. `drop_memory` is what a full stop of the service does.
        """
        daemon = cls(directory, **overrides)
        daemon._runtime.mkdir(mode=0o755, parents=True, exist_ok=True)
        daemon._holder = DescriptorHolder(daemon._runtime / "notify")
        return daemon

    def drop_memory(self) -> None:
        """Let go of what is held for the next life. Raises EmbeddedDaemonError where nothing is held."""
        if self._holder is None:
            raise EmbeddedDaemonError("nothing is held: this daemon was not made by `warm`")
        self._holder.drop()

    @property
    def pid(self) -> int:
        """The daemon's process. Raises EmbeddedDaemonError when none runs."""
        return self._running().pid

    @property
    def runtime_dir(self) -> Path:
        """The folder of its sockets."""
        return self._runtime

    @property
    def data_dir(self) -> Path:
        """The folder of its segments, unless `nvme__directory` says otherwise."""
        return self.directory / "data"

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Spawn the daemon and wait until it is ready. Raises EmbeddedDaemonError with the log's tail."""
        if self._process is not None:
            raise EmbeddedDaemonError("the daemon runs already")
        if self._holder is not None:
            self._holder.settle()
        floor = self._holder.first_free if self._holder is not None else 0
        ready_read, ready_write = _pipe(floor)
        stop_read, self._stop_pipe = _pipe(floor)
        try:
            self._process = self._spawn(ready_write, stop_read)
        finally:
            os.close(ready_write)
            os.close(stop_read)
        try:
            self.endpoint = self._await_ready(ready_read, timeout_s)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(ready_read)
        return self

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ask it to drain, flush and exit; returns its exit code. Raises EmbeddedDaemonError if it takes too long."""
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise EmbeddedDaemonError(f"the daemon did not stop within {timeout_s} s{self._tail()}") from None
        return self._ended(process)

    def kill(self) -> None:
        """End it as a crash would (SIGKILL); its folders stay."""
        process = self._running()
        process.kill()
        process.wait()
        self._ended(process)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Stop it cleanly, if it runs, and start it again on the same folders and endpoint."""
        if self._process is not None:
            self.stop()
        return self.start(timeout_s)

    def logs(self) -> str:
        """All that the daemon has written, over all its lives."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def close(self) -> None:
        """Stop it if it runs, and remove the folders that were made for it."""
        try:
            if self._process is not None:
                self.stop()
        finally:
            if self._holder is not None:
                self._holder.close()
                self._holder = None
            if self._runtime.parent != self.directory:
                shutil.rmtree(self._runtime, ignore_errors=True)
            if self._owns_directory:
                shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _runtime_folder(self) -> Path:
        below = self.directory / "run"
        if len(os.fsencode(below)) <= _RUNTIME_BYTES:
            return below
        return Path(tempfile.mkdtemp(prefix="kvtierd-run-", dir="/tmp"))

    def _spawn(self, ready_fd: int, stop_fd: int) -> subprocess.Popen[bytes]:
        # -P: this package is started, and not what is in the folder we happen to be in.
        command = [self.python, "-P", "-m", "kvtierd.daemon.main", "--config", os.devnull, *self._options()]
        command += ["--ready-fd", str(ready_fd), "--stop-fd", str(stop_fd)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIERD__")}
        environment.pop("NOTIFY_SOCKET", None)  # that socket waits for the owner, not for its child
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        passed: list[int] = []
        if self._holder is not None:
            environment["NOTIFY_SOCKET"] = os.fspath(self._holder.path)
            command, passed = self._holder.command(command)
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                pass_fds=(ready_fd, stop_fd, *passed),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is for the owner, which then stops its daemon
            )

    def _options(self) -> list[str]:
        settings: dict[str, object] = {
            "server.runtime_dir": self._runtime,
            "nvme.directory": self.data_dir,
            "log.format": "text",
            "metrics.listen": "",
        }
        settings |= {key.replace("__", "."): value for key, value in self._overrides.items()}
        return [part for key, value in settings.items() for part in ("--set", f"{key}={_text(value)}")]

    def _await_ready(self, ready_fd: int, timeout_s: float) -> str:
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([ready_fd], [], [], left)[0]:
                raise EmbeddedDaemonError(f"the daemon was not ready within {timeout_s} s{self._tail()}")
            piece = os.read(ready_fd, 4096)
            if not piece:
                code = self._running().wait()
                raise EmbeddedDaemonError(f"the daemon ended with exit code {code}{self._tail()}")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return str(answer["endpoint"])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EmbeddedDaemonError("the daemon does not run")
        return self._process

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        self._process = None
        self.exit_code = process.returncode
        with contextlib.suppress(OSError):
            os.close(self._stop_pipe)
        self._stop_pipe = -1
        return process.returncode

    def _tail(self) -> str:
        lines = self.logs().splitlines()[-15:]
        return ":\n" + "\n".join(lines) if lines else ""


def _pipe(floor: int) -> tuple[int, int]:
    """A pipe's reading and writing end, both at numbers from `floor` on."""
    ends = os.pipe()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in ends]
    for fd in ends:
        os.close(fd)
    return moved[0], moved[1]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
