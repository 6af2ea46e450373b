"""A machine with a systemd of its own, in namespaces of this one. Needs root, and systemd installed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

BOOT = Path(__file__).with_name("boot.sh")
NAMESPACES = ("--pid", "--mount", "--uts", "--ipc", "--cgroup", "--net")
BOOT_S = 60.0
COMMAND_S = 280.0  # compiling kernels takes the longest


class MachineError(RuntimeError):
    """The machine does not do what a machine does; the text has its last words."""


class Machine:
    """Started by `start`, gone without a trace after `stop`."""

    def __init__(self, folder: Path, library: str, shares: Mapping[str, Path]) -> None:
        self.library = library
        self._folder = folder
        self._shares = shares
        self._log = folder.with_suffix(".log")
        self._cgroup = _cgroup2() / f"kvtierd-test-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0

    def start(self) -> None:
        """Boot, and wait until systemd has started all it has to."""
        self._folder.mkdir()
        self._cgroup.mkdir()
        shares = [f"{name}={source}" for name, source in self._shares.items()]
        # A control group of its own, so that what systemd makes in it can be removed afterwards.
        script = 'echo $$ >"$1/cgroup.procs"; shift; exec unshare --fork --kill-child "$@"'
        command = ["bash", "-c", script, "boot", self._cgroup, *NAMESPACES, BOOT, self._folder, self.library, *shares]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
        self._init = self._await_init(time.monotonic() + BOOT_S)
        state = self.run("systemctl", "is-system-running", "--wait", check=False).stdout.strip()
        if state not in {"running", "degraded"}:
            raise MachineError(f"systemd is {state!r}\n{self._log.read_text()}")

    def stop(self) -> None:
        """End everything that runs in it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        for path in sorted(self._cgroup.rglob("*/"), reverse=True):
            _remove_group(path)
        _remove_group(self._cgroup)

    def run(self, *command: str, check: bool = True, user: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        prefix = ["runuser", "-u", user, "--"] if user else []
        enter = ["nsenter", "--target", str(self._init), "--all", "--root"]
        done = subprocess.run(
            [*enter, "env", "-i", "--chdir=/", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *prefix, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        if check and done.returncode:
            raise MachineError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def write(self, path: str, text: str) -> None:
        """Write a file inside."""
        target = Path(f"/proc/{self._init}/root{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def remove(self, path: str) -> None:
        """Remove a file inside."""
        Path(f"/proc/{self._init}/root{path}").unlink()

    def exists(self, path: str) -> bool:
        """Whether there is such a file inside."""
        return Path(f"/proc/{self._init}/root{path}").exists()

    def _await_init(self, deadline_s: float) -> int:
        """The process that is number one inside, once it is systemd."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise MachineError(f"the machine ended with {self._process.returncode}\n{self._log.read_text()}")
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for pid in children.read_text().split():
                    private = Path("/proc", pid, "root", "run/systemd/private")
                    if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd" and private.exists():
                        return int(pid)
            time.sleep(0.05)
        raise MachineError(f"systemd was not there within {BOOT_S} s\n{self._log.read_text()}")


def _cgroup2() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise MachineError("there is no cgroup2 file system here; systemd cannot be booted without")


def _remove_group(path: Path) -> None:
    """Remove a control group; its processes may take a moment to go."""
    for _ in range(100):
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
