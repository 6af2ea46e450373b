"""Blocks that are being read into host, by tenant and by where they come from, and how many of them there may be."""

from __future__ import annotations

import collections

import numpy as np
import numpy.typing as npt

from kvtierd.policy.admission import leading
from kvtierd.protocol.messages import TIER_GPU, Tier
from kvtierd.tiers.blocks import Blocks, Rows


class UnderWay:
    """Counts moves, and says which may set out. `limits` are most blocks of a tenant from a tier."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.limits: dict[tuple[str, Tier], int] = {}
        self.refused: collections.Counter[tuple[str, Tier]] = collections.Counter()
        """By tenant and tier: how often a request was cut short."""
        self._counts: collections.Counter[tuple[str, Tier]] = collections.Counter()

    def leading(self, tenant: str, rows: Rows) -> Rows:
        """The leading ones of these rows that may set out for host now."""
        if not self.limits:
            return rows
        gpu = (self._blocks.residency(rows) & TIER_GPU) != 0
        fits = self._fits(tenant, "gpu", gpu) & self._fits(tenant, "nvme", ~gpu)
        return rows[: leading(fits)]

    def changed(self, tenant: str, blocks: int, *, gpu: bool) -> None:
        """So many more blocks, or fewer, are on their way."""
        self._counts[tenant, "gpu" if gpu else "nvme"] += blocks

    def _fits(self, tenant: str, tier: Tier, mine: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which of these blocks, [n], may come if all before them do; those that are not of the tier always may."""
        limit = self.limits.get((tenant, tier))
        if limit is None:
            return np.ones(mine.size, np.bool_)
        fits: npt.NDArray[np.bool_] = ~mine | (np.cumsum(mine) <= limit - self._counts[tenant, tier])
        if not fits.all():
            self.refused[tenant, tier] += 1
        return fits
