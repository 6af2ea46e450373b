"""Open sequences: keys resolved once, and blocks kept where they are while a client decodes (OpenSequence and its kin).

A sequence keeps the *rows* of its blocks, so that each stands for the same block as long as it is open, and holds
copies in gpu and host as a lease does, within a share of each tier: a block that is not kept may move, and is found
where it is when it is asked for. Nothing is brought anywhere and nothing is evicted for a sequence.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Settings
from kvtierd.core.checksum import Sums
from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import LAYOUTS
from kvtierd.core.keys import Keys
from kvtierd.gpu.attend import DTYPE_CODES
from kvtierd.gpu.slot_pool import NO_SLOT, Slots
from kvtierd.protocol.messages import CloseSequence, CountReply, Extend, OkReply, OpenSequence, SequenceReply
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.attend_places import Addresses, Numbers, Place, gpu_addresses, host_addresses, places_of
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.demand import Demand
from kvtierd.tiers.leases import SESSION_SHARE, Register
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.sessions import keys_of, namespace_of, need_frames

Frames = Sequence[memoryview]

METADATA_MAX_BYTES = 256 << 20
"""What is remembered of the blocks of all open sequences, most of it layer sums; one client gets a quarter."""

USE_NS = 1_000_000_000
"""A sequence that is attended to again and again uses its blocks once in so long, not once for each layer and token."""


@dataclasses.dataclass(slots=True, eq=False)
class OpenedSequence:
    """Blocks of one sequence as columns, [n] each; `n` only grows.

    `place` says in which tier a copy is held (`Place.GPU`, `Place.HOST`, or `Place.NOWHERE`: none), `slots` in which
    slot, `addresses` where that begins. `sums` ([n, layers]) are the layer sums of what lies on disk, as far as they
    are `known`. `calls` are requests that work with it: what it holds ends with the last of them.
    """

    id: int
    session: int
    entry: NamespaceEntry
    ttl_ns: int
    expires_ns: int
    rows: Rows
    place: npt.NDArray[np.uint8]
    slots: Slots
    addresses: Addresses
    sums: Sums
    known: npt.NDArray[np.bool_]
    calls: int = 0
    closed: bool = False
    used_ns: int = 0

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.entry.tenant

    @property
    def kept(self) -> int:
        """Blocks that are held where they are."""
        return int(np.count_nonzero(self.place != Place.NOWHERE))

    @property
    def tokens(self) -> int:
        """Tokens of all blocks."""
        return self.rows.size * self.entry.geometry.block_size

    def key_of(self, copies: Copies, number: int) -> str:
        """What messages call a block."""
        return f"block {number} ({copies.blocks.table.key[self.rows[number]].tobytes().hex()[:16]})"


class Sequences:
    """Serves OpenSequence, Extend and CloseSequence.

    `on_open` is told of which namespace one was opened, and `on_close` of a sequence that nobody can ask any more.
    """

    def __init__(self, settings: Settings, copies: Copies, demand: Demand, clock: Clock) -> None:
        self._copies = copies
        self._demand = demand
        self._clock = clock
        self._limits = settings.leases
        share = settings.attention.kept_share
        self._budget = {Place.HOST: int(share * settings.host.capacity), Place.GPU: 0}
        if copies.gpu is not None:
            self._budget[Place.GPU] = int(share * copies.gpu.device.capacity_bytes)
        self.held_bytes = {Place.HOST: 0, Place.GPU: 0}
        self._metadata: collections.Counter[int] = collections.Counter()
        """Bytes by session."""
        self.open: Register[OpenedSequence] = Register(settings.attention.max_sequences)
        self.on_open: Callable[[NamespaceEntry], None] = lambda _entry: None
        self.on_close: Callable[[OpenedSequence], None] = lambda _sequence: None

    def open_sequence(self, session: Session, request: OpenSequence, frames: Frames) -> Answer:
        """Resolve keys and keep what is there."""
        need_frames(frames, 1)
        entry, keys = namespace_of(session, request.namespace), keys_of(frames[0])
        if request.ttl_ms < 0:
            raise RequestError(ErrorCode.BAD_ARGUMENT, f"ttl_ms is {request.ttl_ms}; 0 asks for the default")
        _check_computable(entry)
        rows = self._found(entry, keys, 0)
        self._check_metadata(session.id, entry, rows.size)
        number = self.open.next_id(session.id, session.tenant)
        if number is None:
            message = f"too many sequences are open ({self.open.limits()}); close some"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=100)
        ttl_ms = min(request.ttl_ms or self._limits.ttl_ms, self._limits.max_ttl_ms)
        sequence = _empty(number, session.id, entry, ttl_ms * 1_000_000)
        self.touch(sequence)
        self._append(sequence, rows)
        self.open.add(sequence)
        self._copies.counters["opened_sequences"] += 1
        self.on_open(entry)
        return Answer(SequenceReply(id=0, sequence=number, blocks=rows.size, kept=sequence.kept, ttl_ms=ttl_ms))

    def extend(self, session: Session, request: Extend, frames: Frames) -> Answer:
        """Add blocks; all or none."""
        need_frames(frames, 1)
        sequence = self.get(session, request.sequence)
        rows = self._found(sequence.entry, keys_of(frames[0]), sequence.rows.size)
        if np.intersect1d(rows, sequence.rows).size:
            raise RequestError(
                ErrorCode.BAD_ARGUMENT, "a key is in the sequence already; a sequence has every key once"
            )
        self._check_metadata(session.id, sequence.entry, rows.size)
        self.touch(sequence)
        self._append(sequence, rows)
        return Answer(CountReply(id=0, count=sequence.rows.size))

    def close_sequence(self, session: Session, request: CloseSequence, frames: Frames) -> Answer:
        """End sequences; every number must be this session's."""
        need_frames(frames, 0)
        for sequence in [self.get(session, number) for number in dict.fromkeys(request.sequences)]:
            self._end(sequence)
        return Answer(OkReply(id=0))

    def get(self, session: Session, number: int) -> OpenedSequence:
        """A sequence of this session, or RequestError `not_yours`."""
        sequence = self.open.get(number, session.id)
        if sequence is None:
            raise RequestError(ErrorCode.NOT_YOURS, f"sequence {number} is not this session's, or has ended")
        return sequence

    def touch(self, sequence: OpenedSequence) -> None:
        """Something was asked of it: it goes on for its time to live."""
        sequence.expires_ns = self._clock.now_ns() + sequence.ttl_ns

    def begin_call(self, sequence: OpenedSequence) -> None:
        """A request works with it: it does not end before `end_call`, and its blocks count as used."""
        sequence.calls += 1
        self.touch(sequence)
        if self._clock.now_ns() - sequence.used_ns >= USE_NS:
            self._use(sequence, sequence.rows)

    def end_call(self, sequence: OpenedSequence) -> None:
        """Undo `begin_call`."""
        sequence.calls -= 1
        self.touch(sequence)
        if sequence.closed and not sequence.calls:
            self._release(sequence)

    def keep(self, sequence: OpenedSequence, numbers: Numbers) -> None:
        """Hold copies that these blocks have now and that are not held, as far as the share of the tier allows."""
        missing = numbers[sequence.place[numbers] == Place.NOWHERE]
        if not missing.size:
            return
        found = places_of(self._copies, sequence.rows[missing])
        for place in (Place.GPU, Place.HOST):
            size = sequence.entry.geometry.slot_bytes
            room = (self._budget[place] - self.held_bytes[place]) // size
            leased = self._copies.host.leased if place == Place.HOST else None
            if leased is not None:
                room = min(room, leased.room(self._copies.host_class(sequence.entry)))
            mine = missing[found == place][: max(0, room)]
            if mine.size:
                slots, addresses = hold(self._copies, sequence.entry, place, sequence.rows[mine])
                sequence.place[mine], sequence.slots[mine], sequence.addresses[mine] = place, slots, addresses
                self.held_bytes[place] += mine.size * size
                if leased is not None:
                    leased.begin(self._copies.host_class(sequence.entry), slots)

    def expire(self, now_ns: int) -> None:
        """End sequences of which nothing was asked for their time to live."""
        for sequence in self.open.expired(now_ns):
            if sequence.expires_ns > now_ns or sequence.calls:
                # It was used since the register noted its end: note the new one.
                self.open.remove(sequence)
                sequence.expires_ns = max(sequence.expires_ns, now_ns + sequence.ttl_ns)
                self.open.add(sequence)
                continue
            self._copies.counters["expired_sequences"] += 1
            self._end(sequence)

    def session_ended(self, session: Session) -> None:
        """End what a client left behind."""
        for sequence in self.open.of_session(session.id):
            self._end(sequence)

    def stats(self) -> dict[str, int]:
        """Gauges by name."""
        return {
            "sequences": len(self.open.items),
            "sequence_blocks": sum(sequence.rows.size for sequence in self.open.items.values()),
            "sequence_host_kept_bytes": self.held_bytes[Place.HOST],
            "sequence_gpu_kept_bytes": self.held_bytes[Place.GPU],
        }

    def _found(self, entry: NamespaceEntry, keys: Keys, before: int) -> Rows:
        rows = self._copies.blocks.find_prefix(keys, entry.number)
        if rows.size < len(keys):
            missing = keys[rows.size].tobytes().hex()[:16]
            raise RequestError(
                ErrorCode.NOT_PRESENT,
                f"block {before + rows.size} ({missing}) is not present in this namespace, or not whole; "
                f"{rows.size} of {len(keys)} keys lead to blocks",
            )
        if np.unique(rows).size < rows.size:
            raise RequestError(ErrorCode.BAD_ARGUMENT, "a key is named twice; a sequence has every key once")
        return rows

    def _check_metadata(self, session: int, entry: NamespaceEntry, blocks: int) -> None:
        more = blocks * _metadata_bytes(entry)
        mine, total = self._metadata[session] + more, self._metadata.total() + more
        if total > METADATA_MAX_BYTES or mine > METADATA_MAX_BYTES // SESSION_SHARE:
            message = f"{blocks} more blocks in sequences of this session are over its limit; close some"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=100)

    def _append(self, sequence: OpenedSequence, rows: Rows) -> None:
        self._metadata[sequence.session] += rows.size * _metadata_bytes(sequence.entry)
        self._copies.blocks.begin_move(rows)
        self._copies.blocks.link(np.concatenate([sequence.rows[-1:], rows]))
        count, layers = rows.size, sequence.entry.geometry.layers
        numbers = np.arange(sequence.rows.size, sequence.rows.size + count)
        sequence.rows = np.concatenate([sequence.rows, rows])
        sequence.place = np.concatenate([sequence.place, np.full(count, Place.NOWHERE, np.uint8)])
        sequence.slots = np.concatenate([sequence.slots, np.full(count, NO_SLOT, np.int32)])
        sequence.addresses = np.concatenate([sequence.addresses, np.zeros(count, np.uint64)])
        sequence.sums = np.concatenate([sequence.sums, np.zeros((count, layers), np.uint64)])
        sequence.known = np.concatenate([sequence.known, np.zeros(count, np.bool_)])
        self._use(sequence, rows)
        self.keep(sequence, numbers)

    def _use(self, sequence: OpenedSequence, rows: Rows) -> None:
        if not rows.size:
            return
        copies, entry = self._copies, sequence.entry
        sequence.used_ns = self._clock.now_ns()
        self._demand.read(rows, entry.geometry.slot_bytes, copies.blocks.residency(rows))
        for tier, column in ((copies.host, copies.blocks.table.host_slot), (copies.gpu, copies.blocks.table.gpu_slot)):
            slots = column[rows]
            if tier is not None and (slots := slots[slots >= 0]).size:
                tier.touch(copies.host_class(entry) if tier is copies.host else copies.gpu_class(entry), slots)

    def _end(self, sequence: OpenedSequence) -> None:
        self.open.remove(sequence)
        sequence.closed = True
        self.on_close(sequence)
        if not sequence.calls:
            self._release(sequence)

    def _release(self, sequence: OpenedSequence) -> None:
        self._metadata[sequence.session] -= sequence.rows.size * _metadata_bytes(sequence.entry)
        if not self._metadata[sequence.session]:
            del self._metadata[sequence.session]
        for place in (Place.GPU, Place.HOST):
            slots = sequence.slots[sequence.place == place]
            self.held_bytes[place] -= slots.size * sequence.entry.geometry.slot_bytes
            if place == Place.HOST and self._copies.host.leased is not None:
                self._copies.host.leased.end(self._copies.host_class(sequence.entry), slots)
            unhold(self._copies, sequence.entry, place, slots)
        self._copies.blocks.end_move(sequence.rows)


def _metadata_bytes(entry: NamespaceEntry) -> int:
    """What a sequence remembers of one block."""
    return 8 * entry.geometry.layers + 24


def hold(copies: Copies, entry: NamespaceEntry, place: Place, rows: Rows) -> tuple[Slots, Addresses]:
    """Hold the slots of blocks in gpu or host, one hold each: slots and addresses."""
    if place == Place.GPU:
        assert copies.gpu is not None
        slots = copies.blocks.table.gpu_slot[rows]
        copies.gpu.pool.hold(slots)
        return slots, gpu_addresses(copies.gpu, copies.gpu_class(entry), slots)
    slots = copies.blocks.table.host_slot[rows]
    copies.host.pool.hold(slots)
    return slots, host_addresses(copies.host, copies.host_class(entry), slots)


def unhold(copies: Copies, entry: NamespaceEntry, place: Place, slots: Slots) -> None:
    """Undo `hold`."""
    if not slots.size:
        return
    if place == Place.GPU:
        assert copies.gpu is not None
        copies.gpu.release(copies.gpu_class(entry), slots)
    else:
        copies.host.release(copies.host_class(entry), slots)


def _check_computable(entry: NamespaceEntry) -> None:
    shape = entry.geometry
    if shape.layout not in LAYOUTS or shape.dtype not in DTYPE_CODES:
        raise RequestError(
            ErrorCode.BAD_ARGUMENT,
            f"blocks of layout {shape.layout!r} and dtype {shape.dtype!r} are stored and not computed on",
        )


def _empty(number: int, session: int, entry: NamespaceEntry, ttl_ns: int) -> OpenedSequence:
    return OpenedSequence(
        id=number,
        session=session,
        entry=entry,
        ttl_ns=ttl_ns,
        expires_ns=0,
        rows=np.empty(0, np.int32),
        place=np.empty(0, np.uint8),
        slots=np.empty(0, np.int32),
        addresses=np.empty(0, np.uint64),
        sums=np.empty((0, entry.geometry.layers), np.uint64),
        known=np.empty(0, np.bool_),
    )
