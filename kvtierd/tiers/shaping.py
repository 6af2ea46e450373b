"""Has the policy look at how blocks are read in parts, a few with each turn of the ticker, and does what it says."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from kvtierd.core.errors import RequestError
from kvtierd.index.extents import GRANULE_TOKENS
from kvtierd.index.hybrid import EXTENT_GRANULES_MAX
from kvtierd.policy.reshape import Decision, Shape, decide
from kvtierd.tiers.blocks import VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.reshape import Reshaper, targets_of

GRANULES_A_STEP = 64
"""Granules looked at in one turn: some 16 blocks, about a tenth of a millisecond."""
HALF_LIFE_NS = 60_000_000_000
"""Uses count for half after that long."""

_log = logging.getLogger(__name__)


class Shaping:
    """A hand goes round the known blocks, as in CLOCK. One change is under way at a time."""

    def __init__(self, copies: Copies, reshaper: Reshaper) -> None:
        self._copies = copies
        self._reshaper = reshaper
        self._hand = 0
        self._work: asyncio.Task[None] | None = None
        self._halve_at_ns = 0
        self._halving = False

    def step(self, now_ns: int) -> None:
        """Look at the next blocks, and begin the first change that the policy wants."""
        shapes = self._copies.shapes
        if not shapes.known or (self._work is not None and not self._work.done()):
            return
        if self._hand >= shapes.granules:
            self._hand = 0
            self._halving = now_ns >= self._halve_at_ns
            if self._halving:
                self._halve_at_ns = now_ns + HALF_LIFE_NS
        for row in shapes.known_between(self._hand, self._hand + GRANULES_A_STEP).tolist():
            self._hand = shapes.granule_of(row) + 1
            if self._consider(row):
                return
        self._hand = (self._hand // GRANULES_A_STEP + 1) * GRANULES_A_STEP

    async def close(self) -> None:
        """Wait for the change under way."""
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)

    def _consider(self, row: int) -> bool:
        """Whether a change of this block was begun."""
        shapes, table = self._copies.shapes, self._copies.blocks.table
        entry = self._copies.namespaces[int(table.namespace[row])]
        rows, tokens = self._chain(row, entry), entry.geometry.block_size
        uses = np.stack([shapes.uses(each, tokens) for each in rows.tolist()])
        kinds = [self._shape(each) for each in rows.tolist()]
        decision = decide(uses, kinds) if rows[0] == row and self._is_here(row) else None
        if decision is not None:
            self._work = asyncio.create_task(self._do(entry, rows[: decision.blocks], decision), name="reshape")
            return True
        if self._halving and not shapes.halve_uses(row) and not shapes.in_extents(row):
            shapes.unknow(row)
        return False

    def _is_here(self, row: int) -> bool:
        table = self._copies.blocks.table
        rows = np.array([row], np.int32)
        return bool(table.flags[row] & VISIBLE) and bool(
            table.host_slot[row] >= 0 or self._copies.shapes.scattered(rows)[0]
        )

    def _chain(self, row: int, entry: NamespaceEntry) -> Rows:
        """The block and known ones that followed it lately, as many as an extent could have; of one that is merged
        with others, these."""
        table, shapes = self._copies.blocks.table, self._copies.shapes
        if len(merged := shapes.blocks_with(row)) > 1:
            return merged
        found, most = [row], EXTENT_GRANULES_MAX * GRANULE_TOKENS // entry.geometry.block_size
        while len(found) < most:
            row = int(table.next_row[row])
            if row < 0 or row in found or table.namespace[row] != entry.number or not self._is_here(row):
                break
            if not shapes.knows(np.array([row], np.int32)):
                break
            found.append(row)
        return np.array(found, np.int32)

    def _shape(self, row: int) -> Shape:
        shapes = self._copies.shapes
        if not shapes.in_extents(row):
            return Shape.WHOLE
        return Shape.MERGED if len(shapes.blocks_with(row)) > 1 else Shape.SPLIT

    async def _do(self, entry: NamespaceEntry, rows: Rows, decision: Decision) -> None:
        tokens = entry.geometry.block_size
        parts = [count * GRANULE_TOKENS for count in decision.parts]
        try:
            targets = targets_of(parts, rows.size, tokens)
            done = await self._reshaper.lay(entry, rows, rows.size, targets, idle=True)
        except RequestError as error:
            _log.debug("reshape put off: %s", error)
            done = False
        if not done:
            self._copies.counters["reshapes_put_off"] += 1
        # Whatever came of it: the next decision about these blocks needs new evidence.
        live = rows[self._copies.blocks.live(rows)]
        self._copies.shapes.forget_uses(live, tokens)
