"""Blocks of the life before are served only after their bytes were hashed: when asked for, or in the background."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums, block_sum, layer_sums
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index.memory import reserve
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.host_tier import HostTier
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.workers import Workers

PIECE_BLOCKS = 8
"""Blocks that one job hashes, as for onboarding."""


class Unverified:
    """Which host slots hold a block whose bytes nobody has looked at in this life. All methods run on the loop."""

    def __init__(self, slots_max: int) -> None:
        self._column: npt.NDArray[np.uint8] = reserve((slots_max,), np.uint8, huge=False)
        self.pending = 0
        """How many there are."""

    def add(self, slots: Slots) -> None:
        """These slots hold such blocks."""
        self._column[slots] = 1
        self.pending += slots.size

    def discard(self, slots: Slots) -> None:
        """These slots hold verified blocks now, or none."""
        if self.pending:
            mine = np.unique(slots)
            self.pending -= int(np.count_nonzero(self._column[mine]))
            self._column[mine] = 0

    def among(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these are such slots, [n]; -1 stands for none."""
        found: npt.NDArray[np.bool_] = (slots >= 0) & (self._column[slots] != 0)
        return found


class Verifier:
    """Hashes blocks of the life before and tells the good from the bad."""

    def __init__(self, copies: Copies, workers: Workers, unverified: Unverified) -> None:
        self._copies = copies
        self._workers = workers
        self._unverified = unverified

    async def leading_good(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots) -> Slots:
        """Those leading slots whose blocks are good, still held; bad ones are dropped. The holds of the others, and
        when it is cancelled those of all, end here."""
        try:
            good = await self._count_good(entry, cls, rows, slots)
        except BaseException:
            self._copies.host.release(cls, slots)
            raise
        self._copies.host.release(cls, slots[good:])
        return slots[:good]

    async def _count_good(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots) -> int:
        unsure = np.flatnonzero(self._unverified.among(slots))
        pieces = [unsure[begin : begin + PIECE_BLOCKS] for begin in range(0, unsure.size, PIECE_BLOCKS)]
        good = np.ones(slots.size, np.bool_)
        # All at once: they are spread over the threads, and this request waits for every one of them anyway.
        results = await asyncio.gather(
            *(self.verify(entry, cls, rows[piece], slots[piece]) for piece in pieces), return_exceptions=True
        )
        for piece, result in zip(pieces, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            good[piece] = result
        return slots.size if good.all() else int(good.argmin())

    async def verify(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these blocks, whose slots are held, are good, [n]; the bad ones are dropped from host."""
        copies, wanted = self._copies, self._copies.shapes.forms.host_sums(rows)
        sums = np.empty((slots.size, cls.layers), np.uint64)
        good = await self._workers.run(functools.partial(_hash, copies.host, entry, cls, slots, wanted, sums))
        # Deleted meanwhile, or another request was faster: then there is nothing left to say of it.
        mine = (copies.blocks.table.host_slot[rows] == slots) & self._unverified.among(slots)
        self._unverified.discard(slots)
        fine, bad = good & mine, ~good & mine
        copies.host.set_sums(cls, slots[fine], sums[fine])
        copies.counters["warm_verified_blocks"] += int(np.count_nonzero(fine))
        if bad.any():
            copies.counters["warm_corrupt_blocks"] += int(np.count_nonzero(bad))
            copies.drop_host(cls, rows[bad])
        return good


def _hash(
    host: HostTier, entry: NamespaceEntry, cls: SlotClass, slots: Slots, wanted: Sums, sums: Sums
) -> npt.NDArray[np.bool_]:
    good = np.empty(slots.size, np.bool_)
    for i, slot in enumerate(slots.tolist()):
        layer_sums(host.view(cls, slot), entry.geometry, sums[i])
        good[i] = block_sum(sums[i]) == int(wanted[i])
    return good
