"""KvikIO tried in a process of its own: there it may hang, crash or print, and the daemon gets a verdict.

    python -m kvtierd.storage.kvikio_trial '{"directory": "/data", "threads": 4, "task_bytes": 4194304, "direct": true}'

prints one line of JSON. Host memory is written, read and compared; then device memory, with compat mode off, so that
GPUDirect Storage is used or nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import MIB
from kvtierd.storage.buffers import page_buffer

TIMEOUT_S = 30.0
PROBE_NAME = "probe-gds"
PROBE_BYTES = MIB
"""Above KvikIO's threshold for GPUDirect Storage (16 KiB), below which it goes through host memory."""


class Trial(msgspec.Struct, frozen=True):
    """What to try."""

    directory: str
    threads: int
    task_bytes: int
    direct: bool


class Verdict(msgspec.Struct, frozen=True):
    """What came of it: `error` is why KvikIO cannot be used at all, `why` is why GPUDirect Storage cannot."""

    gds: bool = False
    why: str = ""
    error: str = ""


def run_trial(trial: Trial, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Try in a child process. Raises StartupError (74) when KvikIO hangs, crashes, or does not work."""
    command = [sys.executable, "-m", "kvtierd.storage.kvikio_trial", msgspec.json.encode(trial).decode()]
    # Whatever made this process find its packages must make the child find the same ones.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise _failed(f"it hangs: no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise _failed(f"the trial cannot be started: {error.strerror}") from error
    try:
        verdict = msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=Verdict)
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _failed(f"it ended with {done.returncode}: {said[-1] if said else 'no output'}") from None
    if verdict.error:
        raise _failed(verdict.error)
    return verdict


def _failed(cause: str) -> StartupError:
    return StartupError(ExitCode.IO, f"KvikIO does not work here: {cause}; set nvme.io to posix")


def try_kvikio(trial: Trial) -> Verdict:
    """Host memory, then device memory. Runs in the child."""
    from kvtierd.storage.io_kvikio import KvikioIo  # that module imports this one

    io = KvikioIo("auto", threads=trial.threads, task_bytes=trial.task_bytes)
    try:
        io.load(trial)
    except StartupError as error:
        return Verdict(error=str(error))
    why = try_device(io, Path(trial.directory))
    return Verdict(gds=not why, why=why)


def try_device(io: Any, directory: Path) -> str:
    """Why GPUDirect Storage does not work in this directory; "" where it does."""
    import kvikio
    import kvikio.cufile_driver

    try:
        if not kvikio.cufile_driver.get("is_gds_available"):
            return "cuFile says that it is not available (no GPU, no nvidia-fs module, or no support in the driver)"
        kvikio.defaults.set({"compat_mode": kvikio.CompatMode.OFF})
        return compare_device(io, directory / PROBE_NAME)
    except (OSError, RuntimeError) as error:
        return f"{error}".strip().splitlines()[0]


def compare_device(io: Any, path: Path) -> str:
    """Move random bytes host → file → device → file → host; "" when they are the same at every stop."""
    from kvtierd.storage.device_memory import DeviceMemory

    path.unlink(missing_ok=True)
    first, second, back = (page_buffer(PROBE_BYTES) for _ in range(3))
    for pattern in (first, second):
        pattern[:] = bytearray(os.urandom(PROBE_BYTES))
    file = io.create(path, 2 * PROBE_BYTES)
    try:
        with DeviceMemory(PROBE_BYTES) as device:
            if (file.write([first], 0), file.read([device], 0)) != (PROBE_BYTES, PROBE_BYTES):
                return "a read into device memory came back short"
            device.copy_out(back)
            if not np.array_equal(first, back):
                return "a read into device memory brought other bytes than were written"
            device.copy_in(second)
            if (file.write([device], PROBE_BYTES), file.read([back], PROBE_BYTES)) != (PROBE_BYTES, PROBE_BYTES):
                return "a write from device memory came back short"
            return "" if np.array_equal(second, back) else "a write from device memory left other bytes in the file"
    finally:
        file.close()
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    verdict_line = msgspec.json.encode(try_kvikio(msgspec.json.decode(sys.argv[1], type=Trial)))
    sys.stdout.write(verdict_line.decode() + "\n")
    sys.stdout.flush()
