"""What requests use: told once for every use of a block, it feeds heat, ghost hits and the outcome of prefetches.

A request uses a block when it reads or stores it; a lookup is only a question. Blocks that a store finds there were
computed by the client and not read, so they are no use either. The cost of a use is bounded and paid in compiled code.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtierd.core.clock import Clock
from kvtierd.core.units import PAGE_BYTES
from kvtierd.policy.ghosts import MULTIPLES, GhostHits
from kvtierd.policy.heat import heat_of, touch_heat
from kvtierd.protocol.messages import TIER_HOST
from kvtierd.tiers.blocks import PREFETCHED, RETURNED, VISIBLE, Rows
from kvtierd.tiers.copies import Copies

SECOND_NS = 1_000_000_000
HEAT_SAMPLE = 4096
"""Rows that a reading of the heat looks at."""

Masks = npt.NDArray[np.uint8]
Shares = npt.NDArray[np.float32]


class Demand:
    """Keeps account of used blocks. `capacities` has the bytes of each tier that there is."""

    def __init__(
        self, copies: Copies, capacities: Mapping[str, int], half_life_s: float, clock: Clock, secret: int
    ) -> None:
        self._copies = copies
        self._clock = clock
        self.half_life_s = float(half_life_s)
        self._secret = secret
        self.ghosts: dict[str, GhostHits] = {}
        for tier, capacity_bytes in capacities.items():
            self.add_tier(tier, capacity_bytes)

    def add_tier(self, tier: str, capacity_bytes: int) -> None:
        """A tier has this size; its ghost hits count from now on."""
        if capacity_bytes >= PAGE_BYTES:
            self.ghosts[tier] = GhostHits(capacity_bytes // PAGE_BYTES, self._secret)

    def read(self, rows: Rows, slot_bytes: int, sources: Masks) -> None:
        """A client reads these blocks, in prefix order; `sources` says where they were when it asked."""
        marks = self._copies.blocks.table.marks[rows]
        if np.count_nonzero(ahead := marks & PREFETCHED):
            self._fetched_ahead(rows, sources, ahead != 0)
        if np.count_nonzero(marks & RETURNED) < rows.size:
            self._copies.blocks.mark_as(rows, RETURNED)
        self._used(rows, slot_bytes)

    def stored(self, rows: Rows, slot_bytes: int) -> None:
        """A client stored these blocks, in prefix order."""
        self._used(rows, slot_bytes)

    def heat(self, rows: Rows) -> Shares:
        """Heat of blocks now, [n] float32, in uses."""
        table = self._copies.blocks.table
        return heat_of(table.heat, table.last_access_s, rows, self._now_s(), self.half_life_s)

    def stats(self, threshold: float) -> dict[str, float]:
        """Heat over a sample of all blocks, and ghost hits by tier and multiple of its capacity."""
        used = self._copies.blocks.table.used_rows
        rows = np.arange(0, used, max(1, used // HEAT_SAMPLE), dtype=np.int32)
        heat = self.heat(rows[self._copies.blocks.table.flags[rows] & VISIBLE != 0])
        found = {
            "heat_mean": float(heat.mean()) if heat.size else 0.0,
            "heat_max": float(heat.max()) if heat.size else 0.0,
            "heat_cold_share": float((heat < threshold).mean()) if heat.size else 0.0,
        }
        for tier in ("gpu", "host", "nvme"):
            ghosts = self.ghosts.get(tier)
            hits = ghosts.hits() if ghosts else dict.fromkeys(MULTIPLES, 0.0)
            found[f"{tier}_ghost_accesses"] = ghosts.accesses if ghosts else 0
            for multiple, count in hits.items():
                found[ghost_metric(tier, multiple)] = round(count)
        return found

    def _fetched_ahead(self, rows: Rows, sources: Masks, ahead: npt.NDArray[np.bool_]) -> None:
        there = int(np.count_nonzero(sources[ahead] & TIER_HOST))
        self._copies.counters["prefetch_used_blocks"] += there
        self._copies.counters["prefetch_late_blocks"] += int(np.count_nonzero(ahead)) - there
        self._copies.blocks.unmark_as(rows[ahead], PREFETCHED)

    def _used(self, rows: Rows, slot_bytes: int) -> None:
        table = self._copies.blocks.table
        touch_heat(table.heat, table.last_access_s, rows, self._now_s(), self.half_life_s)
        ids = self._copies.blocks.ids(rows)
        for ghosts in self.ghosts.values():
            ghosts.accessed(ids, slot_bytes // PAGE_BYTES)

    def _now_s(self) -> int:
        return self._clock.now_ns() // SECOND_NS


def ghost_metric(tier: str, multiple: float) -> str:
    """Name of the statistic, `host_ghost_hits_1_25x` for example."""
    return f"{tier}_ghost_hits_{multiple:g}x".replace(".", "_")
