"""What the command line may ask of a bench, and what the machine offers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from kvtierd.bench.rows import BenchError
from kvtierd.core.units import KIB, MIB, format_bytes, parse_bytes

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_ASSUMED_L3_BYTES = 32 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """`quick` means fewer rounds on data of the same class of sizes. `directory` holds temporary folders.

    `file` is what a bench that replays something reads, `tier_blocks` the capacities that it is replayed with, `plot`
    where it draws them. With `live` it replays through a daemon, its own or the one at `endpoint`. `only` names parts
    of a bench that has some (kvtierd.bench.catalogue.PARTS); empty means all.
    """

    quick: bool = False
    directory: Path | None = None
    file: Path | None = None
    tier_blocks: tuple[int, ...] = ()
    plot: Path | None = None
    live: bool = False
    endpoint: str = ""
    only: tuple[str, ...] = ()

    def wants(self, part: str) -> bool:
        """Whether this part of a bench is asked for."""
        return not self.only or part in self.only

    def rounds(self, full: int, quick: int) -> int:
        """How many rounds to run."""
        return quick if self.quick else full


def busy_note() -> str:
    """A line of warning where others use this machine's CPUs, which the figures would show; else an empty string."""
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load < cpus / 2:
        return ""
    return f"the load of this machine is {load:.1f} on {cpus} CPUs: others disturb the figures"


def l3_bytes(caches: Path = _CACHES) -> int:
    """Size of the last-level cache that CPU 0 sees; 32 MiB where the kernel does not say."""
    for index in sorted(caches.glob("index*")):
        if (index / "level").read_text().strip() == "3":
            return parse_bytes((index / "size").read_text())
    return _ASSUMED_L3_BYTES


def thread_count() -> int:
    """Threads for both sides of a comparison of copies: one a CPU that we may run on, at most 8, as the daemon."""
    return min(8, len(os.sched_getaffinity(0)))


def need_memory(count: int) -> None:
    """Raise BenchError where `count` bytes are more than the kernel thinks it can give without swapping."""
    available = available_bytes()
    if count > available:
        raise BenchError(f"{format_bytes(count)} of memory are needed and {format_bytes(available)} are available")


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable of the kernel."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    raise BenchError(f"{meminfo} names no MemAvailable")
