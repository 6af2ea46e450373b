"""How much of the nvme tier a tenant may have, and which of its blocks make room at its quota.

A block counts with the bytes of its slot, from when it is queued for writing. What finds no room stays in host only;
then a hand goes round the block table and forgets blocks of that tenant that are on disk and nowhere else: of each
piece those that were used longest ago.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

import numpy as np

from kvtierd.policy.admission import leading
from kvtierd.protocol.messages import TIER_NVME
from kvtierd.tiers.blocks import PIECE_ROWS, RESIDENT, VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry

SHARE_OF_PIECE = 4
"""One in so many of a tenant's blocks in a piece goes, the oldest: as few as that leaves the order among pieces."""
ROOM_SHARE = 16
"""At its quota this part of it is made free, so that not every block has to make room for the next."""

Forget = Callable[[NamespaceEntry, Rows], None]


class DiskQuota:
    """Quotas of the nvme tier. Everything runs on the loop."""

    def __init__(self, copies: Copies, forget: Forget, limits_bytes: Mapping[str, int]) -> None:
        self._copies = copies
        self._forget = forget
        self.limits: dict[str, int] = {}
        self._used: collections.Counter[str] = collections.Counter()
        """Bytes by tenant, of blocks that are on disk or queued."""
        self._short: set[str] = set()
        """Tenants that have to make room."""
        self.refused: collections.Counter[str] = collections.Counter()
        """By tenant: how often blocks were not written."""
        self._hand = 0
        self.set(limits_bytes)
        self._count_all()

    def set(self, limits_bytes: Mapping[str, int]) -> None:
        """Take over quotas by tenant; 0 is none."""
        self.limits = {name: size for name, size in limits_bytes.items() if size}
        self._short = set(self.limits)

    def used_bytes(self, tenant: str) -> int:
        """What a tenant has there."""
        return self._used[tenant]

    def changed(self, rows: Rows, sign: int) -> None:
        """Blocks came to the disk or its queue (1), or left (-1)."""
        numbers = self._copies.blocks.table.namespace[rows]
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            entry = self._copies.namespaces[int(number)]
            self._used[entry.tenant] += sign * int(count) * entry.geometry.slot_bytes

    def leading(self, entry: NamespaceEntry, rows: Rows) -> Rows:
        """The leading ones of these that may be written; the others are counted."""
        limit = self.limits.get(entry.tenant)
        if limit is None:
            return rows
        room = max(0, limit - self._used[entry.tenant]) // entry.geometry.slot_bytes
        if room < rows.size:
            self._short.add(entry.tenant)
            self.refused[entry.tenant] += 1
            self._copies.counters["offload_over_quota_blocks"] += rows.size - room
        return rows[:room]

    def step(self) -> None:
        """Make room in the next piece of the block table, where somebody needs it; call it every so often."""
        table = self._copies.blocks.table
        self._short = {tenant for tenant in self._short if self._excess(tenant) > 0}
        if not self._short or not table.used_rows:
            return
        begin = self._hand if self._hand < table.used_rows else 0
        self._hand = end = min(begin + PIECE_ROWS, table.used_rows)
        piece = slice(begin, end)
        bare = (table.flags[piece] & (RESIDENT | VISIBLE)) == (TIER_NVME | VISIBLE)
        bare &= (table.moves[piece] == 0) & (table.pins[piece] == 0)
        rows = (np.flatnonzero(bare) + begin).astype(np.int32)
        numbers = table.namespace[rows]
        tenants = {number: self._copies.namespaces[number].tenant for number in np.unique(numbers).tolist()}
        for tenant in self._short:
            mine = rows[np.isin(numbers, [number for number, owner in tenants.items() if owner == tenant])]
            if mine.size:
                self._make_room(tenant, mine)

    def _make_room(self, tenant: str, rows: Rows) -> None:
        table = self._copies.blocks.table
        oldest = rows[np.argsort(table.last_access_s[rows], kind="stable")][: -(-rows.size // SHARE_OF_PIECE)]
        sizes = np.array([self._copies.namespaces[number].geometry.slot_bytes for number in table.namespace[oldest]])
        oldest = oldest[: leading(np.cumsum(sizes) - sizes < self._excess(tenant))]
        self._copies.counters["quota_dropped_blocks"] += oldest.size
        numbers = table.namespace[oldest]
        for number in np.unique(numbers).tolist():
            self._forget(self._copies.namespaces[number], oldest[numbers == number])

    def _excess(self, tenant: str) -> int:
        """Bytes that a tenant should have less."""
        limit = self.limits.get(tenant, 1 << 62)
        return self._used[tenant] - (limit - limit // ROOM_SHARE)

    def _count_all(self) -> None:
        table = self._copies.blocks.table
        for begin in range(0, table.used_rows, PIECE_ROWS):
            piece = slice(begin, min(begin + PIECE_ROWS, table.used_rows))
            self.changed((np.flatnonzero(table.flags[piece] & TIER_NVME) + begin).astype(np.int32), 1)
