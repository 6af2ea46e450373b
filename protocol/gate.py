"""Not accepting more connections than there are descriptors for.

libzmq aborts the process when `accept` fails for want of descriptors, and has no limit of its own on a ROUTER; to
unbind would hang up on everybody who came that way. So while too many connections are open the socket's path is moved
out of reach, and it comes back when enough of them are gone; peers try again by themselves meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import struct
from pathlib import Path
from typing import Protocol

import zmq

log = logging.getLogger(__name__)

_EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
_EVENT = struct.Struct("<HI")
"""First frame of a monitor message: event, value."""

SHARE = 0.5
"""Of all descriptors of the process. Connections come faster than they are counted, and the rest of the daemon needs
descriptors too."""
REOPEN_SHARE = 0.9
"""Of the limit: below it the path comes back, so that it does not flap."""
HIDING_PLACE = ".full"
"""A folder beside the socket that only the daemon's user can enter."""


def connections_max() -> int:
    """How many connections this process should accept."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 65_536 if soft == resource.RLIM_INFINITY else max(16, int(soft * SHARE))


class Door(Protocol):
    """The way in to a socket."""

    def shut(self) -> None:
        """Let nobody else in; those inside go on."""
        ...

    def open(self) -> None:
        """Let people in again."""
        ...

    def close(self) -> None:
        """There will be no way in any more."""
        ...


class HiddenPath:
    """The path of an ipc socket: it is shut by moving it to a folder beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden = path.parent / HIDING_PLACE / path.name
        self._hidden.parent.mkdir(mode=0o700, exist_ok=True)
        self._hidden.unlink(missing_ok=True)

    def shut(self) -> None:
        """See Door."""
        self._path.rename(self._hidden)

    def open(self) -> None:
        """See Door."""
        self._hidden.rename(self._path)

    def close(self) -> None:
        """See Door; nothing is left in the hiding place."""
        self._hidden.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the whole folder may have been removed meanwhile
            self._hidden.parent.rmdir()


class ConnectionGate:
    """Counts the connections of a socket, and shuts its door while there are `limit` or more."""

    def __init__(self, socket: zmq.Socket[bytes], door: Door, limit: int) -> None:
        self._socket = socket
        self._door = door
        self._limit = max(1, limit)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)
        self.connections = 0
        self.open = True
        self._drain()

    def close(self) -> None:
        """Stop counting."""
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(0)  # or the context would wait for it
        self._door.close()

    def _drain(self) -> None:
        """Take all events: the descriptor tells only of the first of several."""
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event = _EVENT.unpack(frames[0])[0]
            self.connections += 1 if event == zmq.EVENT_ACCEPTED else -1
        self._decide()

    def _decide(self) -> None:
        if self.open and self.connections >= self._limit:
            self._door.shut()
            self.open = False
            log.warning("%d connections are open: no more are accepted until some are gone", self.connections)
        elif not self.open and self.connections < self._limit * REOPEN_SHARE:
            self._door.open()
            self.open = True
            log.info("%d connections are open: new ones are accepted again", self.connections)
