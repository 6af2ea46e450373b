"""Blocks that are being read into host, or for attention, by tenant and by where they come from, and how many of them
there may be.

Reads into host that find no room are answered at once (`busy`, or fewer of them). Attention cannot do with fewer: what
it reads waits in line, in the order of asking. It leaves a quarter of the places to those who do not wait, and while it
waits they take no more than these, so that neither keeps the other out.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtierd.policy.admission import leading
from kvtierd.protocol.messages import TIER_GPU, Tier
from kvtierd.tiers.blocks import Blocks, Rows

KEPT_FREE = 4
"""One in so many places is not for those who wait in line, where there are more than one."""


class UnderWay:
    """Counts moves, and says which may set out. `limits` are most blocks of a tenant from a tier."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._limits: Mapping[tuple[str, Tier], int] = {}
        self.refused: collections.Counter[tuple[str, Tier]] = collections.Counter()
        """By tenant and tier: how often a request was cut short."""
        self._counts: collections.Counter[tuple[str, Tier]] = collections.Counter()
        self._lined: collections.Counter[str] = collections.Counter()
        """By tenant: blocks from nvme that have been in the line, and are on their way."""
        self._lines: dict[str, collections.deque[tuple[int, asyncio.Future[None]]]] = {}
        """By tenant: blocks from nvme that wait, in the order of asking."""

    @property
    def limits(self) -> Mapping[tuple[str, Tier], int]:
        """Most blocks of a tenant from a tier; those without have no limit."""
        return self._limits

    @limits.setter
    def limits(self, limits: Mapping[tuple[str, Tier], int]) -> None:
        self._limits = limits
        for tenant in list(self._lines):
            self._serve(tenant)

    def count(self, tenant: str, tier: Tier) -> int:
        """Blocks of a tenant that are on their way from a tier."""
        return self._counts[tenant, tier]

    def leading(self, tenant: str, rows: Rows) -> Rows:
        """The leading ones of these rows that may set out for host now."""
        if not self._limits:
            return rows
        gpu = (self._blocks.residency(rows) & TIER_GPU) != 0
        fits = self._fits(tenant, "gpu", gpu) & self._fits(tenant, "nvme", ~gpu)
        return rows[: leading(fits)]

    def changed(self, tenant: str, blocks: int, *, gpu: bool) -> None:
        """So many more blocks, or fewer, are on their way."""
        self._counts[tenant, "gpu" if gpu else "nvme"] += blocks
        if blocks < 0:
            self._serve(tenant)

    def most(self, tenant: str) -> int | None:
        """Most blocks from nvme that may be asked for at once by those who wait in line; None for any number."""
        limit = self._limits.get((tenant, "nvme"))
        return None if limit is None else max(1, limit - _kept_free(limit))

    def try_enter(self, tenant: str, blocks: int) -> bool:
        """Set out with so many blocks from nvme, if there is room and nobody waits; `leave` must follow."""
        if blocks and (tenant in self._lines or not self._has_room(tenant, blocks)):
            return False
        self._set_out(tenant, blocks)
        return True

    def leave(self, tenant: str, blocks: int) -> None:
        """Blocks that had set out have come."""
        self._lined[tenant] -= blocks
        self.changed(tenant, -blocks, gpu=False)

    async def enter(self, tenant: str, blocks: int) -> None:
        """Wait until so many blocks from nvme may set out; `leave` must follow when they have come."""
        if self.try_enter(tenant, blocks):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, collections.deque()).append((blocks, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.leave(tenant, blocks)
            else:
                waiter.cancel()
                self._serve(tenant)
            raise

    def _serve(self, tenant: str) -> None:
        """Let the first in the line go, as far as there is room."""
        line = self._lines.get(tenant)
        while line:
            blocks, waiter = line[0]
            if not waiter.done():
                if not self._has_room(tenant, blocks):
                    return
                self._set_out(tenant, blocks)
                waiter.set_result(None)
            line.popleft()
        self._lines.pop(tenant, None)

    def _set_out(self, tenant: str, blocks: int) -> None:
        self._lined[tenant] += blocks
        self._counts[tenant, "nvme"] += blocks

    def _has_room(self, tenant: str, blocks: int) -> bool:
        # More than may be asked for was asked for before the limit was lowered: they go alone.
        most, count = self.most(tenant), self._counts[tenant, "nvme"]
        return most is None or not count or count + blocks <= most

    def _fits(self, tenant: str, tier: Tier, mine: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which of these blocks, [n], may come if all before them do; those that are not of the tier always may."""
        limit = self._limits.get((tenant, tier))
        if limit is None:
            return np.ones(mine.size, np.bool_)
        room = limit - self._counts[tenant, tier]
        if tier == "nvme" and tenant in self._lines:
            room = min(room, _kept_free(limit) - self._counts[tenant, tier] + self._lined[tenant])
        fits: npt.NDArray[np.bool_] = ~mine | (np.cumsum(mine) <= room)
        if not fits.all():
            self.refused[tenant, tier] += 1
        return fits


def _kept_free(limit: int) -> int:
    return max(1, limit // KEPT_FREE)
