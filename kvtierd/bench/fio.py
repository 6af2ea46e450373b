"""The reference for the disk: fio, with the same block size, the same amount and the same folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

from kvtierd.bench.rows import BenchError
from kvtierd.core.units import MIB

JOBS = 4
BLOCK_BYTES = 2 * MIB
NAME = "direct fio, 2 MiB psync, 4 jobs"

Direction = Literal["read", "write"]


def find_fio() -> str:
    """Path of fio; BenchError that says how to install it where there is none."""
    path = shutil.which("fio")
    if path is None:
        raise BenchError("fio is not installed; `apt-get install fio` (or your distribution's package) brings it")
    return path


def run_fio(directory: Path, amount_bytes: int, direction: Direction) -> float:
    """Bytes a second of fio moving `amount_bytes` (a multiple of 4 jobs times 2 MiB) from or to `directory`.

    Writes end with an fsync of every file, as our flush does. Reads want the files of a write before them.
    Raises BenchError with fio's own words when it fails.
    """
    if amount_bytes % (JOBS * BLOCK_BYTES):
        raise ValueError(f"{amount_bytes} bytes are no multiple of {JOBS} jobs of {BLOCK_BYTES}")
    command = [
        find_fio(),
        "--name=kvtierd-bench",
        f"--directory={directory}",
        f"--size={amount_bytes // JOBS}",
        f"--bs={BLOCK_BYTES}",
        f"--numjobs={JOBS}",
        f"--rw={direction}",
        *(["--end_fsync=1"] if direction == "write" else []),
        *("--direct=1", "--ioengine=psync", "--thread", "--group_reporting", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise BenchError(f"fio failed with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    return parse_rate(done.stdout, direction)


def parse_rate(output: str, direction: Direction) -> float:
    """Bytes a second in fio's JSON, which notes may precede; BenchError when it is none or says 0."""
    try:
        report: dict[str, Any] = json.loads(output[output.index("{") :])
        rate = float(report["jobs"][0][direction]["bw_bytes"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(f"fio's report cannot be read ({error!r}): {output[:200]!r}") from error
    if rate <= 0:
        raise BenchError(f"fio reports a {direction} rate of {rate}")
    return rate


def remove_files(directory: Path) -> None:
    """Delete what fio wrote, so that the next round writes new files as a first one does."""
    for path in directory.glob("kvtierd-bench.*"):
        path.unlink()
