"""What a machine is, in the words that a figure needs beside it: no names of hosts, users or paths."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from kvtierd import __version__
from kvtierd.core.units import KIB, format_bytes

_PROC = Path("/proc")


def describe(proc: Path = _PROC) -> str:
    """Processor, CPUs that we may use, memory, kernel, Python, version, and how busy others keep it."""
    parts = [_processor(proc / "cpuinfo"), f"{len(os.sched_getaffinity(0))} CPUs", _memory(proc / "meminfo")]
    parts += [f"Linux {platform.release()}", f"Python {platform.python_version()}", f"kvtierd {__version__}"]
    return ", ".join([*filter(None, parts), f"load {os.getloadavg()[0]:.1f}"])


def _processor(path: Path) -> str:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.machine()


def _memory(path: Path) -> str:
    for line in path.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return f"{format_bytes(int(line.split()[1]) * KIB)} of memory"
    return ""
