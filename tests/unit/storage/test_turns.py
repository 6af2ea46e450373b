"""Whose turn it is at the device, on a model of one: no clock, no disk."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from kvtierd.core.units import MIB
from kvtierd.storage.turns import SLICE_NS, WRITE_SHARE, Depth, Lane, Turns

READ, WRITE = Lane.READ, Lane.WRITE
MS = 1_000_000
BLOCK = 2 * MIB


class Device:
    """Serves requests at `speeds` (bytes a nanosecond), shared by all that are in flight; one alone gets at most
    1 / `parallel` of it."""

    def __init__(
        self,
        turns: Turns,
        *,
        speeds: tuple[float, float] = (1.2, 3.0),
        parallel: int = 1,
        sizes: tuple[int, int] = (BLOCK, BLOCK),
    ) -> None:
        self.sizes = sizes
        self.turns = turns
        self.speeds = speeds
        self.parallel = parallel
        self.now_ns = 0
        self.flying: list[tuple[int, int, Lane, int]] = []
        self.latencies: tuple[list[int], list[int]] = ([], [])
        self.moved = [0, 0]

    def run(self, milliseconds: int, waiting: Callable[[int], tuple[int, int]]) -> None:
        """`waiting` says how many reads and writes wait at a time."""
        end, number = self.now_ns + milliseconds * MS, 0
        since = [self.now_ns, self.now_ns]
        while self.now_ns < end:
            while (lane := self.turns.next(*waiting(self.now_ns), self.now_ns)) is not None:
                size = self.sizes[lane]
                self.turns.begin(lane, size, self.now_ns)
                number += 1
                share = max(len(self.flying) + 1, self.parallel)
                takes = int(size / self.speeds[lane] * share)
                heapq.heappush(self.flying, (self.now_ns + takes, number, lane, self.now_ns))
            if not self.flying:
                self.now_ns += MS
                continue
            done, _, lane, _ = heapq.heappop(self.flying)
            self.now_ns = max(self.now_ns, done)
            self.turns.end(lane, self.sizes[lane], waiting(self.now_ns)[lane], self.now_ns)
            self.latencies[lane].append(self.now_ns - since[lane])
            since[lane] = self.now_ns
            self.moved[lane] += self.sizes[lane]

    def rate(self, lane: Lane, milliseconds: int) -> float:
        """Bytes a nanosecond in a run."""
        return self.moved[lane] / (milliseconds * MS)


@pytest.mark.parametrize("write_bytes", [2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB])
def test_turn_of_writes_that_ends_late_is_made_up_for(write_bytes: int) -> None:
    device = Device(Turns(4), speeds=(2.0, 2.0), sizes=(BLOCK, write_bytes))
    device.run(4000, both)
    assert device.rate(READ, 4000) / 2.0 == pytest.approx(1 - WRITE_SHARE, abs=0.03)
    assert device.rate(WRITE, 4000) / 2.0 >= 0.25


def both(_now_ns: int) -> tuple[int, int]:
    return 8, 8


def test_reads_keep_most_of_their_speed_and_writes_some_of_theirs() -> None:
    device = Device(Turns(4))
    device.run(2000, both)
    assert device.rate(READ, 2000) >= 0.6 * 1.2
    assert device.rate(WRITE, 2000) >= 0.3 * 3.0


def test_read_waits_for_one_turn_of_writes_at_most() -> None:
    device = Device(Turns(4))
    device.run(2000, both)
    longest = 4 * int(BLOCK / 3.0)  # a write that began at the end of the turn
    assert max(device.latencies[READ]) <= SLICE_NS + 2 * longest + 8 * int(BLOCK / 1.2)


@pytest.mark.parametrize("lane", [READ, WRITE])
def test_lane_alone_has_the_device_for_itself(lane: Lane) -> None:
    device = Device(Turns(4))
    device.run(500, lambda _: (8, 0) if lane is READ else (0, 8))
    assert device.rate(lane, 500) >= 0.98 * device.speeds[lane]


def test_read_after_a_pause_goes_first_and_finds_few_writes() -> None:
    turns = Turns(4)
    device = Device(turns)
    device.run(200, lambda _: (0, 8))
    assert turns.next(1, 8, device.now_ns) in {READ, None}
    while turns.next(1, 8, device.now_ns) is None:
        done, _, lane, _ = heapq.heappop(device.flying)
        device.now_ns = max(device.now_ns, done)
        turns.end(lane, BLOCK, 8, device.now_ns)
    assert turns.next(1, 8, device.now_ns) is READ
    turns.begin(READ, BLOCK, device.now_ns)
    turns.end(READ, BLOCK, 0, device.now_ns + MS)
    while device.flying:
        _, _, lane, _ = heapq.heappop(device.flying)
        turns.end(lane, BLOCK, 8, device.now_ns + MS)
    # The reader is about to send its next one: writes fill the gap one by one.
    assert turns.next(0, 8, device.now_ns + MS) is WRITE
    turns.begin(WRITE, BLOCK, device.now_ns + MS)
    assert turns.next(0, 8, device.now_ns + MS) is None
    assert turns.next(0, 8, device.now_ns + 20 * MS) is WRITE


def test_nothing_is_owed_to_writes_that_did_not_wait() -> None:
    device = Device(Turns(4))
    device.run(500, lambda _: (8, 0))
    assert device.turns.next(8, 8, device.now_ns) in {READ, None}


def test_depth_follows_the_device() -> None:
    flat, wide = Device(Turns(16)), Device(Turns(16), parallel=6)
    for device in (flat, wide):
        device.run(8000, lambda _: (32, 0))
    assert flat.turns.depth(READ) <= 4, "more at once only wait longer"
    assert 5 <= wide.turns.depth(READ) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_depth_is_found_through_noise(seed: int) -> None:
    luck = random.Random(seed)
    depth = Depth(16)
    seen = []
    for _ in range(1000):
        depth.learn(min(depth.value, 5) * luck.uniform(0.9, 1.1))
        seen.append(depth.value)
    late = seen[200:]
    assert sum(late) / len(late) == pytest.approx(6, abs=1), seen


def test_depth_is_never_beyond_the_threads() -> None:
    for most in (1, 2, 3):
        depth = Depth(most)
        for speed in (1.0, 2.0, 0.1, 5.0) * 80:
            depth.learn(speed)
            assert 1 <= depth.value <= most


def test_patient_reads_say_nothing_about_the_speed_of_writes() -> None:
    turns, now_ns = Turns(4), 0
    for number in range(400):
        size = BLOCK if number < 200 else 0
        assert turns.next(0, 8, now_ns) is WRITE
        turns.begin(WRITE, size, now_ns)
        now_ns += 2 * MS
        turns.end(WRITE, size, 8, now_ns)
        if number == 199:
            depth = turns.depth(WRITE)
    assert turns.depth(WRITE) == depth
