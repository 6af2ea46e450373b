"""Reservations that nobody writes any more and that the daemon does not know of yet."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvtierd.protocol.requests import Abort

MAX_ORPHANS: Final = 4096
MAX_SESSIONS: Final = 64
"""Whose tokens are remembered."""


class Orphans:
    """Keeps them until they can be told of, and the tokens of the sessions that they belong to.

    A daemon that ended has left its slots to the one that is there now, which keeps them out of use until it hears.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque(maxlen=MAX_ORPHANS)
        self._tokens: dict[int, bytes] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def welcomed(self, session_no: int, token: bytes) -> None:
        """A session of this number has this token."""
        self._tokens[session_no] = token
        self._tokens.pop(session_no - MAX_SESSIONS, None)

    def abort(self, session_no: int, current_no: int, reservation: int) -> Abort | None:
        """The request that gives a reservation back; None where nobody could know it any more."""
        if session_no == current_no:
            return Abort(id=0, reservation=reservation)
        token = self._tokens.get(session_no)
        return Abort(id=0, reservation=reservation, token=token) if token else None

    def add(self, session_no: int, reservation: int) -> None:
        """It must be told later; of too many the oldest are forgotten."""
        self._waiting.append((session_no, reservation))

    def taken(self) -> list[tuple[int, int]]:
        """Those that wait, which are the caller's now: (session number, reservation)."""
        found = list(self._waiting)
        self._waiting.clear()
        return found

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()
        self._tokens.clear()
