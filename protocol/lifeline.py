"""The arena's socket as a sign of life: the kernel closes it when the daemon ends, which ZeroMQ does not tell us."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

LAST_WORDS_NS = 100_000_000
"""After the daemon hung up nothing more is waited for when so long no reply came: the last ones may be on their way."""


class Lifeline:
    """What a connection knows of it; all of it is used under the connection's lock but `descriptor`."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._let_go: Callable[[], None] = _nothing

    def hold(self, attached: socket.socket, let_go: Callable[[], None]) -> None:
        """From now on it is this one. `let_go` gives the arena's memory back when the daemon is gone."""
        self._socket, self._let_go = attached, let_go

    def drop(self) -> None:
        """There is none any more."""
        self._socket, self._let_go = None, _nothing

    @property
    def descriptor(self) -> int:
        """To be polled for hanging up alone, with no events asked for; -1 where there is none."""
        attached = self._socket
        return attached.fileno() if attached is not None else -1

    def is_cut(self) -> bool:
        """Whether the daemon has hung up: it ended, or it ended our session."""
        descriptor = self.descriptor
        if descriptor < 0:
            return False
        poller = select.poll()
        poller.register(descriptor, 0)
        return bool(poller.poll(0))

    def let_go_if_cut(self) -> None:
        """Give back what is mapped and in nobody's hands, where the daemon has hung up: the next one has memory of its
        own, and ours would be had twice."""
        if self.is_cut():
            let_go = self._let_go
            self.drop()
            let_go()


def _nothing() -> None:
    """Nothing is mapped."""
