"""Time as an injected dependency, so that a test can run years in seconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in nanoseconds; on Linux the same for all processes of a host."""

    def now_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""
        ...


class SystemClock:
    """The kernel's CLOCK_MONOTONIC."""

    def now_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""
        return time.monotonic_ns()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_ns: int = 1) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Nanoseconds since the clock's own zero."""
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Move forward; time never goes back."""
        if seconds < 0:
            raise ValueError(f"cannot move a monotonic clock by {seconds} s")
        self._now_ns += int(seconds * 1e9)
