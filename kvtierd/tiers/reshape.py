"""Split and merge: blocks get extents of other sizes, and readers who hold the old ones keep them until they let go.

Bytes move by way of whole blocks: what is scattered is gathered into slots first. The new extents are filled from these
and hashed, and change places with them in one turn of the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvtierd.core.checksum import Sums, layer_sums
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.token_spans import clear_padding, copy_tokens, of_tokens
from kvtierd.gpu.slot_pool import NO_SLOT, SlotClass, Slots
from kvtierd.index.extents import GRANULE_TOKENS
from kvtierd.index.hybrid import EXTENT_GRANULES_MAX
from kvtierd.protocol.messages import CountReply, Reshape
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.blocks import VISIBLE, Rows
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.onboard import Onboarder
from kvtierd.tiers.room import Room
from kvtierd.tiers.sessions import keys_of, namespace_of, need_frames
from kvtierd.tiers.workers import Workers

EXTENT_TOKENS_MAX = EXTENT_GRANULES_MAX * GRANULE_TOKENS


@dataclasses.dataclass(slots=True, eq=False)
class Target:
    """An extent to be: tokens `first` on of the blocks at `places` in the request, or all of several."""

    places: range
    first: int
    tokens: int
    cls: SlotClass
    slot: int = NO_SLOT


def targets_of(parts: Sequence[int], blocks: int, block_tokens: int) -> list[tuple[range, int, int]]:
    """Extents of these lengths in tokens, in order, as (blocks, first token in the first of them, tokens).

    Those that are one whole block are left out: they need nothing but the block's own slot. Raises ValueError where an
    extent is no whole number of granules, too long, or neither a part of one block nor several whole ones, and where
    they are not together as long as the blocks.
    """
    found, begin = [], 0
    for tokens in parts:
        if tokens % GRANULE_TOKENS or not GRANULE_TOKENS <= tokens <= EXTENT_TOKENS_MAX:
            raise ValueError(
                f"an extent of {tokens} tokens is no multiple of {GRANULE_TOKENS} up to {EXTENT_TOKENS_MAX}"
            )
        first, end = begin % block_tokens, begin + tokens
        block, last = begin // block_tokens, -(-end // block_tokens)
        if last - block > 1 and (first or end % block_tokens):
            raise ValueError(f"tokens {begin}..{end} are neither part of one block of {block_tokens} nor whole ones")
        if tokens != block_tokens:
            found.append((range(block, last), first, tokens))
        begin = end
    if begin != blocks * block_tokens:
        raise ValueError(f"extents of {begin} tokens are not the {blocks} blocks of {block_tokens}")
    return found


class Reshaper:
    """Gives blocks other extents. Runs on the loop; bytes move in worker threads."""

    def __init__(self, room: Room, onboarder: Onboarder, workers: Workers) -> None:
        self._room = room
        self._copies = room.copies
        self._onboarder = onboarder
        self._workers = workers

    async def reshape(self, _session: Session, request: Reshape, frames: Sequence[memoryview]) -> Answer:
        """Split or merge blocks that follow each other, or give each its own slot again."""
        need_frames(frames, 1)
        entry, keys = namespace_of(_session, request.namespace), keys_of(frames[0])
        try:
            of_tokens(entry.geometry, entry.geometry.block_size)
            targets = targets_of(request.parts, len(keys), entry.geometry.block_size)
        except ValueError as error:
            raise RequestError(ErrorCode.BAD_ARGUMENT, str(error)) from error
        if not self._copies.shapes.can_know(entry.geometry.block_size):
            raise RequestError(
                ErrorCode.BAD_ARGUMENT,
                f"blocks of {entry.geometry.block_size} tokens are no whole granules of {GRANULE_TOKENS} up to "
                f"{EXTENT_TOKENS_MAX}",
            )
        done = await self.lay(entry, self._copies.blocks.find_prefix(keys, entry.number), len(keys), targets)
        return Answer(CountReply(id=0, count=len(keys) if done else 0))

    async def lay(
        self,
        entry: NamespaceEntry,
        rows: Rows,
        count: int,
        targets: list[tuple[range, int, int]],
        *,
        idle: bool = False,
    ) -> bool:
        """Have `count` blocks lie as `targets_of` says, each else in a slot of its own.

        False, and nothing changed, where one is missing, pinned, or was changed or forgotten meanwhile, and with `idle`
        where somebody holds one. RequestError `busy` when there is no room.
        """
        copies = self._copies
        if rows.size < count or copies.blocks.table.pins[rows].any():
            return False
        cls = copies.host_class(entry)
        copies.blocks.begin_move(rows)
        try:
            held = await self._onboarder.hold_in_host(entry, rows)
            try:
                if held.size < count or (idle and (copies.host.pool.holds[held] > 1).any()):
                    return False
                return not targets or await self._fill(entry, cls, rows, held, targets)
            finally:
                copies.host.release(cls, held)
        finally:
            copies.blocks.end_move(rows)

    async def _fill(
        self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, held: Slots, wanted: list[tuple[range, int, int]]
    ) -> bool:
        copies, shapes = self._copies, self._copies.shapes
        shapes.know(rows, entry.geometry.block_size)
        if not shapes.knows(rows):
            raise RequestError(ErrorCode.BUSY, "too many blocks have extents of their own; ask later", 1000)
        extents, targets = self._take(entry, wanted)
        settled = False
        try:
            sums = copies.host.sums_of(cls, held)
            filled = await self._workers.run(lambda: self._copy(entry, cls, held, sums, targets))
            settled = filled is not None and self._still(rows, held)
            if filled is not None and settled:
                self._exchange(cls, rows, held, targets, extents, filled)
        finally:
            for target in targets:
                copies.host.release(target.cls, np.array([target.slot], np.int32))
            if not settled:
                shapes.give_rows(extents)
        return settled

    def _take(self, entry: NamespaceEntry, wanted: list[tuple[range, int, int]]) -> tuple[Rows, list[Target]]:
        """Rows and held slots for extents; RequestError `busy`, with nothing taken, when there are too few."""
        copies, geometry, targets = self._copies, entry.geometry, []
        copies.ensure_rows(len(wanted))
        extents = copies.shapes.rows_for(len(wanted))
        for places, first, tokens in wanted[: extents.size]:
            of = of_tokens(geometry, tokens)
            cls = copies.host.class_for(of.slot_bytes, of.layers, entry.tenant)
            slot = self._room.take_host(cls, 1)
            if not slot.size:
                break
            targets.append(Target(places, first, tokens, cls, int(slot[0])))
        if len(targets) == len(wanted):
            return extents, targets
        copies.shapes.give_rows(extents)
        for target in targets:
            copies.host.release(target.cls, np.array([target.slot], np.int32))
        raise RequestError(ErrorCode.BUSY, "there is no room for extents of other sizes", retry_after_ms=20)

    def _still(self, rows: Rows, held: Slots) -> bool:
        table = self._copies.blocks.table
        there = (table.host_slot[rows] == held) & ((table.flags[rows] & VISIBLE) != 0) & (table.pins[rows] == 0)
        if not there.all():
            return False
        # Those that were forgotten meanwhile for want of reads are known again.
        self._copies.shapes.know(rows, self._block_tokens(rows))
        return self._copies.shapes.knows(rows)

    def _copy(
        self, entry: NamespaceEntry, cls: SlotClass, held: Slots, sums: Sums, targets: list[Target]
    ) -> list[Sums] | None:
        """Fill the targets and hash what arrived; None where a source does not match its sums. In a worker thread."""
        host, geometry, out = self._copies.host, entry.geometry, []
        for target in targets:
            of, slot = of_tokens(geometry, target.tokens), host.view(target.cls, target.slot)
            for i, place in enumerate(target.places):
                source = host.view(cls, int(held[place]))
                if (layer_sums(source, geometry) != sums[place]).any():
                    return None
                tokens = min(target.tokens, geometry.block_size)
                copy_tokens(source, geometry, target.first, slot, of, i * geometry.block_size, tokens)
            clear_padding(slot, of)
            out.append(layer_sums(slot, of))
        return out

    def _exchange(
        self, cls: SlotClass, rows: Rows, held: Slots, targets: list[Target], extents: Rows, sums: list[Sums]
    ) -> None:
        """The blocks lie in the new extents from now on, and their own slots go, held ones with the last hold."""
        copies, table = self._copies, self._copies.blocks.table
        places = np.array(sorted({place for target in targets for place in target.places}), np.intp)
        table.host_slot[rows[places]] = NO_SLOT
        copies.host.disown(cls, held[places])
        for target, extent, mine in zip(targets, extents.tolist(), sums, strict=True):
            copies.host.set_sums(target.cls, np.array([target.slot], np.int32), mine[None])
            blocks = rows[target.places.start : target.places.stop]
            copies.shapes.place(extent, target.cls, blocks, target.slot, target.tokens, target.first)
        split = sum(len(target.places) == 1 for target in targets)
        copies.counters["reshaped_parts"] += split
        copies.counters["reshaped_merges"] += len(targets) - split
        copies.shapes.forget_uses(rows, self._block_tokens(rows))

    def _block_tokens(self, rows: Rows) -> int:
        return self._copies.namespaces[int(self._copies.blocks.table.namespace[rows[0]])].geometry.block_size
