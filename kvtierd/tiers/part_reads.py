"""Leases on parts of blocks: the extents that hold some tokens of a prefix, wherever blocks begin and end."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

import numpy as np

from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.keys import Keys
from kvtierd.core.token_spans import of_tokens
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index.extents import GRANULE_TOKENS
from kvtierd.protocol.messages import SPAN_DTYPE, AcquirePart, AcquireReply
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.demand import Demand
from kvtierd.tiers.host_tier import empty_descriptors
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.onboard import Onboarder
from kvtierd.tiers.reads import Masks, Reads
from kvtierd.tiers.room import Room
from kvtierd.tiers.sessions import keys_of, namespace_of, need_arena, need_frames, parent_of
from kvtierd.tiers.shapes import Pieces

ROUNDS = 8
"""How often a request looks again for extents that went while it waited for others; then it leases what there is."""


class PartReads:
    """Serves AcquirePart."""

    def __init__(self, room: Room, onboarder: Onboarder, reads: Reads, demand: Demand, clock: Clock) -> None:
        self._copies = room.copies
        self._onboarder = onboarder
        self._reads = reads
        self._demand = demand
        self._clock = clock

    def acquire(self, session: Session, request: AcquirePart, frames: Sequence[memoryview]) -> Awaitable[Answer]:
        """Lease the extents that hold tokens begin..end-1 of the leading run."""
        need_arena(session)
        need_frames(frames, 1)
        entry, keys = namespace_of(session, request.namespace), keys_of(frames[0])
        tokens = len(keys) * entry.geometry.block_size
        end = request.end or tokens
        if request.ttl_ms < 0:
            raise RequestError(ErrorCode.BAD_ARGUMENT, f"ttl_ms is {request.ttl_ms}; 0 asks for the default")
        if not 0 <= request.begin < end <= tokens:
            raise RequestError(
                ErrorCode.BAD_ARGUMENT, f"tokens {request.begin}..{end} are not within the {tokens} of these keys"
            )
        self._check(entry)
        return self._acquire(session, request, entry, keys, end)

    def _check(self, entry: NamespaceEntry) -> None:
        try:
            of_tokens(entry.geometry, entry.geometry.block_size)
        except ValueError as error:
            raise RequestError(ErrorCode.BAD_ARGUMENT, str(error)) from error
        if not self._copies.shapes.can_know(entry.geometry.block_size):
            raise RequestError(
                ErrorCode.BAD_ARGUMENT,
                f"blocks of {entry.geometry.block_size} tokens have no parts: {GRANULE_TOKENS} is the least of one",
            )

    async def _acquire(
        self, session: Session, request: AcquirePart, entry: NamespaceEntry, keys: Keys, end: int
    ) -> Answer:
        block_tokens, shapes = entry.geometry.block_size, self._copies.shapes
        first, last = request.begin // block_tokens, -(-end // block_tokens)
        begin, counted = request.begin - first * block_tokens, False
        for turn in range(ROUNDS):
            rows = self._copies.blocks.find_prefix(keys, entry.number)[first:last]
            if not rows.size:
                break
            stop = min(end - first * block_tokens, rows.size * block_tokens)
            sources = self._copies.blocks.residency(rows)
            if not counted:
                counted = True
                self._count(session, request, entry, rows, begin, stop)
            pieces = shapes.pieces(rows, block_tokens, begin, stop)
            missing = self._copies.host.absent(shapes.slots(pieces))
            if not missing.any() or turn == ROUNDS - 1:
                good = int(missing.argmax()) if missing.any() else len(pieces)
                return self._grant(session, request, entry, pieces[:good], first * block_tokens, sources)
            absent = np.unique(pieces[missing, 0] // block_tokens)
            held = await self._onboarder.hold_in_host(entry, rows[absent])
            # Nothing runs between here and the next look: what was brought is still there without this hold.
            self._copies.host.release(self._copies.host_class(entry), held)
            if held.size < absent.size:
                end = first * block_tokens + int(absent[held.size]) * block_tokens
                if end <= request.begin:
                    break
        return Answer(AcquireReply(id=0, lease=0, count=0), [b"", b"", b""])

    def _count(
        self, session: Session, request: AcquirePart, entry: NamespaceEntry, rows: Rows, begin: int, end: int
    ) -> None:
        blocks = self._copies.blocks
        blocks.link_behind(parent_of(request.parent) if begin < entry.geometry.block_size else None, entry.number, rows)
        self._copies.shapes.know(rows, entry.geometry.block_size)
        self._copies.shapes.touch(rows, entry.geometry.block_size, begin, end)
        self._demand.read(rows, entry.geometry.slot_bytes, blocks.residency(rows))
        self._reads.prefetcher.follow(session, entry, rows)

    def _grant(
        self, session: Session, request: AcquirePart, entry: NamespaceEntry, pieces: Pieces, shift: int, sources: Masks
    ) -> Answer:
        """Make the lease of extents that are there."""
        if not len(pieces):
            return Answer(AcquireReply(id=0, lease=0, count=0), [b"", b"", b""])
        shapes, host, geometry = self._copies.shapes, self._copies.host, entry.geometry
        pieces = self._share(entry, pieces)
        slots, lengths = shapes.slots(pieces), shapes.tokens_of(pieces, geometry.block_size)
        descriptors, sums = empty_descriptors(slots.size), np.empty((slots.size, geometry.layers), np.uint64)
        groups: list[tuple[SlotClass, Slots]] = []
        for tokens in np.unique(lengths).tolist():
            mine, of = lengths == tokens, of_tokens(geometry, tokens)
            cls = host.class_for(of.slot_bytes, of.layers, entry.tenant)
            some = empty_descriptors(int(np.count_nonzero(mine)))
            host.describe(cls, slots[mine], some)
            descriptors[mine], sums[mine] = some, host.sums_of(cls, slots[mine])
            host.touch(cls, slots[mine])
            groups.append((cls, slots[mine]))
        descriptors["source"] = sources[np.minimum(pieces[:, 0] // geometry.block_size, sources.size - 1)]
        spans = np.zeros(slots.size, SPAN_DTYPE)
        spans["begin"], spans["count"] = pieces[:, 0] + shift, pieces[:, 1]
        spans["tokens"], spans["first"] = lengths, pieces[:, 3]
        for _, some_slots in groups:
            host.pool.hold(some_slots)
        lease, ttl_ms = self._reads.lend(session, request.ttl_ms, groups)
        self._copies.counters["acquired_extents"] += slots.size
        codecs = shapes.forms.codecs_at(pieces[:, 2])
        reply = AcquireReply(id=0, lease=lease.id, count=slots.size, ttl_ms=ttl_ms, codecs=codecs)
        return Answer(reply, [descriptors.tobytes(), sums.tobytes(), spans.tobytes()])

    def _share(self, entry: NamespaceEntry, pieces: Pieces) -> Pieces:
        """The leading ones of these that their tenant may lease; RequestError `busy` where it may lease none."""
        leased, shapes = self._copies.host.leased, self._copies.shapes
        if leased is None:
            return pieces
        lengths, places = np.unique(shapes.tokens_of(pieces, entry.geometry.block_size), return_inverse=True)
        sizes = np.array([of_tokens(entry.geometry, tokens).slot_bytes for tokens in lengths.tolist()], np.int64)
        count = leased.fitting_bytes(entry.tenant, shapes.slots(pieces), sizes[places])
        if count < len(pieces):
            leased.refused[entry.tenant] += 1
        if not count:
            raise leased.refusal(entry.tenant)
        return pieces[:count]
