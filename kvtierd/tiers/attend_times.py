"""What time went into while attention was computed: the disk, copies, the kernel. They overlap; each counts once."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from kvtierd.core.clock import Clock

T = TypeVar("T")


class BusyTime:
    """Time in which at least one of some things was under way. Everything runs on the loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way = 0
        self._since_ns = 0
        self._total_ns = 0

    async def of(self, work: Awaitable[T]) -> T:
        """Await some work; the time until it ends counts."""
        if not self._under_way:
            self._since_ns = self._clock.now_ns()
        self._under_way += 1
        try:
            return await work
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._total_ns += self._clock.now_ns() - self._since_ns

    @property
    def total_ns(self) -> int:
        """Of all that has ended, and of what is under way so far."""
        running = self._clock.now_ns() - self._since_ns if self._under_way else 0
        return self._total_ns + running


class AttendTimes:
    """Reads of parts from nvme, copies of parts into reach, and the thread that computes."""

    def __init__(self, clock: Clock) -> None:
        self.disk, self.copy, self.compute = BusyTime(clock), BusyTime(clock), BusyTime(clock)

    def stats(self) -> dict[str, int]:
        """Totals by name."""
        return {
            "attend_disk_ns": self.disk.total_ns,
            "attend_copy_ns": self.copy.total_ns,
            "attend_compute_ns": self.compute.total_ns,
        }
