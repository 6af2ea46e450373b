"""Compile kernels in a process of their own: Numba holds the GIL for seconds, and a daemon has requests to answer.

The process fills the cache folder (`kvtierd.gpu.kernels.binaries`: whole files, by rename), from which the daemon loads
them. It has a low priority, sees no GPU, and ends with the daemon, however that ends:

    python -m kvtierd.gpu.kernels.compile_apart PARENT_PID FOLDER ARCHITECTURE KERNEL...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtierd.gpu.kernels.binaries import binary_of, is_kept
from kvtierd.gpu.kernels.compile import PACKAGE
from kvtierd.gpu.kernels.registry import Architecture, Kernel, all_kernels, architecture_name, architecture_of
from kvtierd.index.jit import cache_state, configure_cache

NICENESS = 10
LIMIT_S = 600.0
"""Seconds after which the process is ended: a kernel takes one or two where it has a processor."""
_PR_SET_PDEATHSIG = 1


class Apart:
    """Compiles in processes of their own, one at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether nothing is to be compiled any more."""
        return self._stopped

    def fill(self, kernels: Iterable[Kernel], architecture: Architecture) -> str:
        """Have all of these in the cache folder; why some may not be there, "" where they are."""
        with self._turn:
            missing = [kernel.name for kernel in kernels if not is_kept(kernel, architecture)]
            if not missing:
                return ""
            folder = cache_state().directory
            if folder is None:
                return cache_state().note
            return self._run([str(os.getpid()), str(folder.parent), architecture_name(architecture), *missing])

    def stop(self) -> None:
        """End the process that is at work, and begin none any more."""
        with self._state:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def _run(self, arguments: Sequence[str]) -> str:
        with self._state:
            if self._stopped:
                return "it was stopped"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{PACKAGE}.compile_apart", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_environment(),
            )
        process = self._process
        try:
            _, said = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"the compiler's process took more than {LIMIT_S:.0f} s"
        finally:
            with self._state:
                self._process = None
        if not process.returncode:
            return ""
        if process.returncode < 0:
            return f"the compiler's process was ended by signal {-process.returncode}"
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return f"the compiler's process ended with {process.returncode}: {last[0]}"


def _environment() -> dict[str, str]:
    """Ours, with this package where we found it, and without a GPU or our service manager's socket."""
    found = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    package = str(Path(str(sys.modules["kvtierd"].__file__)).parents[1])
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [package, found.get("PYTHONPATH")]))
    found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def _end_with(parent: int) -> None:
    """Have the kernel end this process with the thread that began it, and look whether it has ended before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent} that wanted these kernels has ended")


def main(arguments: Sequence[str]) -> int:
    """Compile what is missing; SystemExit with the reason where a kernel is unknown or cannot be kept."""
    parent, folder, wanted, *names = arguments
    _end_with(int(parent))
    with contextlib.suppress(OSError):  # a sandbox may forbid it; then it is as urgent as the daemon
        os.nice(NICENESS)
    configure_cache(Path(folder))
    table, architecture = {kernel.name: kernel for kernel in all_kernels()}, architecture_of(wanted)
    for name in names:
        if name not in table:
            raise SystemExit(f"{name} is in no table of kernels")
        binary_of(table[name], architecture)
        if not is_kept(table[name], architecture):
            raise SystemExit(f"{name} could not be kept: {cache_state().note}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
