"""Keeps a daemon's files for its next life, within one process: as they are, or as a crash leaves them now."""

from __future__ import annotations

import fcntl
import os


class HeldFiles:
    """A `Keeper` (kvtierd.tiers.warm_host) whose files `passed` hands to another life. Close it at the end."""

    def __init__(self) -> None:
        self._held: list[tuple[str, int]] = []

    @property
    def names(self) -> list[str]:
        """Of what is kept."""
        return [name for name, _ in self._held]

    def keep(self, name: str, fd: int) -> None:
        """Keep a copy of a descriptor under a name."""
        self._held.append((name, os.dup(fd)))

    def forget(self, name: str) -> None:
        """Close all that is kept under a name."""
        for known, fd in self._held:
            if known == name:
                os.close(fd)
        self._held = [entry for entry in self._held if entry[0] != name]

    def passed(self) -> list[tuple[str, int]]:
        """Descriptors of the kept files, for a life after this one has ended."""
        return [(name, os.dup(fd)) for name, fd in self._held]

    def snapshot(self) -> HeldFiles:
        """Copies of the kept files as they are now: what another life finds that begins after a crash at this moment,
        while this one goes on and changes its own."""
        copy = HeldFiles()
        for name, fd in self._held:
            taken = _copy(fd)
            copy.keep(name, taken)
            os.close(taken)
        return copy

    def close(self) -> None:
        """Close all that is kept."""
        for _, fd in self._held:
            os.close(fd)
        self._held.clear()


def _copy(fd: int) -> int:
    """A memory file like this one, with the same bytes and holes; another kind of file is not copied."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return os.dup(fd)
    size = os.fstat(fd).st_size
    made = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    source = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # an offset of its own
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # no data from here on
            break
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            at += os.pwrite(made, os.pread(source, min(end - at, 1 << 20), at), at)
    os.close(source)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made
