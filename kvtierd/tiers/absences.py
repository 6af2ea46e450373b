"""How long blocks stay away: the time from losing their host copy to being wanted there again.

Short absences are the case for a larger host tier, or for another eviction policy.
"""

from __future__ import annotations

import numpy as np

from kvtierd.core.clock import Clock
from kvtierd.index.memory import reserve
from kvtierd.telemetry.prometheus import Histogram
from kvtierd.tiers.blocks import Rows

BOUNDS_S = (0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 43_200.0, 86_400.0, 604_800.0)
MILLISECOND_NS = 1_000_000


class Absences:
    """One time a row of the block table, in milliseconds since this was made; 0 for a block that never left.

    A row that is another block's meanwhile does no harm: a block comes from elsewhere into host only after it has left
    it, which overwrites the time, or once after a restart, when there is none.
    """

    def __init__(self, rows: int, clock: Clock) -> None:
        self._clock = clock
        self._begin_ns = clock.now_ns() - MILLISECOND_NS
        self.left_ms = reserve((rows,), np.uint32, huge=False)
        self.seconds = Histogram(BOUNDS_S)

    def left(self, rows: Rows) -> None:
        """These blocks lose their host copies."""
        self.left_ms[rows] = self.now_ms()

    def back(self, rows: Rows) -> None:
        """These blocks are wanted in host again."""
        left_ms = self.left_ms[rows]
        gone = left_ms[left_ms > 0]
        if gone.size:
            for away_ms in (self.now_ms() - gone.astype(np.int64)).tolist():
                self.seconds.add(max(0, away_ms) * MILLISECOND_NS)
            self.left_ms[rows] = 0

    def now_ms(self) -> int:
        """Wraps after 49 days; a block that was away for longer counts as one that was away for less."""
        return (self._clock.now_ns() - self._begin_ns) // MILLISECOND_NS % (1 << 32)
