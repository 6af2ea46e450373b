"""Every operation of a client as a generator: it yields what to do next and is sent the outcome (no I/O here).

The sync and the async client drive the same generators. A daemon that is absent, late or out of room is a miss or a
dropped store, counted; only what the caller did wrong raises.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.errors import ErrorCode, KvtierdError, RequestError
from kvtierd.core.keys import KEY_BYTES, Keys, as_keys
from kvtierd.protocol.arena import Arena, ArenaError, MappedChunk
from kvtierd.protocol.connection import Connection, Received, Unavailable
from kvtierd.protocol.copying import Copier, block_sums
from kvtierd.protocol.messages import (
    SLOT_BUSY,
    SLOT_DTYPE,
    SLOT_EXISTS,
    SLOT_GRANTED,
    Abort,
    Acquire,
    AcquireReply,
    AnyReply,
    AnyRequest,
    Commit,
    CommitReply,
    CountReply,
    ErrorReply,
    Flush,
    Get,
    GetReply,
    Hello,
    HelloReply,
    Lookup,
    LookupReply,
    NamespaceReply,
    OkReply,
    Purge,
    Put,
    PutReply,
    RegisterNamespace,
    Reserve,
    ReserveReply,
    Stats,
    StatsReply,
    Tier,
)
from kvtierd.protocol.results import NO_HIT, NO_MASKS, Fetched, Hit, Masks, NamespaceHandle, Stored
from kvtierd.protocol.service import Frame

PIECE_BYTES = 256 << 20
"""Most bytes of one Acquire or Reserve inside fetch and store: a prefix of any length passes in such pieces."""

_TEMPORARY = frozenset(
    {
        ErrorCode.BUSY,
        ErrorCode.DEADLINE,
        ErrorCode.UNAVAILABLE,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.INTERNAL,
        ErrorCode.STALE_EPOCH,
        ErrorCode.NO_SESSION,
    }
)
"""Errors that are the daemon's state and no mistake of the caller."""
_SESSION_LOST = (ErrorCode.STALE_EPOCH, ErrorCode.NO_SESSION)


@dataclasses.dataclass(slots=True)
class Connect:
    """Have a session; the outcome is whether there is one."""

    deadline_ns: int


@dataclasses.dataclass(slots=True)
class Ask:
    """Send requests and wait for their replies; the outcome is a list with None for each that stayed out."""

    requests: Sequence[tuple[AnyRequest, Sequence[Frame]]]
    deadline_ns: int


@dataclasses.dataclass(slots=True)
class Work:
    """Call something that copies or blocks; the outcome is what it returns."""

    function: Callable[[], Any]


Step = Connect | Ask | Work
T = TypeVar("T")
R = TypeVar("R", bound=AnyReply)
Plan = Generator[Step, Any, T]


@dataclasses.dataclass(slots=True)
class Granted:
    """What Reserve gave: a status a key ([n] uint8), and for each granted one its view in slot form."""

    number: int
    session_no: int
    status: Masks
    views: list[Bytes | None]


@dataclasses.dataclass(slots=True)
class Leased:
    """What Acquire gave: `count` blocks in slots, with all that is needed to copy and verify them."""

    number: int
    session_no: int
    count: int
    slots: np.ndarray[Any, np.dtype[np.void]]
    views: list[Bytes]
    chunks: list[MappedChunk]
    sums: Sums

    @property
    def sources(self) -> Masks:
        """Where each block was found: [count] uint8 masks."""
        return np.asarray(self.slots["source"], np.uint8)

    def unchanged(self) -> int:
        """How many leading blocks are still what the lease said, by their slots' generations.

        Read after a copy: the copy is then whole, because a slot's generation changes before its bytes do.
        """
        for i, chunk in enumerate(self.chunks):
            slot = int(self.slots["offset"][i]) // chunk.slot_bytes
            if chunk.generations[slot] != self.slots["generation"][i]:
                return i
        return self.count


class Operations:
    """The plans over one connection; `copier` and the arena do the work on bytes."""

    def __init__(self, connection: Connection, copier: Copier, *, use_arena: bool) -> None:
        self.connection = connection
        self.counters = connection.counters
        self._copier = copier
        self._use_arena = use_arena
        self._arena: Arena | None = None
        self._arena_session_no = 0

    # Asking

    def _ready(self, handles: Sequence[NamespaceHandle], deadline_ns: int) -> Plan[bool]:
        """Have a session in which all these namespaces have numbers."""
        connection = self.connection
        if not connection.up and not (yield Connect(deadline_ns)):
            return False
        todo = [handle for handle in handles if handle.session_no != connection.session_no]
        if not todo:
            return True
        session_no = connection.session_no
        requests = [(_registration(handle), ()) for handle in todo]
        received = yield Ask(requests, deadline_ns)
        for handle, item in zip(todo, received, strict=True):
            reply = self._accept(item, NamespaceReply)
            if reply is None:
                return False
            if reply.digest != handle.digest:
                message = f"the daemon derives another digest for {handle.namespace.model!r}: versions do not match"
                raise KvtierdError(message)
            handle.number, handle.session_no = reply.namespace, session_no
        return True

    def _request(
        self,
        handles: Sequence[NamespaceHandle],
        build: Callable[[], AnyRequest],
        frames: Sequence[Frame],
        deadline_ns: int,
        *,
        arena: bool = False,
    ) -> Plan[Received | None]:
        """Ask one thing, once more where the daemon has started a new life in between."""
        for _ in range(2):
            if not (yield from self._ready(handles, deadline_ns)):
                return None
            if arena and (yield from self._attached(deadline_ns)) is None:
                return None
            received: list[Received | None] = yield Ask([(build(), frames)], deadline_ns)
            first = received[0]
            if first is None or not _session_lost(first[0]):
                return first
        return first

    def _accept(self, received: Received | None, kind: type[R]) -> R | None:
        """The reply, or None for a daemon that cannot now. Raises RequestError for a mistake of the caller."""
        if received is None:
            return None
        reply = received[0]
        if type(reply) is kind:
            return reply
        if isinstance(reply, ErrorReply):
            if reply.code in _TEMPORARY:
                self.counters[f"errors_{reply.code}"] += 1
                return None
            raise RequestError(reply.code, reply.message, reply.retry_after_ms)
        raise KvtierdError(f"the daemon answered {type(reply).__name__} where {kind.__name__} belongs")

    def _insist(self, received: Received | None, kind: type[R]) -> R:
        """The reply. Raises Unavailable where there is none."""
        reply = self._accept(received, kind)
        if reply is not None:
            return reply
        if received is not None and isinstance(received[0], ErrorReply):
            raise Unavailable(
                f"the daemon at {self.connection.endpoint} says {received[0].code}: {received[0].message}"
            )
        refusal = self.connection.refusal
        reason = f"it refused this client: {refusal}" if refusal else "it did not answer in time"
        raise Unavailable(f"no daemon at {self.connection.endpoint}: {reason}")

    # The session

    def register(self, handle: NamespaceHandle, deadline_ns: int) -> Plan[NamespaceHandle]:
        """Give a namespace its number now if the daemon is there; otherwise with its first use."""
        yield from self._ready([handle], deadline_ns)
        return handle

    def ping(self, deadline_ns: int) -> Plan[None]:
        """One round trip."""
        if not self.connection.up and not (yield Connect(deadline_ns)):
            self._insist(None, HelloReply)
        received = yield Ask([(Hello(id=0, resume=self.connection.token), ())], deadline_ns)
        self._insist(received[0], HelloReply)

    def stats(self, deadline_ns: int) -> Plan[dict[str, Any]]:
        """Counters and gauges of the daemon."""
        received = yield from self._request([], lambda: Stats(id=0), (), deadline_ns)
        return self._insist(received, StatsReply).stats

    def flush(self, deadline_ns: int) -> Plan[None]:
        """Everything committed before is durable, or dropped and counted."""
        received = yield from self._request([], lambda: Flush(id=0), (), deadline_ns)
        self._insist(received, OkReply)

    # Blocks

    def lookup(self, handles: Sequence[NamespaceHandle], keys: Sequence[Keys], deadline_ns: int) -> Plan[Hit]:
        """The common prefix over all these namespaces."""
        frames = [as_frame(item) for item in keys]
        if len({frame.nbytes for frame in frames}) != 1 or len(frames) != len(handles):
            raise ValueError("a lookup wants one array of keys for each namespace, all of the same length")
        limit = self.connection.max_batch // len(handles) * KEY_BYTES
        hits: list[Hit] = []
        for begin in range(0, max(1, frames[0].nbytes), limit):
            piece = [frame[begin : begin + limit] for frame in frames]
            hit = yield from self._lookup_piece(handles, piece, deadline_ns)
            hits.append(hit)
            if hit.count * KEY_BYTES < piece[0].nbytes:
                break
        if len(hits) == 1:
            return hits[0]
        return Hit(sum(hit.count for hit in hits), np.concatenate([hit.tiers for hit in hits]))

    def _lookup_piece(self, handles: Sequence[NamespaceHandle], frames: Sequence[Frame], deadline_ns: int) -> Plan[Hit]:
        received = yield from self._request(
            handles, lambda: Lookup(id=0, namespaces=[handle.number for handle in handles]), frames, deadline_ns
        )
        return self._as_hit(received)

    def _as_hit(self, received: Received | None) -> Hit:
        reply = self._accept(received, LookupReply)
        if reply is None:
            self.counters["lookups_missed_unavailable"] += 1
            return NO_HIT
        return Hit(reply.hit, np.frombuffer(reply.tiers, np.uint8)) if reply.hit else NO_HIT

    def lookup_many(self, handle: NamespaceHandle, keys: Sequence[Keys], deadline_ns: int) -> Plan[list[Hit]]:
        """Many lookups in one go, each of at most `max_batch` keys; their requests do not wait for one another."""
        frames = [as_frame(item) for item in keys]
        limit = self.connection.max_batch * KEY_BYTES
        if long := [frame.nbytes for frame in frames if frame.nbytes > limit]:
            raise ValueError(f"a lookup of {long[0] // KEY_BYTES} keys is over the limit of {limit // KEY_BYTES}")
        left = list(range(len(frames)))
        hits = [NO_HIT] * len(frames)
        for _ in range(2):
            if not (yield from self._ready([handle], deadline_ns)):
                break
            numbers = [handle.number]
            received = yield Ask([(Lookup(id=0, namespaces=numbers), (frames[i],)) for i in left], deadline_ns)
            again = []
            for i, item in zip(left, received, strict=True):
                if item is not None and _session_lost(item[0]):
                    again.append(i)
                else:
                    hits[i] = self._as_hit(item)
            left = again
            if not left:
                return hits
        self.counters["lookups_missed_unavailable"] += len(left)
        return hits

    def count(
        self, handle: NamespaceHandle, build: Callable[[], AnyRequest], keys: Keys, deadline_ns: int
    ) -> Plan[int]:
        """Prefetch, pin, unpin, delete: how many blocks it concerned, 0 without a daemon."""
        data = as_frame(keys)
        limit = self.connection.max_batch * KEY_BYTES
        total = 0
        for begin in range(0, max(1, data.nbytes), limit):
            received = yield from self._request([handle], build, (data[begin : begin + limit],), deadline_ns)
            reply = self._accept(received, CountReply)
            if reply is None:
                self.counters["requests_unavailable"] += 1
                break
            total += reply.count
        return total

    def purge(self, handle: NamespaceHandle | None, tiers: Sequence[Tier], deadline_ns: int) -> Plan[int]:
        """Forget a namespace or everything; raises Unavailable where the daemon did not."""

        def build() -> AnyRequest:
            return Purge(id=0, namespace=handle.number if handle else 0, tiers=list(tiers))

        received = yield from self._request([handle] if handle else [], build, (), deadline_ns)
        return self._insist(received, CountReply).count

    # The arena

    def _attached(self, deadline_ns: int) -> Plan[Arena | None]:
        """The arena of this session, attached with its first use; None where it is not to be had."""
        connection = self.connection
        if not self._use_arena or not connection.arena_path:
            return None
        if self._arena_session_no == connection.session_no:
            return self._arena
        session_no, path, token = connection.session_no, connection.arena_path, connection.token
        self.close_arena()
        try:
            self._arena = yield Work(lambda: Arena.attach(path, token, deadline_ns))
            self.counters["arena_attached"] += 1
        except ArenaError:
            self.counters["arena_refused"] += 1
        self._arena_session_no = session_no
        return self._arena

    def has_arena(self, deadline_ns: int) -> Plan[bool]:
        """Whether blocks of this session go through the arena; False too where the daemon is away."""
        if not (yield from self._ready([], deadline_ns)):
            return False
        return (yield from self._attached(deadline_ns)) is not None

    def _views(
        self, slots: np.ndarray[Any, np.dtype[np.void]], nbytes: int, deadline_ns: int
    ) -> Plan[tuple[list[Bytes], list[MappedChunk]]]:
        """Map what the descriptors name. Raises ArenaError."""
        arena = self._arena
        if arena is None:
            raise ArenaError("the arena was detached meanwhile")
        views, chunks = [], []
        for number, offset in zip(slots["chunk"].tolist(), slots["offset"].tolist(), strict=True):
            chunk = arena.chunk(number)
            if chunk is None:
                chunk = yield Work(functools.partial(arena.map, number, deadline_ns))
            chunks.append(chunk)
            views.append(chunk.view(offset, nbytes))
        return views, chunks

    def close_arena(self) -> None:
        """Let go of an earlier session's arena."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def abandon(self) -> None:
        """In a forked child."""
        self._arena_session_no = 0
        if self._arena is not None:
            self._arena.abandon()
            self._arena = None

    def reserve(self, handle: NamespaceHandle, keys: Keys, deadline_ns: int) -> Plan[Granted]:
        """Slots to write into; without arena or daemon every block is refused."""
        data = as_frame(keys)
        count = data.nbytes // KEY_BYTES
        nothing = Granted(0, 0, np.full(count, SLOT_BUSY, np.uint8), [None] * count)
        received = yield from self._request(
            [handle], lambda: Reserve(id=0, namespace=handle.number), (data,), deadline_ns, arena=True
        )
        reply = self._accept(received, ReserveReply)
        if reply is None or received is None:
            self.counters["stores_dropped_unavailable"] += count
            return nothing
        session_no = self.connection.session_no
        slots = _descriptors(received[1], count)
        status = slots["status"].copy()
        granted = np.flatnonzero(status == SLOT_GRANTED)
        try:
            views, _ = yield from self._views(slots[granted], handle.geometry.slot_bytes, deadline_ns)
        except ArenaError:
            self.counters["arena_errors"] += 1
            self.abort(reply.reservation, session_no)
            return nothing
        placed: list[Bytes | None] = [None] * count
        for i, view in zip(granted.tolist(), views, strict=True):
            placed[i] = view
        return Granted(reply.reservation, session_no, status, placed)

    def commit(
        self,
        grant: Granted,
        index: Sequence[int],
        sums: Sums,
        *,
        verify: bool,
        deadline_ns: int,
    ) -> Plan[CommitReply]:
        """Make written blocks visible; nothing is where the session or the daemon is gone."""
        connection = self.connection
        dropped = CommitReply(id=0, committed=0)
        if not index or grant.session_no != connection.session_no or not grant.number:
            self.counters["stores_dropped_unavailable"] += len(index)
            return dropped
        request = Commit(id=0, reservation=grant.number, index=list(index), verify=verify)
        frames = (_raw(sums), _raw(block_sums(sums)))
        received = yield Ask([(request, frames)], deadline_ns)
        reply = self._accept(received[0], CommitReply)
        if reply is None:
            self.counters["stores_dropped_unavailable"] += len(index)
            return dropped
        return reply

    def abort(self, number: int, session_no: int) -> None:
        """Give a reservation back; where the daemon is away, as soon as the session goes on."""
        if not number or session_no != self.connection.session_no:
            return
        if not self.connection.post(Abort(id=0, reservation=number)):
            self.connection.orphans.append((session_no, number))

    def acquire(
        self, handle: NamespaceHandle, keys: Keys, *, ttl_ms: int, verify: bool, deadline_ns: int
    ) -> Plan[Leased]:
        """A lease on the leading run; empty without arena or daemon."""
        data = as_frame(keys)
        received = yield from self._request(
            [handle],
            lambda: Acquire(id=0, namespace=handle.number, ttl_ms=ttl_ms, verify=verify),
            (data,),
            deadline_ns,
            arena=True,
        )
        reply = self._accept(received, AcquireReply)
        if reply is None or received is None:
            self.counters["lookups_missed_unavailable"] += 1
            return self._no_lease(handle)
        if not reply.count:
            return self._no_lease(handle)
        session_no, layers = self.connection.session_no, handle.geometry.layers
        slots = _descriptors(received[1], reply.count)
        sums = _sums(received[1], 1, reply.count, layers)
        try:
            views, chunks = yield from self._views(slots, handle.geometry.slot_bytes, deadline_ns)
        except ArenaError:
            self.counters["arena_errors"] += 1
            self.release(reply.lease, session_no)
            return self._no_lease(handle)
        for view in views:
            view.flags.writeable = False
        return Leased(reply.lease, session_no, reply.count, slots, views, chunks, sums)

    def _no_lease(self, handle: NamespaceHandle) -> Leased:
        sums = np.empty((0, handle.geometry.layers), np.uint64)
        return Leased(0, 0, 0, np.empty(0, SLOT_DTYPE), [], [], sums)

    def release(self, number: int, session_no: int) -> None:
        """End a lease without waiting; one that the daemon never hears of expires."""
        from kvtierd.protocol.messages import Release

        if number and session_no == self.connection.session_no:
            self.connection.post(Release(id=0, leases=[number], quiet=True))

    def copy_out(self, lease: Leased, out: Bytes, handle: NamespaceHandle, *, verify: bool) -> Plan[int]:
        """Copy a lease's blocks; how many leading ones are good."""
        geometry = handle.geometry
        if not verify:
            yield Work(lambda: self._copier.copy_out(lease.views, out, geometry))
            return lease.unchanged()
        sums = yield Work(lambda: self._copier.copy_out_and_sum(lease.views, out, geometry))
        good = min(lease.unchanged(), _leading(sums, lease.sums))
        self.counters["blocks_mismatched"] += lease.count - good
        return good

    # Whole transfers

    def store(self, handle: NamespaceHandle, keys: Keys, blocks: Sequence[Bytes], deadline_ns: int) -> Plan[Stored]:
        """Store packed blocks, through the arena where there is one."""
        stored = existed = 0
        total = len(blocks)
        flat = as_keys(keys)
        arena = yield from self.has_arena(deadline_ns)
        step = self._blocks_a_piece(handle, arena=arena)
        for begin in range(0, total, step):
            part = slice(begin, begin + step)
            plan = self._store_arena if arena else self._put
            done = yield from plan(handle, flat[part], blocks[part], deadline_ns)
            if done is None:
                break
            stored += done[0]
            existed += done[1]
        dropped = total - stored - existed
        self.counters["blocks_dropped"] += dropped
        return Stored(stored, existed, dropped)

    def _blocks_a_piece(self, handle: NamespaceHandle, *, arena: bool) -> int:
        limit = PIECE_BYTES if arena else self.connection.max_message_bytes - (1 << 20)
        each = handle.geometry.slot_bytes + KEY_BYTES + 8 * (handle.geometry.layers + 1)
        return max(1, min(self.connection.max_batch, limit // each))

    def _store_arena(
        self, handle: NamespaceHandle, keys: Keys, blocks: Sequence[Bytes], deadline_ns: int
    ) -> Plan[tuple[int, int] | None]:
        grant = yield from self.reserve(handle, keys, deadline_ns)
        existed = int(np.count_nonzero(grant.status == SLOT_EXISTS))
        if not grant.number:
            return (0, existed) if existed else None
        committed = False
        try:
            index = [i for i, view in enumerate(grant.views) if view is not None]
            views = [view for view in grant.views if view is not None]
            mine = [blocks[i] for i in index]
            sums = yield Work(lambda: self._copier.fill(mine, views, handle.geometry))
            reply = yield from self.commit(grant, index, sums, verify=False, deadline_ns=deadline_ns)
            committed = reply.committed + reply.existed == len(index)
        finally:
            if not committed:
                self.abort(grant.number, grant.session_no)
        return reply.committed, existed + reply.existed

    def _put(
        self, handle: NamespaceHandle, keys: Keys, blocks: Sequence[Bytes], deadline_ns: int
    ) -> Plan[tuple[int, int] | None]:
        sums = yield Work(lambda: self._copier.sum_packed(blocks, handle.geometry))
        frames = [as_frame(keys), _raw(block_sums(sums)), *(block.data for block in blocks)]
        received = yield from self._request([handle], lambda: Put(id=0, namespace=handle.number), frames, deadline_ns)
        reply = self._accept(received, PutReply)
        if reply is None:
            self.counters["stores_dropped_unavailable"] += len(blocks)
            return None
        return reply.stored, reply.existed

    def fetch(
        self, handle: NamespaceHandle, keys: Keys, out: Bytes | None, *, verify: bool, deadline_ns: int
    ) -> Plan[Fetched]:
        """Fetch the leading run, through the arena where there is one."""
        flat = as_keys(keys)
        arena = yield from self.has_arena(deadline_ns)
        step = self._blocks_a_piece(handle, arena=arena)
        parts: list[Bytes] = []
        sources: list[Masks] = []
        count = 0
        while count < len(flat):
            piece = flat[count : count + step]
            room = None if out is None else out[count : count + len(piece)]
            plan = self._fetch_arena if arena else self._get
            blocks, masks = yield from plan(handle, piece, room, verify=verify, deadline_ns=deadline_ns)
            if not len(masks):
                break
            parts.append(blocks)
            sources.append(masks)
            count += len(masks)
        if out is None:
            nothing = np.empty((0, handle.geometry.block_bytes), np.uint8)
            out = parts[0] if len(parts) == 1 else np.concatenate([nothing, *parts])
        return Fetched(count, out[:count], np.concatenate([NO_MASKS, *sources]))

    def _fetch_arena(
        self, handle: NamespaceHandle, keys: Keys, out: Bytes | None, *, verify: bool, deadline_ns: int
    ) -> Plan[tuple[Bytes, Masks]]:
        lease = yield from self.acquire(handle, keys, ttl_ms=0, verify=False, deadline_ns=deadline_ns)
        try:
            if out is None:
                out = np.empty((lease.count, handle.geometry.block_bytes), np.uint8)
            good = yield from self.copy_out(lease, out, handle, verify=verify)
        finally:
            self.release(lease.number, lease.session_no)
        return out[:good], lease.sources[:good]

    def _get(
        self, handle: NamespaceHandle, keys: Keys, out: Bytes | None, *, verify: bool, deadline_ns: int
    ) -> Plan[tuple[Bytes, Masks]]:
        received = yield from self._request(
            [handle], lambda: Get(id=0, namespace=handle.number), (as_frame(keys),), deadline_ns
        )
        reply = self._accept(received, GetReply)
        geometry = handle.geometry
        if out is None:
            out = np.empty((reply.count if reply else 0, geometry.block_bytes), np.uint8)
        if reply is None or received is None:
            self.counters["lookups_missed_unavailable"] += 1
            return out[:0], NO_MASKS
        payload = [np.frombuffer(frame, np.uint8) for frame in received[1][1:]]
        if len(payload) != reply.count or any(block.size != geometry.block_bytes for block in payload):
            raise KvtierdError(
                f"the daemon promised {reply.count} blocks of {geometry.block_bytes} bytes and sent others"
            )
        good = yield Work(lambda: self._copy_payload(payload, out, handle, received[1], verify=verify))
        return out[:good], np.frombuffer(reply.tiers, np.uint8)[:good]

    def _copy_payload(
        self, payload: list[Bytes], out: Bytes, handle: NamespaceHandle, frames: list[memoryview], *, verify: bool
    ) -> int:
        for block, target in zip(payload, out, strict=False):
            target[:] = block
        if not verify or not payload:
            return len(payload)
        wanted = _sums(frames, 0, len(payload), handle.geometry.layers)
        good = _leading(self._copier.sum_packed(out[: len(payload)], handle.geometry), wanted)
        self.counters["blocks_mismatched"] += len(payload) - good
        return good


def as_frame(keys: Keys | bytes | memoryview) -> memoryview:
    """Keys as one contiguous frame; ValueError when they are no keys."""
    flat = as_keys(keys)
    return _raw(np.ascontiguousarray(flat)) if flat.size else memoryview(b"")


def as_blocks(blocks: Bytes | Sequence[Bytes], count: int, block_bytes: int) -> list[Bytes]:
    """Packed blocks as flat uint8 arrays; ValueError naming the one that does not fit."""
    if len(blocks) != count:
        raise ValueError(f"{count} keys came with {len(blocks)} blocks")
    flat = [np.ascontiguousarray(block).reshape(-1).view(np.uint8) for block in blocks]
    for i, block in enumerate(flat):
        if block.size != block_bytes:
            raise ValueError(f"block {i} has {block.size} bytes; its namespace's blocks have {block_bytes}")
    return flat


def _raw(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _registration(handle: NamespaceHandle) -> RegisterNamespace:
    return RegisterNamespace(
        id=0,
        namespace=handle.namespace,
        block_bytes=handle.geometry.block_bytes,
        allow_loss=handle.allow_loss,
    )


def _session_lost(reply: AnyReply) -> bool:
    return isinstance(reply, ErrorReply) and reply.code in _SESSION_LOST


def _descriptors(frames: Sequence[memoryview], count: int) -> np.ndarray[Any, np.dtype[np.void]]:
    if not frames or frames[0].nbytes != count * SLOT_DTYPE.itemsize:
        raise KvtierdError(f"the daemon sent no {count} slot descriptors")
    return np.frombuffer(frames[0], SLOT_DTYPE)


def _sums(frames: Sequence[memoryview], position: int, count: int, layers: int) -> Sums:
    if len(frames) <= position or frames[position].nbytes != count * layers * 8:
        raise KvtierdError(f"the daemon sent no layer sums of {count} blocks with {layers} layers")
    return np.frombuffer(frames[position], "<u8").reshape(count, layers)


def _leading(got: Sums, wanted: Sums) -> int:
    """How many leading rows are equal."""
    equal = (got == wanted).all(axis=1)
    return len(equal) if equal.all() else int(np.argmin(equal))
