"""`kvtierctl bench start`: from spawning `kvtierd` on an empty store to ready, and what it then holds in memory.

The clock runs from before the process is spawned until its readiness line has arrived, interpreter start and imports
included. A start before the measured ones fills the kernel cache where `kvtierctl precompile` has not. Each start has
a store of its own, so that nothing is recovered.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtierd.bench.options import Options
from kvtierd.bench.rounds import timed
from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.smaps import maps_file, resident_bytes
from kvtierd.daemon.embedded import EmbeddedDaemon

LIBRARIES = "import asyncio, numpy, numba, zmq.asyncio, msgspec, blake3, xxhash, aiofiles, yaml"


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """What one start showed."""

    seconds: float
    own_bytes: int
    pool_bytes: int
    torch: bool


def rows(options: Options) -> Iterator[Row]:
    """Measure several starts."""
    starts, imports = [], []
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder:
        _start(Path(folder), "warm-up")
        for number in range(options.rounds(5, 3)):
            starts.append(_start(Path(folder), str(number)))
            imports.append(timed(import_libraries))
    seconds = statistics.median(start.seconds for start in starts)
    yield make_row("start", "spawn to ready", seconds, "s", goal="<= 2")
    yield make_row("start", "an interpreter that imports the same libraries", statistics.median(imports), "s")
    own = statistics.median(start.own_bytes for start in starts) / 1e6
    yield make_row("start", "resident beyond the pools (Pss)", own, "MB", goal="<= 200")
    pools = statistics.median(start.pool_bytes for start in starts) / 1e6
    yield make_row("start", "resident in the pools (Pss)", pools, "MB")
    yield make_row("start", "starts that loaded torch", sum(start.torch for start in starts), "starts", goal="<= 0")


def _start(folder: Path, name: str) -> _Start:
    daemon = EmbeddedDaemon(folder / name, gpu__device="host")
    seconds = timed(daemon.start)
    try:
        total, pools = resident_bytes(daemon.pid)
        return _Start(seconds, total - pools, pools, maps_file(daemon.pid, "libtorch"))
    finally:
        daemon.close()


def import_libraries() -> None:
    """Start an interpreter, import what the daemon imports, and end."""
    subprocess.run([sys.executable, "-c", LIBRARIES], check=True, timeout=60)
