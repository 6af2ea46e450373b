"""What a process holds in memory, from the kernel's own account."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvtierd.core.units import KIB, MIB

_HEAD = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)")


def resident_bytes(pid: int) -> tuple[int, int]:
    """Proportional set size of a process, and how much of it lies in the daemon's pools.

    Pss counts a page that n processes map as an n-th, so libraries shared with others are not charged whole. The
    pools are the arena's memfds and the host device's pool. Both are the mappings of 1 MiB and more that the daemon
    marks as not to be dumped (flag `dd`), so they need no names.
    """
    return pss_of(Path(f"/proc/{pid}/smaps").read_text())


def total_bytes(pid: int) -> int:
    """Proportional set size of a process alone: its account is short, and reading it disturbs what it counts less."""
    line = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return _kib(line.partition(":")[2].strip())


def pss_of(smaps: str) -> tuple[int, int]:
    """The same from the text of an smaps file."""
    total = pools = 0
    for fields in _mappings(smaps):
        pss = _kib(fields["Pss"])
        total += pss
        if "dd" in fields["VmFlags"].split() and _kib(fields["Size"]) >= MIB:
            pools += pss
    return total, pools


def maps_file(pid: int, part: str) -> bool:
    """Whether a process has mapped a file whose path contains `part`, such as a library."""
    return part in Path(f"/proc/{pid}/maps").read_text()


def _mappings(text: str) -> Iterator[dict[str, str]]:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if _HEAD.fullmatch(line):
            if fields:
                yield fields
            fields = {}
        else:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    if fields:
        yield fields


def _kib(field: str) -> int:
    return int(field.split(maxsplit=1)[0]) * KIB
