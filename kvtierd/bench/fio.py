"""The reference for the disk: fio with O_DIRECT, the same block size, the same amount and the same folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

from kvtierd.bench.rows import BenchError
from kvtierd.core.units import MIB

BLOCK_BYTES = 2 * MIB
NAME = "kvtierd-bench"

Direction = Literal["read", "write"]


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """One way for fio to keep a disk busy: `jobs` threads, each with `depth` requests under way."""

    ioengine: str
    jobs: int
    depth: int

    def __str__(self) -> str:
        return f"{self.ioengine} {self.jobs}x{self.depth}"


PSYNC = Engine("psync", 4, 1)
URING = Engine("io_uring", 1, 16)
ENGINES = (PSYNC, URING)


def find_fio() -> str:
    """Path of fio; BenchError that says how to install it where there is none."""
    path = shutil.which("fio")
    if path is None:
        raise BenchError("fio is not installed; `apt-get install fio` (or your distribution's package) brings it")
    return path


def usable_engines(directory: Path) -> list[Engine]:
    """The engines that work here, found by trying: io_uring is forbidden in many containers. BenchError if none."""
    found, causes = [], []
    for engine in ENGINES:
        try:
            run_fio(directory, engine.jobs * BLOCK_BYTES, "write", engine=engine)
        except BenchError as error:
            causes.append(str(error))
        else:
            found.append(engine)
        remove_files(directory)
    if not found:
        raise BenchError("; ".join(causes))
    return found


def run_fio(
    directory: Path,
    amount_bytes: int,
    direction: Direction,
    *,
    block_bytes: int = BLOCK_BYTES,
    engine: Engine = PSYNC,
) -> float:
    """Bytes a second of fio moving `amount_bytes` (a multiple of jobs times blocks) from or to `directory`.

    Writes end with an fsync of every file, as our flush does. Reads want the files of the same engine's write.
    Raises BenchError with fio's own words when it fails.
    """
    if amount_bytes % (engine.jobs * block_bytes):
        raise ValueError(f"{amount_bytes} bytes are no multiple of {engine.jobs} jobs of {block_bytes}")
    command = [
        find_fio(),
        f"--name={NAME}-{engine.ioengine}",
        f"--directory={directory}",
        f"--size={amount_bytes // engine.jobs}",
        f"--bs={block_bytes}",
        f"--numjobs={engine.jobs}",
        f"--iodepth={engine.depth}",
        f"--ioengine={engine.ioengine}",
        f"--rw={direction}",
        *(["--end_fsync=1"] if direction == "write" else []),
        *("--direct=1", "--thread", "--group_reporting", "--output-format=json"),
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
    for path in directory.glob(f"{NAME}-*"):
        path.unlink()
