"""How fast bytes move between tiers, measured on what is really moved: the ground for load-or-recompute advice.

Moves overlap, so a hop is measured while it is busy: bytes that arrived over the time in which at least one move was
under way. Clients copy from host by themselves; that hop is measured on a copy at start and on every Get.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvtierd.core.clock import Clock
from kvtierd.policy.advice import RateMeter
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME
from kvtierd.tiers.blocks import RESIDENT

PRIOR_BYTES_PER_S = 2e9
"""Of a hop over which nothing has gone yet: a plain NVMe disk, and less than any memory."""
PROBE_BYTES = 8 << 20
PROBE_ROUNDS = 3

Masks = npt.NDArray[np.uint8]
Costs = npt.NDArray[np.float64]


class Hop:
    """One way between tiers. Everything runs on the loop."""

    def __init__(self, clock: Clock, prior_bytes_per_s: float = PRIOR_BYTES_PER_S) -> None:
        self._clock = clock
        self._meter = RateMeter(prior_bytes_per_s)
        self._moving = 0
        self._since_ns = 0
        self.moves = 0
        """Moves that ended, a count by which others see that the rate may have changed."""
        self.moved_bytes = 0
        self.busy_ns = 0
        """Time in which at least one move was under way."""
        self.waiting_bytes = 0
        """Bytes asked for that have not arrived."""

    def begin(self, asked_bytes: int = 0) -> None:
        """A move starts."""
        self.waiting_bytes += asked_bytes
        if not self._moving:
            self._since_ns = self._clock.now_ns()
        self._moving += 1

    def end(self, moved_bytes: int, asked_bytes: int = 0) -> None:
        """A move ends that began with the same `asked_bytes`; bytes that did not arrive do not count."""
        self.waiting_bytes -= asked_bytes
        now_ns = self._clock.now_ns()
        self._moving -= 1
        self.moved_bytes += moved_bytes
        if not self._moving or moved_bytes > 0:
            self.busy_ns += now_ns - self._since_ns
        if moved_bytes > 0:
            self._meter.note(moved_bytes, now_ns - self._since_ns)
            self._since_ns = now_ns
            self.moves += 1

    def note(self, moved_bytes: int, elapsed_ns: int) -> None:
        """A move that was measured elsewhere."""
        self._meter.note(moved_bytes, elapsed_ns)
        self.moves += 1

    @property
    def bytes_per_s(self) -> float:
        """Mean of what moved lately."""
        return self._meter.bytes_per_s


class Speeds:
    """The hops of a read: nvme to host, gpu to host, and host to the client; and the one into gpu."""

    def __init__(self, clock: Clock) -> None:
        self.nvme, self.gpu, self.host = Hop(clock), Hop(clock), Hop(clock)
        self.gpu_in = Hop(clock)
        self._cost_per_byte: Costs = np.full(1 + RESIDENT, np.inf)
        self._seen = -1

    def fetch_s(self, masks: Masks, block_bytes: int) -> Costs:
        """What a client needs to get each of the blocks with these residency masks, in seconds, [n]; infinite for 0."""
        moves = self.nvme.moves + self.gpu.moves + self.host.moves
        if moves != self._seen:
            self._seen = moves
            copy_s = 1 / self.host.bytes_per_s
            costs_s = self._cost_per_byte
            # The fastest last, since a block is fetched from the best place that has it.
            for tier, cost_s in (
                (TIER_NVME, copy_s + 1 / self.nvme.bytes_per_s),
                (TIER_GPU, copy_s + 1 / self.gpu.bytes_per_s),
                (TIER_HOST, copy_s),
            ):
                costs_s[np.arange(costs_s.size) & tier != 0] = cost_s
        found: Costs = (self._cost_per_byte * block_bytes)[masks]
        return found

    def stats(self) -> dict[str, int]:
        """Rates by hop, and what went over those that no store counts."""
        return {
            "nvme_to_host_queue_bytes": self.nvme.waiting_bytes,
            "gpu_to_host_queue_bytes": self.gpu.waiting_bytes,
            "host_to_gpu_queue_bytes": self.gpu_in.waiting_bytes,
            "gpu_to_host_moved_bytes": self.gpu.moved_bytes,
            "gpu_to_host_moving_ns": self.gpu.busy_ns,
            "host_to_gpu_moved_bytes": self.gpu_in.moved_bytes,
            "host_to_gpu_moving_ns": self.gpu_in.busy_ns,
            "host_to_client_moved_bytes": self.host.moved_bytes,
            "host_to_client_moving_ns": self.host.busy_ns,
            "nvme_to_host_bytes_per_s": int(self.nvme.bytes_per_s),
            "gpu_to_host_bytes_per_s": int(self.gpu.bytes_per_s),
            "host_to_client_bytes_per_s": int(self.host.bytes_per_s),
        }


def probe_copy() -> tuple[int, int]:
    """Copy some memory: (bytes, nanoseconds) of the fastest of a few rounds. Takes some milliseconds, in a worker."""
    source, target = np.ones(PROBE_BYTES, np.uint8), np.zeros(PROBE_BYTES, np.uint8)
    best_ns = 0
    for _ in range(PROBE_ROUNDS):
        begin_ns = time.perf_counter_ns()
        np.copyto(target, source)
        elapsed_ns = time.perf_counter_ns() - begin_ns
        best_ns = min(best_ns or elapsed_ns, elapsed_ns)
    return PROBE_BYTES, best_ns
