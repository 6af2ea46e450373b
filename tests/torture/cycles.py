"""Starts that end in a crash, or a stop: nothing of shared memory, descriptors, processes or folders is left behind.

Counted around each cycle: every memfd that the daemon had, by who in the whole system still has it open or mapped;
named objects in /dev/shm, of which it may have none; descriptors, threads and children of this process, which is a
client and, in every second unit, the holder of the daemon's memory; and in each life the descriptors and threads of the
daemon itself, which must not depend on how many lives came before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtierd import Client
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.testing.waiting import wait_for
from tests.torture.logs import complaints
from tests.torture.parts import Part, Unit
from tests.torture.prompts import SPACE, content_of, keys_of, wrong_blocks

SETTINGS: dict[str, Any] = {
    "host__capacity": "32MiB",
    "host__chunk_bytes": "4MiB",
    "gpu__capacity": "8MiB",
    "nvme__capacity": "128MiB",
    "nvme__segment_bytes": "8MiB",
}
SETTLE_S = 5.0
File = tuple[int, int]
"""Device and inode."""


def run(unit: Unit) -> Iterator[str]:
    """Start and end a daemon `unit.amount` times on the same folders."""
    rng = random.Random(unit.seed)
    warm = bool(unit.number % 2)
    daemon = (EmbeddedDaemon.warm if warm else EmbeddedDaemon)(unit.folder / "d", **SETTINGS)
    mine: dict[str, int] = {}
    lives: list[dict[str, int]] = []
    files: set[File] = set()
    try:
        for number in range(unit.amount):
            yield from _life(daemon, number, lives, files, crash=rng.random() < 0.8)
            if not number:
                mine = _mine()  # the first client of a process opens what it keeps for good
            elif not warm:
                yield from _leaks(f"cycle {number}", files, mine)
    finally:
        daemon.close()
    if not warm:  # the holder's own descriptors have gone
        yield from _leaks("the last end", files, mine)
    elif left := holders(files):
        yield f"after the last end shared memory of the daemon is held by {sorted(left)}"
    if not files:
        yield "no shared memory was ever seen: the unit proves nothing"
    yield from _runtime_folder(daemon.runtime_dir)
    for name in ("descriptors", "threads"):
        seen = [life[name] for life in lives]
        if seen and max(seen[1:] or seen) > seen[min(1, len(seen) - 1)] + 2:
            yield f"the daemon's {name} grow from life to life: {seen}"
    yield from complaints(daemon.log_path)


def _life(
    daemon: EmbeddedDaemon, number: int, lives: list[dict[str, int]], files: set[File], *, crash: bool
) -> Iterator[str]:
    daemon.start()
    with Client(daemon.endpoint, timeout_s=10, transfer_timeout_s=20) as client:
        wait_for(lambda: client.stats()["host_ready_bytes"] == client.stats()["host_capacity_bytes"])
        space = client.register(SPACE)
        for prompt in (number % 5, 100 + number):
            keys = keys_of(prompt, 8)
            client.store(space, keys, content_of(keys))
            found = client.fetch(space, keys)
            if wrong := wrong_blocks(found.blocks[: found.count], keys):
                yield f"cycle {number}: blocks {wrong} have other bytes"
            if not found.count:
                yield f"cycle {number}: nothing of what was just stored is found"
        lives.append({"descriptors": count_of(daemon.pid, "fd"), "threads": count_of(daemon.pid, "task")})
        files |= shared_files(daemon.pid)
        maps = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
        if named := [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")]:
            yield f"cycle {number}: the daemon has shared memory with a name, which would outlive it: {named[0]}"
        pid = daemon.pid
        if crash:
            daemon.kill()  # while the client is attached
        elif code := daemon.stop():
            yield f"cycle {number}: the daemon ended with {code}"
    if Path(f"/proc/{pid}").exists():
        yield f"cycle {number}: process {pid} is still there"


def count_of(pid: int | str, what: str) -> int:
    """Entries of a folder of a process in /proc: `fd` or `task`."""
    return sum(1 for _ in Path(f"/proc/{pid}/{what}").iterdir())


def _mine() -> dict[str, int]:
    gc.collect()  # a closed client keeps a descriptor until nothing refers to it
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"descriptors": count_of("self", "fd"), "children": len(children), "threads": count_of("self", "task")}


def shared_files(pid: int) -> set[File]:
    """Device and inode of every memfd that a process has open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed, or its process has ended
            if str(entry.readlink()).startswith("/memfd:"):
                about = entry.stat()
                found.add((about.st_dev, about.st_ino))
    return found


def holders(files: set[File]) -> set[int]:
    """Processes that have one of these open, or mapped."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _holds(entry, files)}


def _holds(process: Path, files: set[File]) -> bool:
    try:
        if shared_files(int(process.name)) & files:
            return True
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return False  # it has ended, or is none of ours
    inodes = {inode for _, inode in files}
    return any("/memfd:" in line and int(line.split()[4]) in inodes for line in lines)


def _leaks(when: str, files: set[File], mine: dict[str, int]) -> Iterator[str]:
    """What is left: it is given some time, because the kernel tears a dead process down when it likes."""
    end_s = time.monotonic() + SETTLE_S
    while (left := holders(files)) and time.monotonic() < end_s:
        time.sleep(0.05)
    if left:
        yield f"after {when} shared memory of the daemon is held by {sorted(left)}"
    if (now := _mine()) != mine:
        yield f"after {when} this process holds {now} and held {mine}"


def _runtime_folder(folder: Path) -> Iterator[str]:
    left = [path.name for path in folder.rglob("*") if path.is_socket()] if folder.exists() else []
    if len(left) > 4:
        yield f"sockets are left behind: {left}"


PART = Part("cycles", "starts and crashes", 50, 2, 10, run)
