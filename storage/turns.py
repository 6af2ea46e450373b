"""Whose turn it is at the device: reads first, writes a bounded share, and no more requests at once than it can use.

Pure decisions over times and counts; the pool asks under its lock. A device does both kinds worse when they are mixed
at its queue than when each has it for some milliseconds, so writes that had to wait get their share in one piece.
"""

from __future__ import annotations

import enum
import math

from kvtierd.core.units import MIB

WRITE_SHARE = 0.35
"""Share of the device's time that writes get while reads wait too. Reads shall keep 0.6 of the speed that they have
alone and writes 0.3 of theirs: what is left over pays for changing between them, and for what both sides want of the
processors. Writes get a little more than this, in the gaps between reads."""
SLICE_NS = 12_000_000
"""Length of a turn of writes: longer ones mix less, and a read may wait for one."""

CALM_NS = 4_000_000
"""So long after a read, writes outside their turn go one at a time: the next read may be about to come."""

WINDOW_NS = 40_000_000
"""Least time over which a speed is measured."""
WINDOW_REQUESTS = 24
SINGLE_REQUESTS = 6
"""Requests that are measured one by one: few, because a device that serves many at once is slow meanwhile."""
CYCLE = 64
"""Once in so many windows the speeds are measured again: devices and loads change."""
MEMORY = 0.5
"""Weight of what was known of a speed against a new window."""


class Lane(enum.IntEnum):
    """Kinds of requests to the device."""

    READ = 0
    WRITE = 1


class Depth:
    """How many requests of one kind and size at once: as many as it takes to move the bytes that the device can.

    That is its speed with a full queue over its speed with one request, and one more that waits while the next is
    made. Deeper queues only add to latencies.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._windows = 0
        self._speeds = {1: 0.0, most: 0.0}
        self._settled = most

    @property
    def value(self) -> int:
        """Most requests at once now."""
        return {0: self._most, 1: 1}.get(self._windows % CYCLE, self._settled)

    @property
    def requests(self) -> int:
        """Requests in the window that is measured now."""
        return SINGLE_REQUESTS if self._windows % CYCLE == 1 else WINDOW_REQUESTS

    @property
    def least_ns(self) -> int:
        """Length of that window."""
        return 0 if self._windows % CYCLE == 1 else WINDOW_NS

    def learn(self, speed: float) -> None:
        """Take in the speed of a window, in bytes a nanosecond."""
        step = self._windows % CYCLE
        self._windows += 1
        if step < 2:
            depth = (self._most, 1)[step]
            known = self._speeds[depth]
            self._speeds[depth] = MEMORY * known + (1 - MEMORY) * speed if known else speed
        if step == 1:
            gain = self._speeds[self._most] / self._speeds[1]
            # A quarter of a request is noise.
            self._settled = min(self._most, math.ceil(gain - 0.25) + 1)


class _Window:
    """Speed of one lane while it alone kept the device busy."""

    __slots__ = ("begun_ns", "bytes_done", "requests", "size_class")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.begun_ns = -1
        self.bytes_done = 0
        self.requests = 0
        self.size_class = 0


class Turns:
    """State of one device's queue. Times are nanoseconds of any steady clock; `most` is the greatest depth."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_flight = [0, 0]
        self._depths: dict[tuple[Lane, int], Depth] = {}
        self._size_class = [(2 * MIB).bit_length(), (2 * MIB).bit_length()]
        self._windows = (_Window(), _Window())
        self._owed_ns = 0.0
        self._writing = False
        self._writes_wait = False
        self._reads_wait = False
        self._changed_ns = 0
        self._read_ns = -CALM_NS

    def depth(self, lane: Lane) -> int:
        """Most requests at once while this lane has the device."""
        return self._depth_of(lane).value

    def next(self, waiting_reads: int, waiting_writes: int, now_ns: int) -> Lane | None:
        """Which lane's first request may start now; None while the device has enough, or nothing waits."""
        self._account(now_ns)
        self._reads_wait, self._writes_wait = waiting_reads > 0, waiting_writes > 0
        if self._owed_ns >= SLICE_NS:
            self._writing = True
        elif self._owed_ns <= 0:
            self._writing = False
        writes_first = waiting_writes and (self._writing or not waiting_reads)
        lane = Lane.WRITE if writes_first else Lane.READ
        return lane if (waiting_reads or waiting_writes) and self._has_room(lane, now_ns) else None

    def _has_room(self, lane: Lane, now_ns: int) -> bool:
        """Whether one more request of this lane may go to the device."""
        if sum(self.in_flight) >= self.depth(lane):
            return False
        if lane is Lane.READ:
            return True
        if not self._writing and now_ns - self._read_ns < CALM_NS:
            return not sum(self.in_flight)
        # A disk that hangs in writes must leave a thread to reads.
        return self.in_flight[Lane.WRITE] < max(1, self._most - 1)

    def begin(self, lane: Lane, bytes_wanted: int, now_ns: int) -> None:
        """A request goes to the device. One of 0 bytes, a read in the lane of writes, is no measure of it."""
        self._account(now_ns)
        self.in_flight[lane] += 1
        self._windows[1 - lane].clear()
        window = self._windows[lane]
        if not bytes_wanted:
            window.clear()
            return
        self._size_class[lane] = bytes_wanted.bit_length()
        if window.size_class != self._size_class[lane]:
            window.clear()
            window.size_class = self._size_class[lane]

    def end(self, lane: Lane, bytes_done: int, waiting: int, now_ns: int) -> None:
        """A request has come back; `waiting` more of its lane are there."""
        self._account(now_ns)
        self.in_flight[lane] -= 1
        if lane is Lane.READ:
            self._read_ns = now_ns
        self._measure(lane, bytes_done, waiting, now_ns)

    def _account(self, now_ns: int) -> None:
        """What reads take of the device while writes wait is owed to these, and paid back in turns. A turn may end
        late, with its last request; then the next one comes later."""
        elapsed, self._changed_ns = now_ns - self._changed_ns, now_ns
        reads, writes = self.in_flight
        if not (self._writes_wait or writes):
            self._owed_ns = 0.0
        elif reads + writes:
            share = reads / (reads + writes)
            self._owed_ns += elapsed * (share * WRITE_SHARE / (1 - WRITE_SHARE) - (1 - share))
            least = -2.0 * SLICE_NS if self._reads_wait or reads else 0.0
            self._owed_ns = min(max(self._owed_ns, least), 2.0 * SLICE_NS)

    def _measure(self, lane: Lane, bytes_done: int, waiting: int, now_ns: int) -> None:
        """A window counts only while more wait than go: else its speed is the caller's and not the device's."""
        window = self._windows[lane]
        if not waiting or not bytes_done or self.in_flight[1 - lane]:
            window.clear()
            return
        depth = self._depth_of(lane)
        if window.begun_ns < 0:
            if self.in_flight[lane] < depth.value:  # what was begun at a greater depth does not count for this one
                window.begun_ns = now_ns
            return
        window.bytes_done += bytes_done
        window.requests += 1
        elapsed = now_ns - window.begun_ns
        if window.requests >= depth.requests and elapsed >= max(depth.least_ns, 1):
            depth.learn(window.bytes_done / elapsed)
            window.clear()

    def _depth_of(self, lane: Lane) -> Depth:
        key = lane, self._size_class[lane]
        found = self._depths.get(key)
        if found is None:
            found = self._depths[key] = Depth(self._most)
        return found
