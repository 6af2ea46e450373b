"""Checks of the disk: file system, free space, O_DIRECT, GPUDirect Storage and why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvtierd.cli.finding import Check, Finding, Verdict
from kvtierd.config.fields import split_folders
from kvtierd.config.schema import Settings
from kvtierd.core.errors import StartupError
from kvtierd.core.units import format_bytes
from kvtierd.storage.interface import IoMode
from kvtierd.storage.io_posix import PosixIo
from kvtierd.storage.io_select import kvikio_may_load
from kvtierd.storage.kvikio_trial import Trial, run_trial

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"})


def file_system(settings: Settings) -> Iterator[Finding]:
    """What kind it is and how much is free."""
    folder = existing(settings)
    if folder is None:
        yield Finding("nvme", Verdict.NOTE, "nvme.directory is empty: there is no nvme tier")
        return
    kind, device = mount_of(folder)
    text = f"{folder} is on {kind} ({device})"
    if kind in IN_MEMORY:
        yield Finding("file system", Verdict.WARN, text, "nothing there outlives a reboot: name a folder on a disk")
    elif kind in NETWORK:
        yield Finding("file system", Verdict.WARN, text, "a network is between this machine and its disk")
    else:
        yield Finding("file system", Verdict.OK, text)
    space = os.statvfs(folder)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    wanted = settings.nvme.capacity
    text = f"{format_bytes(free)} of {format_bytes(total)} free"
    if wanted and wanted > free + _own_bytes(folder):
        yield Finding("free space", Verdict.WARN, f"{text}; nvme.capacity is {format_bytes(wanted)}", "lower it")
    elif free < 2 * settings.nvme.segment_bytes and not _own_bytes(folder):
        yield Finding(
            "free space", Verdict.FAIL, f"{text}: less than two segments", "free some, or lower segment_bytes"
        )
    else:
        yield Finding("free space", Verdict.OK, text)


def direct(settings: Settings) -> Iterator[Finding]:
    """Whether O_DIRECT works there, by writing with it."""
    folder = existing(settings)
    if folder is None:
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("O_DIRECT", Verdict.WARN, f"cannot be tried: {folder} is not writable", "run this as root")
        return
    io = PosixIo("auto")
    try:
        io.probe(folder)
    except StartupError as error:
        yield Finding("O_DIRECT", Verdict.FAIL, str(error))
        return
    if io.mode is IoMode.DIRECT:
        yield Finding("O_DIRECT", Verdict.OK, "works: bytes go past the page cache")
        return
    required = settings.nvme.mode == "direct" or settings.nvme.require == "o_direct"
    advice = "every byte is in memory twice; ext4 and xfs on a local disk have it"
    yield Finding("O_DIRECT", Verdict.FAIL if required else Verdict.WARN, "refused by the file system", advice)


def gds(settings: Settings) -> Iterator[Finding]:
    """Whether GPUDirect Storage works there, by using it in a process of its own."""
    folder = existing(settings)
    if folder is None:
        return
    required = settings.nvme.require in {"gds", "kvikio"} or settings.nvme.io == "kvikio"
    bad = Verdict.FAIL if required else Verdict.NOTE
    if why := kvikio_may_load():
        yield Finding("GDS", bad, f"not used: {why}", "pip install 'kvtierd[gpu]', on a machine with an NVIDIA GPU")
        return
    trial = Trial(str(folder), settings.nvme.io_threads, settings.nvme.kvikio_task_bytes, direct=True)
    try:
        verdict = run_trial(trial)
    except StartupError as error:
        yield Finding("GDS", Verdict.FAIL if required else Verdict.WARN, str(error))
        return
    if verdict.gds:
        yield Finding("GDS", Verdict.OK, "works: the disk reads into GPU memory and writes from it")
    else:
        advice = "nvidia-fs must be loaded and the file system must support it: gdscheck -p tells"
        yield Finding("GDS", Verdict.FAIL if settings.nvme.require == "gds" else Verdict.WARN, verdict.why, advice)


CHECKS: tuple[Check, ...] = (("file system", file_system), ("O_DIRECT", direct), ("GDS", gds))


def existing(settings: Settings) -> Path | None:
    """The (first) data folder, or the nearest one above it that is there."""
    folders = split_folders(settings.nvme.directory)
    if not folders:
        return None
    folder = Path(folders[0])
    return next(path for path in (folder, *folder.parents) if path.exists())


def mount_of(folder: Path) -> tuple[str, str]:
    """Kind of the file system under a folder, and its device."""
    real, best = folder.resolve(), ("unknown", "", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, place, kind, *_ = line.split()
        # Of two mounts at one place the later one covers the other.
        if real.is_relative_to(place) and len(place) >= len(best[2]):
            best = (kind, device, place)
    return best[0], best[1]


def _own_bytes(folder: Path) -> int:
    """What segments of ours take there already."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("segment*") if path.is_file())
