"""What systemd does for a service's descriptors, for a daemon that somebody else starts: keep and pass them on."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from kvtierd.daemon.fdstore import FIRST_FD

_MESSAGE_BYTES = 4096
_FDS_MAX = 16

LAUNCHER = """
import fcntl, os, sys
count, names, *rest = sys.argv[1:]
given = [int(fd) for fd in rest[: int(count)]]
above = max([*given, 2 + len(given)]) + 1
moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in given]
for fd in given:
    os.close(fd)
for place, fd in enumerate(moved):
    os.dup2(fd, 3 + place)
    os.close(fd)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=count, LISTEN_FDNAMES=names)
os.execv(rest[int(count)], rest[int(count) :])
"""
"""Runs in the child, since only there the process number is known: puts the files where they are looked for."""


class DescriptorHolder:
    """Listens at a path, and keeps what the daemon sends there. Thread-safe; close it to drop everything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(os.fspath(path))
        self._lock = threading.Lock()
        self._held: list[tuple[str, int]] = []
        self._thread = threading.Thread(target=self._run, name="descriptor-holder", daemon=True)
        self._thread.start()

    @property
    def held(self) -> list[tuple[str, int]]:
        """Names and descriptors, as they came; they stay the holder's."""
        with self._lock:
            return list(self._held)

    @property
    def first_free(self) -> int:
        """The lowest number of a descriptor that is in no one's way: those below are for what is held."""
        return FIRST_FD + len(self.held)

    def settle(self) -> None:
        """Return when everything that was sent before is taken in."""
        done = threading.Event()
        with self._lock:
            self._settled = done
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as own:
            own.sendto(b"X-SETTLED=1", os.fspath(self.path))
        done.wait()

    def command(self, words: Sequence[str]) -> tuple[list[str], list[int]]:
        """A command that runs `words` with what is held passed to it, and the descriptors that it must inherit.

        Further ones that `words` names by number must lie at `first_free` or above.
        """
        held = self.held
        numbers = [str(fd) for _, fd in held]
        names = ":".join(name for name, _ in held)
        start = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(len(held)), names, *numbers]
        return [*start, *words], [fd for _, fd in held]

    def drop(self) -> None:
        """Close all that is held, as a full stop of a service does."""
        self.settle()
        with self._lock:
            for _, fd in self._held:
                os.close(fd)
            self._held.clear()

    def close(self) -> None:
        """Stop listening and drop everything."""
        self.drop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as own:
            own.sendto(b"X-CLOSED=1", os.fspath(self.path))
        self._thread.join()
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            room = socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
            data, control, _, _ = self._socket.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            said = dict(line.split("=", 1) for line in data.decode().splitlines() if "=" in line)
            fds = _descriptors(control)
            if "X-CLOSED" in said:
                return
            with self._lock:
                if "X-SETTLED" in said:
                    self._settled.set()
                self._take(said, fds)

    def _take(self, said: dict[str, str], fds: list[int]) -> None:
        name = said.get("FDNAME", "stored")
        if "FDSTOREREMOVE" in said:
            for _, fd in (gone := [entry for entry in self._held if entry[0] == name]):
                os.close(fd)
            self._held = [entry for entry in self._held if entry not in gone]
        if "FDSTORE" in said:
            self._held += [(name, fd) for fd in fds]
        else:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)


def _descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
