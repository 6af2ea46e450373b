"""How far writes to nvme step aside for clients that copy out of host memory.

A client's copy and the write-behind want the same memory bandwidth, and on small machines the same processors: a load
beside writes takes a fifth to a third longer. A write that waits costs nobody anything before somebody flushes.
"""

from __future__ import annotations

GRACE = 8
"""A client that was given bytes counts as copying for this many times what one thread takes to copy them. What follows
a copy belongs to the same work, and clients that copy less than this part of the time are not worth a pause."""
HORIZON_NS = 100_000_000
"""No further ahead than this, whatever was given out: a client that died copies nothing."""
WRITE_SHARE = 0.25
"""Of the time that writes keep while clients copy."""
PAUSE_MAX_NS = 100_000_000
"""A single pause is no longer, however long the write before it took."""


class SteppingAside:
    """Whether clients copy now, and how long the next write may wait for that. Times are of any steady clock."""

    def __init__(self) -> None:
        self._copying_until_ns = 0

    def given(self, copy_ns: float, now_ns: int) -> None:
        """A client was given bytes in host that take one thread `copy_ns` to copy."""
        until_ns = max(self._copying_until_ns, now_ns) + int(GRACE * copy_ns)
        self._copying_until_ns = min(until_ns, now_ns + HORIZON_NS)

    def copying(self, now_ns: int) -> bool:
        """Whether clients copy."""
        return now_ns < self._copying_until_ns

    def pause_ns(self, wrote_ns: int, now_ns: int) -> int:
        """How long the next write waits after one that took `wrote_ns` and has just ended; 0 for not at all."""
        wanted_ns = min(int(wrote_ns * (1 - WRITE_SHARE) / WRITE_SHARE), PAUSE_MAX_NS)
        return max(0, min(wanted_ns, self._copying_until_ns - now_ns))
