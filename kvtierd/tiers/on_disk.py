"""Where blocks lie on disk, as the store finds them at start and moves or drops them later."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import RequestError
from kvtierd.core.units import PAGE_BYTES
from kvtierd.protocol.messages import TIER_NVME
from kvtierd.storage.interface import BlockStore, Extent, Recovered
from kvtierd.tiers.blocks import VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.demand import Demand
from kvtierd.tiers.disk_names import read_as
from kvtierd.tiers.offload import Offload

_log = logging.getLogger(__name__)


class OnDisk:
    """What the store says of extents, entered in the block table. A block's row is its tag in the store."""

    def __init__(self, copies: Copies, store: BlockStore, demand: Demand, offload: Offload) -> None:
        self._copies = copies
        self._store = store
        self._offload = offload
        store.on_reclaim(self.reclaimed, self.in_doubt)
        store.on_rewrite(lambda rows: demand.heat(rows.astype(np.int32)), self.moved)

    def recover(self, found: Recovered) -> None:
        """Make rows for what the store found."""
        blocks, table = self._copies.blocks, self._copies.blocks.table
        kept: list[npt.NDArray[np.intp]] = []
        kept_rows: list[Rows] = []
        order = np.argsort(found.space, kind="stable")
        spaces, begins = np.unique(found.space[order], return_index=True)
        for space, places in zip(spaces.tolist(), np.split(order, begins)[1:], strict=True):
            try:
                tenant, namespace = read_as(found.namespaces[found.digests[space]])
                entry = self._copies.namespaces.register(tenant, namespace, allow_loss=None)
            except RequestError as error:  # more than fit: that must not keep the daemon from starting
                _log.warning("recovery: %d blocks are left out: %s", places.size, error)
                found.dropped += places.size
                continue
            rows, position, _ = blocks.add(found.keys[places], entry.number, VISIBLE)
            blocks.mark(rows, TIER_NVME)
            mine = places[position]
            table.segment[rows] = found.extents.segment[mine]
            table.extent_page[rows] = found.extents.page[mine]
            table.block_sum[rows] = found.block_sums[mine]
            self._copies.shapes.forms.stored(rows, found.codecs[mine], found.block_sums[mine])
            kept.append(mine)
            kept_rows.append(rows)
        if kept_rows:
            tags = np.concatenate(kept_rows).astype(np.int64)
            self._store.adopt(found.extents.take(np.concatenate(kept)), tags)
        self._copies.counters["recovered_blocks"] += sum(rows.size for rows in kept_rows)
        self._copies.counters["recovery_dropped_blocks"] += found.dropped

    def moved(self, told: list[tuple[int, Extent, Extent]]) -> list[bool]:
        """The store has written blocks again elsewhere; those that still are where they were go along."""
        table = self._copies.blocks.table
        kept = []
        self._offload.rewritten(sum(new.length for _, _, new in told))
        for row, old, new in told:
            same = table.segment[row] == old.segment and table.extent_page[row] == old.offset // PAGE_BYTES
            if same:
                table.segment[row], table.extent_page[row] = new.segment, new.offset // PAGE_BYTES
            kept.append(bool(same))
        return kept

    def reclaimed(self, gone: list[tuple[int, Extent]]) -> None:
        """The store recycles a segment: these extents are no copies any more."""
        self._copies.counters["nvme_reclaimed_blocks"] += self._drop(gone)

    def in_doubt(self, gone: list[tuple[int, Extent]]) -> None:
        """A sync failed, so that nobody knows what of these extents is on disk; the store counts them."""
        self._drop(gone)

    def _drop(self, gone: list[tuple[int, Extent]]) -> int:
        """These extents are no copies any more; how many blocks still had them."""
        table = self._copies.blocks.table
        rows = np.array([row for row, _ in gone], np.int32)
        segments = np.array([extent.segment for _, extent in gone])
        pages = np.array([extent.offset // PAGE_BYTES for _, extent in gone])
        same = (table.segment[rows] == segments) & (table.extent_page[rows] == pages)
        if same.any():
            self._copies.drop_nvme(rows[same])
        return int(same.sum())
