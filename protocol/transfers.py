"""Plans that move whole blocks between the caller's memory and the daemon, through the arena or in frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvtierd.core.checksum import Bytes, block_sums
from kvtierd.core.errors import KvtierdError
from kvtierd.core.keys import KEY_BYTES, Keys, as_keys
from kvtierd.protocol.ahead import Leases, Reservations
from kvtierd.protocol.asking import Asking, Begun, Plan, Work, as_frame, raw
from kvtierd.protocol.copying import Copier
from kvtierd.protocol.grants import Granted, acquire_request, leading, sums_of
from kvtierd.protocol.messages import SLOT_EXISTS, Get, GetReply, Put, PutReply
from kvtierd.protocol.queries import Queries
from kvtierd.protocol.results import NO_MASKS, Codecs, Fetched, Masks, NamespaceHandle, Stored, join_codecs
from kvtierd.protocol.slots import SlotPlans

PIECE_BYTES = 64 << 20
"""Most bytes of one Acquire or Reserve inside fetch and store: a prefix of any length passes in such pieces, the next
one asked for while one is copied. What two pieces would hold at a time is one: less is asked, and nothing runs beside
the copy."""


@dataclasses.dataclass(slots=True, eq=False)
class _Piece:
    """A piece of a store: what was granted, how many of its blocks existed, and the commit that is on its way."""

    grant: Granted = dataclasses.field(default_factory=lambda: Granted(0, 0, NO_MASKS, []))
    existed: int = 0
    index: list[int] = dataclasses.field(default_factory=list)
    begun: Begun | None = None


class Transfers:
    """Store and fetch."""

    def __init__(self, asking: Asking, queries: Queries, slots: SlotPlans, copier: Copier) -> None:
        self._asking = asking
        self._connection = asking.connection
        self._counters = asking.counters
        self._queries = queries
        self._slots = slots
        self._copier = copier

    def store(self, handle: NamespaceHandle, keys: Keys, blocks: Sequence[Bytes], deadline_ns: int) -> Plan[Stored]:
        """Store packed blocks, through the arena where there is one."""
        flat = as_keys(keys)
        arena = yield from self._slots.has_arena(deadline_ns)
        step = self._blocks_a_piece(handle, len(blocks), arena=arena)
        if arena:
            stored, existed = yield from self._store_arena(handle, flat, blocks, step, deadline_ns)
        else:
            stored, existed = yield from self._store_frames(handle, flat, blocks, step, deadline_ns)
        dropped = len(blocks) - stored - existed
        self._counters["blocks_dropped"] += dropped
        return Stored(stored, existed, dropped)

    def _blocks_a_piece(self, handle: NamespaceHandle, total: int, *, arena: bool) -> int:
        """Pieces of the arena are as even as can be: a last one of a few blocks would cost a round trip of its own."""
        if arena:
            most = max(1, min(self._connection.max_batch, PIECE_BYTES // handle.geometry.slot_bytes))
            if total <= min(2 * most, self._connection.max_batch):
                return max(1, total)
            return max(1, -(-total // max(1, -(-total // most))))
        limit = self._connection.max_message_bytes - (1 << 20)
        each = handle.geometry.slot_bytes + KEY_BYTES + 8 * (handle.geometry.layers + 1)
        return max(1, min(self._connection.max_batch, limit // each))

    def _store_arena(
        self, handle: NamespaceHandle, keys: Keys, blocks: Sequence[Bytes], step: int, deadline_ns: int
    ) -> Plan[tuple[int, int]]:
        """How many blocks were stored and how many existed. A piece is committed while the next one is copied."""
        ahead, before = Reservations(self._slots, handle, keys, step), _Piece()
        stored = existed = 0
        try:
            for begin in range(0, len(blocks), step):
                grant = yield from ahead.take(deadline_ns)
                assert grant is not None, "there is a reservation for each piece"
                piece = _Piece(grant, int(np.count_nonzero(grant.status == SLOT_EXISTS)))
                try:
                    yield from self._fill(piece, handle, blocks[begin : begin + step], deadline_ns)
                    done, before = (yield from self._settle(before)), piece
                except BaseException:
                    self._give_back(piece)
                    raise
                stored, existed = stored + done[0], existed + done[1]
                if not grant.number and not piece.existed:
                    break
            done = yield from self._settle(before)
            yield from ahead.drop()
        except BaseException:
            self._give_back(before)
            ahead.let_go()
            raise
        return stored + done[0], existed + done[1]

    def _fill(self, piece: _Piece, handle: NamespaceHandle, blocks: Sequence[Bytes], deadline_ns: int) -> Plan[None]:
        """Copy a piece into the slots that were granted, and hand it over."""
        grant = piece.grant
        if not grant.number:
            return
        piece.index = [i for i, view in enumerate(grant.views) if view is not None]
        views = [view for view in grant.views if view is not None]
        mine = [blocks[i] for i in piece.index]
        sums = yield Work(lambda: self._copier.fill(mine, views, handle.geometry))
        piece.begun = yield from self._slots.begin_commit(grant, piece.index, sums, deadline_ns)

    def _settle(self, piece: _Piece) -> Plan[tuple[int, int]]:
        """Wait for what was handed over, and give back what was not taken: blocks that are stored, and that existed."""
        if not piece.grant.number:
            return 0, piece.existed
        begun, piece.begun = piece.begun, None
        try:
            reply = yield from self._slots.finish_commit(begun, piece.grant, piece.index)
        finally:
            self._slots.give_back(piece.grant)
        return reply.committed, piece.existed + reply.existed

    def _give_back(self, piece: _Piece) -> None:
        if piece.begun is not None:
            self._asking.let_go(piece.begun)
        self._slots.give_back(piece.grant)

    def _store_frames(
        self, handle: NamespaceHandle, keys: Keys, blocks: Sequence[Bytes], step: int, deadline_ns: int
    ) -> Plan[tuple[int, int]]:
        stored = existed = 0
        for begin in range(0, len(blocks), step):
            part = slice(begin, begin + step)
            parent = keys[begin - 1].tobytes() if begin else b""
            done = yield from self._put(handle, keys[part], blocks[part], parent, deadline_ns)
            if done is None:
                break
            stored, existed = stored + done[0], existed + done[1]
        return stored, existed

    def _put(
        self, handle: NamespaceHandle, keys: Keys, blocks: Sequence[Bytes], parent: bytes, deadline_ns: int
    ) -> Plan[tuple[int, int] | None]:
        sums = yield Work(lambda: self._copier.sum_packed(blocks, handle.geometry))
        frames = [as_frame(keys), raw(block_sums(sums)), *(block.data for block in blocks)]
        received = yield from self._asking.request(
            [handle], lambda numbers: Put(id=0, namespace=numbers[0], parent=parent), frames, deadline_ns
        )
        reply = self._asking.accept(received, PutReply)
        if reply is None:
            self._counters["stores_dropped_unavailable"] += len(blocks)
            return None
        return reply.stored, reply.existed

    def fetch(
        self, handle: NamespaceHandle, keys: Keys, out: Bytes | None, *, verify: bool, deadline_ns: int
    ) -> Plan[Fetched]:
        """Fetch the leading run, through the arena where there is one."""
        flat = as_keys(keys)
        arena = yield from self._slots.has_arena(deadline_ns)
        step = self._blocks_a_piece(handle, len(flat), arena=arena)
        if out is None and len(flat) > step:  # memory for all pieces at once, and no more than it takes
            hit = yield from self._queries.lookup((handle,), (flat,), deadline_ns)
            flat = flat[: hit.count]
            out = np.empty((hit.count, handle.geometry.block_bytes), np.uint8)
        parts: list[Bytes] = []
        sources: list[Masks] = []
        codecs: list[tuple[int, Codecs]] = []
        count, whole = 0, True
        ahead = Leases(self._slots, handle, flat, step, acquire_request()) if arena else None
        try:
            while whole and count < len(flat):
                piece = flat[count : count + step]
                room = None if out is None else out[count : count + len(piece)]
                if ahead is not None:
                    got = yield from self._fetch_arena(ahead, handle, room, verify=verify, deadline_ns=deadline_ns)
                else:
                    parent = flat[count - 1].tobytes() if count else b""
                    got = yield from self._get(handle, piece, room, parent, verify=verify, deadline_ns=deadline_ns)
                blocks, masks, named, whole = got
                if not len(masks):
                    break
                parts.append(blocks)
                sources.append(masks)
                codecs.append((len(masks), named))
                count += len(masks)
        except BaseException:
            if ahead is not None:
                ahead.let_go()
            raise
        if ahead is not None:
            yield from ahead.drop()
        if out is None:
            nothing = np.empty((0, handle.geometry.block_bytes), np.uint8)
            out = parts[0] if len(parts) == 1 else np.concatenate([nothing, *parts])
        return Fetched(count, out[:count], np.concatenate([NO_MASKS, *sources]), join_codecs(codecs))

    def _fetch_arena(
        self, ahead: Leases, handle: NamespaceHandle, out: Bytes | None, *, verify: bool, deadline_ns: int
    ) -> Plan[tuple[Bytes, Masks, Codecs, bool]]:
        lease = yield from ahead.take(deadline_ns)
        if lease is None:
            return np.empty((0, handle.geometry.block_bytes), np.uint8), NO_MASKS, NO_MASKS, False
        try:
            if out is None:
                out = np.empty((lease.count, handle.geometry.block_bytes), np.uint8)
            good = yield from self._slots.copy_out(lease, out, handle, verify=verify)
        finally:
            self._slots.release(lease.number, lease.session_no)
        return out[:good], lease.sources[:good], lease.codecs[:good], good == lease.count

    def _get(
        self, handle: NamespaceHandle, keys: Keys, out: Bytes | None, parent: bytes, *, verify: bool, deadline_ns: int
    ) -> Plan[tuple[Bytes, Masks, Codecs, bool]]:
        received = yield from self._asking.request(
            [handle],
            lambda numbers: Get(id=0, namespace=numbers[0], parent=parent),
            (as_frame(keys),),
            deadline_ns,
        )
        reply = self._asking.accept(received, GetReply)
        geometry = handle.geometry
        if out is None:
            out = np.empty((reply.count if reply else 0, geometry.block_bytes), np.uint8)
        if reply is None or received is None:
            self._counters["lookups_missed_unavailable"] += 1
            return out[:0], NO_MASKS, NO_MASKS, False
        payload = [np.frombuffer(frame, np.uint8) for frame in received[1][1:]]
        if len(payload) != reply.count or any(block.size != geometry.block_bytes for block in payload):
            raise KvtierdError(
                f"the daemon promised {reply.count} blocks of {geometry.block_bytes} bytes and sent others"
            )
        good = yield Work(lambda: self._copy_payload(payload, out, handle, received[1], verify=verify))
        tiers, codecs = np.frombuffer(reply.tiers, np.uint8), np.frombuffer(reply.codecs, np.uint8)
        return out[:good], tiers[:good], codecs[:good], good == reply.count

    def _copy_payload(
        self, payload: list[Bytes], out: Bytes, handle: NamespaceHandle, frames: list[memoryview], *, verify: bool
    ) -> int:
        for block, target in zip(payload, out, strict=False):
            target[:] = block
        if not verify or not payload:
            return len(payload)
        wanted = sums_of(frames, 0, len(payload), handle.geometry.layers)
        good = leading(self._copier.sum_packed(out[: len(payload)], handle.geometry), wanted)
        self._counters["blocks_mismatched"] += len(payload) - good
        return good


def as_blocks(blocks: Bytes | Sequence[Bytes], count: int, block_bytes: int) -> list[Bytes]:
    """Packed blocks as flat uint8 arrays; ValueError naming the one that does not fit."""
    if len(blocks) != count:
        raise ValueError(f"{count} keys came with {len(blocks)} blocks")
    flat = [np.ascontiguousarray(block).reshape(-1).view(np.uint8) for block in blocks]
    for i, block in enumerate(flat):
        if block.size != block_bytes:
            raise ValueError(f"block {i} has {block.size} bytes; its namespace's blocks have {block_bytes}")
    return flat
