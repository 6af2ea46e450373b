"""A service of dictionaries behind the real server, with a real memfd chunk: what clients can be tested against.

It keeps no tiers, no disk and no policy, but it keeps the contract: reservations and leases belong to a session, a
slot's generation changes before its bytes may, and what a dead client held comes back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from kvtierd.core.checksum import block_sum, copy_and_sum, fill_and_sum, layer_sums
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.keys import KEY_BYTES
from kvtierd.protocol.messages import (
    SLOT_BUSY,
    SLOT_DTYPE,
    SLOT_EXISTS,
    SLOT_GRANTED,
    TIER_HOST,
    Abort,
    Acquire,
    AcquireReply,
    AnyRequest,
    Commit,
    CommitReply,
    CountReply,
    Delete,
    Get,
    GetReply,
    Lookup,
    LookupReply,
    NamespaceReply,
    OkReply,
    Pin,
    Prefetch,
    Purge,
    Put,
    PutReply,
    RegisterNamespace,
    Release,
    Reserve,
    ReserveReply,
    Stats,
    StatsReply,
    Unpin,
)
from kvtierd.protocol.service import Answer, ChunkFiles, Session
from kvtierd.testing.fake_chunk import CHUNK, FakeChunk
from kvtierd.testing.fake_records import FakeBlock, FakeLease, FakeNamespace, FakeReservation

BlockId = tuple[bytes, bytes]


class FakeService:
    """Implements `Service` and `ChunkSource`. `log` records what the server told about sessions.

    `before` is called with every request; what it raises is the answer, and an awaitable it returns is awaited first.
    """

    def __init__(self, slot_bytes: int = 16384, slots: int = 64, *, max_message_bytes: int = 256 << 20) -> None:
        self.chunk = FakeChunk(slot_bytes, slots)
        self.blocks: dict[BlockId, FakeBlock] = {}
        self.reserved: set[BlockId] = set()
        self.reservations: dict[int, FakeReservation] = {}
        self.leases: dict[int, FakeLease] = {}
        self.log: list[str] = []
        self.requests: Counter[str] = Counter()
        self.before: Callable[[Session, AnyRequest], Awaitable[None] | None] | None = None
        self._max_message_bytes = max_message_bytes
        self._ids = itertools.count(1)

    def close(self) -> None:
        """Close the chunk's files."""
        self.chunk.close()

    # Sessions

    def session_opened(self, session: Session) -> None:
        """Give the session its table of namespaces."""
        session.state = {}
        self.log.append(f"opened {session.id}")

    def session_detached(self, session: Session) -> None:
        """End leases; reservations wait for the process."""
        self.log.append(f"detached {session.id}")
        for number in [number for number, lease in self.leases.items() if lease.session is session]:
            self._end_lease(self.leases.pop(number))
        session.quarantined = sum(item.session is session for item in self.reservations.values())

    def process_gone(self, session: Session) -> None:
        """Free what was in quarantine."""
        self.log.append(f"gone {session.id}")
        for number in [number for number, item in self.reservations.items() if item.session is session]:
            self._abort(number)
        session.quarantined = 0

    def chunk_files(self, session: Session, chunk: int) -> ChunkFiles | None:
        """The one chunk."""
        del session
        return self.chunk.files() if chunk == CHUNK else None

    # Requests

    def handle(self, session: Session, request: AnyRequest, frames: Sequence[memoryview]) -> Answer | Awaitable[Answer]:
        """Serve a request at once, or after what `before` wants awaited."""
        self.requests[type(request).__name__] += 1
        wait = self.before(session, request) if self.before is not None else None
        if wait is not None:
            return self._later(wait, session, request, frames)
        return self._serve(session, request, frames)

    async def _later(
        self, wait: Awaitable[None], session: Session, request: AnyRequest, frames: Sequence[memoryview]
    ) -> Answer:
        await wait
        await asyncio.sleep(0)
        return self._serve(session, request, frames)

    def _serve(self, session: Session, request: AnyRequest, frames: Sequence[memoryview]) -> Answer:
        match request:
            case RegisterNamespace():
                return self._register(session, request)
            case Lookup():
                return self._lookup(session, request, frames)
            case Commit():
                return self._commit(session, request, frames)
            case Abort(reservation=number):
                self._mine(session, self.reservations, number)
                self._abort(number)
            case Release():
                self._release(session, request)
            case Purge() | Stats():
                return self._manage(session, request)
            case Reserve() | Acquire() | Put() | Get() | Prefetch() | Pin() | Unpin() | Delete():
                return self._serve_keys(session, request, self._space(session, request.namespace), frames)
        return Answer(OkReply(id=0))

    def _manage(self, session: Session, request: Purge | Stats) -> Answer:
        if isinstance(request, Purge):
            return self._purge(self._space(session, request.namespace) if request.namespace else None)
        return Answer(StatsReply(id=0, stats={"blocks": len(self.blocks), "slots_free": len(self.chunk.free)}))

    def _serve_keys(
        self, session: Session, request: AnyRequest, space: FakeNamespace, frames: Sequence[memoryview]
    ) -> Answer:
        keys = _keys(frames[0])
        match request:
            case Reserve():
                return self._reserve(session, space, keys)
            case Acquire():
                return self._acquire(session, space, keys)
            case Put():
                return self._put(space, frames)
            case Get():
                return self._get(space, keys)
            case Delete():
                return self._delete(space, keys)
        return Answer(CountReply(id=0, count=len(self._leading(space, keys))))

    def _release(self, session: Session, request: Release) -> None:
        for number in request.leases:
            self._mine(session, self.leases, number)
        for number in set(request.leases):
            self._end_lease(self.leases.pop(number))

    def _register(self, session: Session, request: RegisterNamespace) -> Answer:
        shape = request.namespace.geometry
        if request.block_bytes not in {0, shape.block_bytes}:
            message = f"block_bytes is {request.block_bytes}; the geometry makes {shape.block_bytes}"
            raise RequestError(ErrorCode.GEOMETRY_MISMATCH, message)
        if shape.slot_bytes > self.chunk.slot_bytes:
            raise RequestError(ErrorCode.TOO_LARGE, f"a block of {shape.slot_bytes} bytes does not fit in a slot")
        digest = request.namespace.digest()
        spaces: dict[int, FakeNamespace] = session.state
        number = next((n for n, space in spaces.items() if space.digest == digest), len(spaces) + 1)
        spaces[number] = FakeNamespace(digest, shape)
        return Answer(
            NamespaceReply(
                id=0,
                namespace=number,
                digest=digest,
                block_bytes=shape.block_bytes,
                slot_bytes=shape.slot_bytes,
                layer_stride=shape.layer_stride,
            )
        )

    def _space(self, session: Session, number: int) -> FakeNamespace:
        spaces: dict[int, FakeNamespace] = session.state
        if number not in spaces:
            raise RequestError(ErrorCode.UNKNOWN_NAMESPACE, f"namespace {number} is not registered in this session")
        return spaces[number]

    @staticmethod
    def _mine(session: Session, table: dict[int, Any], number: int) -> Any:
        if number not in table or table[number].session is not session:
            raise RequestError(ErrorCode.NOT_YOURS, f"{number} is no lease or reservation of this session")
        return table[number]

    def _leading(self, space: FakeNamespace, keys: Sequence[bytes]) -> list[FakeBlock]:
        found = (self.blocks.get((space.digest, key)) for key in keys)
        return list(itertools.takewhile(lambda block: block is not None, found))  # type: ignore[arg-type]

    def _run(self, session: Session, number: int, frame: memoryview) -> list[FakeBlock]:
        return self._leading(self._space(session, number), _keys(frame))

    def _lookup(self, session: Session, request: Lookup, frames: Sequence[memoryview]) -> Answer:
        runs = [self._run(session, number, frame) for number, frame in zip(request.namespaces, frames, strict=True)]
        hit = min(len(run) for run in runs)
        return Answer(LookupReply(id=0, hit=hit, tiers=bytes([TIER_HOST]) * hit))

    def _reserve(self, session: Session, space: FakeNamespace, keys: list[bytes]) -> Answer:
        slots = np.zeros(len(keys), SLOT_DTYPE)
        granted: dict[int, tuple[bytes, int]] = {}
        for i, key in enumerate(keys):
            block = (space.digest, key)
            if block in self.blocks or block in self.reserved:
                slots[i]["status"] = SLOT_EXISTS
            elif not self.chunk.free:
                slots[i]["status"] = SLOT_BUSY
            else:
                slot = self.chunk.take()
                granted[i] = (key, slot)
                self.reserved.add(block)
                slots[i] = (CHUNK, SLOT_GRANTED, 0, 0, slot * self.chunk.slot_bytes, self.chunk.generations[slot])
        number = next(self._ids) if granted else 0
        if granted:
            self.reservations[number] = FakeReservation(session, space, granted)
        reply = ReserveReply(id=0, reservation=number, granted=len(granted), retry_after_ms=0 if granted else 10)
        return Answer(reply, (slots.tobytes(),))

    def _commit(self, session: Session, request: Commit, frames: Sequence[memoryview]) -> Answer:
        item: FakeReservation = self._mine(session, self.reservations, request.reservation)
        index = list(item.slots) if request.index is None else request.index
        if stray := [i for i in index if i not in item.slots or index.count(i) > 1]:
            raise RequestError(ErrorCode.BAD_ARGUMENT, f"block {stray[0]} is not reserved, or named twice")
        layers = item.space.geometry.layers
        sums, wholes = np.frombuffer(frames[0], "<u8"), np.frombuffer(frames[1], "<u8")
        if sums.size != len(index) * layers or wholes.size != len(index):
            raise RequestError(ErrorCode.BAD_FRAMES, f"{len(index)} blocks of {layers} layers want other sums")
        rows = sums.reshape(len(index), layers)
        for i, row, whole in zip(index, rows, wholes, strict=True):
            found = layer_sums(self.chunk.slot(item.slots[i][1]), item.space.geometry) if request.verify else row
            if block_sum(row) != whole or not np.array_equal(found, row):
                raise RequestError(ErrorCode.CHECKSUM_MISMATCH, f"block {i} does not match its sums")
        for i, row in zip(index, rows, strict=True):
            key, slot = item.slots.pop(i)
            self.reserved.discard((item.space.digest, key))
            if (item.space.digest, key) in self.blocks:
                self._free(slot)  # a Put came first
            else:
                self.blocks[item.space.digest, key] = FakeBlock(slot, row.copy())
        if not item.slots:
            del self.reservations[request.reservation]
        return Answer(CommitReply(id=0, committed=len(index)))

    def _abort(self, number: int) -> None:
        item = self.reservations.pop(number)
        for key, slot in item.slots.values():
            self.reserved.discard((item.space.digest, key))
            self._free(slot)

    def _free(self, slot: int) -> None:
        self.chunk.generations[slot] += 1
        self.chunk.free.append(slot)

    def _acquire(self, session: Session, space: FakeNamespace, keys: list[bytes]) -> Answer:
        blocks = self._leading(space, keys)
        if not blocks:
            return Answer(AcquireReply(id=0, lease=0, count=0), (b"", b""))
        slots = np.zeros(len(blocks), SLOT_DTYPE)
        for i, block in enumerate(blocks):
            block.holds += 1
            at = block.slot * self.chunk.slot_bytes
            slots[i] = (CHUNK, SLOT_GRANTED, TIER_HOST, 0, at, self.chunk.generations[block.slot])
        number = next(self._ids)
        self.leases[number] = FakeLease(session, blocks)
        sums = np.stack([block.sums for block in blocks])
        reply = AcquireReply(id=0, lease=number, count=len(blocks), ttl_ms=10_000)
        return Answer(reply, (slots.tobytes(), sums.tobytes()))

    def _end_lease(self, lease: FakeLease) -> None:
        for block in lease.blocks:
            block.holds -= 1
            if block.dead and not block.holds:
                self._free(block.slot)

    def _put(self, space: FakeNamespace, frames: Sequence[memoryview]) -> Answer:
        stored = existed = refused = 0
        wholes = np.frombuffer(frames[1], "<u8")
        for key, whole, payload in zip(_keys(frames[0]), wholes, frames[2:], strict=True):
            if payload.nbytes != space.geometry.block_bytes:
                message = f"a payload has {payload.nbytes} bytes; a block has {space.geometry.block_bytes}"
                raise RequestError(ErrorCode.GEOMETRY_MISMATCH, message)
            if (space.digest, key) in self.blocks:
                existed += 1
            elif not self.chunk.free:
                refused += 1
            else:
                slot, sums = self.chunk.take(), np.empty(space.geometry.layers, np.uint64)
                fill_and_sum(np.frombuffer(payload, np.uint8), self.chunk.slot(slot), space.geometry, sums)
                if block_sum(sums) != whole:
                    self._free(slot)
                    raise RequestError(ErrorCode.CHECKSUM_MISMATCH, f"block {key[:4].hex()} does not match its sum")
                self.blocks[space.digest, key] = FakeBlock(slot, sums)
                stored += 1
        return Answer(PutReply(id=0, stored=stored, existed=existed, refused=refused))

    def _get(self, space: FakeNamespace, keys: list[bytes]) -> Answer:
        if len(keys) * space.geometry.block_bytes > self._max_message_bytes:
            raise RequestError(ErrorCode.TOO_LARGE, f"{len(keys)} blocks are more than one message holds")
        blocks = self._leading(space, keys)
        layers = space.geometry.layers
        sums = np.stack([block.sums for block in blocks]) if blocks else np.empty((0, layers), np.uint64)
        payload = [np.empty(space.geometry.block_bytes, np.uint8) for _ in blocks]
        for block, out in zip(blocks, payload, strict=True):
            seen = np.empty(layers, np.uint64)  # what it says of the slot's bytes is for the client to find out
            copy_and_sum(self.chunk.slot(block.slot), out, space.geometry, seen, packed=True)
        reply = GetReply(id=0, count=len(blocks), tiers=bytes([TIER_HOST]) * len(blocks))
        return Answer(reply, (sums.tobytes(), *(out.data for out in payload)), on_sent=lambda: None)

    def _delete(self, space: FakeNamespace, keys: list[bytes]) -> Answer:
        return Answer(CountReply(id=0, count=sum(self._forget((space.digest, key)) for key in keys)))

    def _purge(self, space: FakeNamespace | None) -> Answer:
        wanted = [block for block in self.blocks if space is None or block[0] == space.digest]
        return Answer(CountReply(id=0, count=sum(self._forget(block) for block in wanted)))

    def _forget(self, name: BlockId) -> bool:
        block = self.blocks.pop(name, None)
        if block is None:
            return False
        block.dead = True
        if not block.holds:
            self._free(block.slot)
        return True


def _keys(frame: memoryview) -> list[bytes]:
    data = bytes(frame)
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
