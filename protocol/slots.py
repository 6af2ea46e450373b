"""Plans on slots of the shared arena: attach, reserve, commit, acquire, release, copy (protocol/SPEC.md §8)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import numpy as np

from kvtierd.core.checksum import Bytes, Sums, block_sums
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.protocol.arena import Arena, ArenaError, MappedChunk
from kvtierd.protocol.asking import Ask, Asking, Begin, Begun, Connect, Finish, Plan, Work, as_frame, raw
from kvtierd.protocol.copying import Copier
from kvtierd.protocol.grants import (
    Build,
    Granted,
    Leased,
    Slots,
    ascends,
    descriptors,
    granted_views,
    leading,
    sizes_of,
    spans_of,
    sums_of,
)
from kvtierd.protocol.messages import (
    SLOT_BUSY,
    SLOT_DTYPE,
    SLOT_GRANTED,
    AcquireReply,
    Commit,
    CommitReply,
    Release,
    ReserveReply,
)
from kvtierd.protocol.pending import Received
from kvtierd.protocol.results import NamespaceHandle


class SlotPlans:
    """Plans over the arena of one client's session."""

    def __init__(self, asking: Asking, copier: Copier, *, use_arena: bool) -> None:
        self._asking = asking
        self._connection = asking.connection
        self._counters = asking.counters
        self._copier = copier
        self._use_arena = use_arena
        self._arena: Arena | None = None
        self._arena_session_no = 0
        self._lock = threading.Lock()
        self.refusal = ""
        """Why there is no arena, where the daemon or the kernel said so."""

    def _attached(self, deadline_ns: int) -> Plan[bool]:
        """Have the arena of this session, attached with its first use."""
        connection = self._connection
        if not self._use_arena or not connection.arena_path:
            return False
        if self._arena_session_no != connection.session_no:
            yield Work(functools.partial(self._attach, connection.session_no, deadline_ns))
        return self._arena is not None

    def _attach(self, session_no: int, deadline_ns: int) -> None:
        with self._lock:  # two threads may want it at the same time; a session attaches once
            if self._arena_session_no == session_no:
                return
            self.close()
            try:
                self._arena = arena = Arena.attach(self._connection.arena_path, self._connection.token, deadline_ns)
                with self._connection.lock:
                    self._connection.lifeline.hold(arena.socket, arena.let_go)
                self._counters["arena_attached"] += 1
            except ArenaError as error:
                self._counters["arena_refused"] += 1
                self.refusal = str(error)
            self._arena_session_no = session_no

    def has_arena(self, deadline_ns: int) -> Plan[bool]:
        """Whether blocks of this session go through the arena; False too where the daemon is away."""
        if (yield from self._asking.ready([], deadline_ns)) is None:
            return False
        return (yield from self._attached(deadline_ns))

    def _views(
        self, slots: Slots, nbytes: Sequence[int], deadline_ns: int
    ) -> Plan[tuple[list[Bytes], list[MappedChunk]]]:
        """Map what the descriptors name. Raises ArenaError."""
        arena = self._arena
        if arena is None:
            raise ArenaError("the arena was detached meanwhile")
        views, chunks = [], []
        for number, offset, size in zip(slots["chunk"].tolist(), slots["offset"].tolist(), nbytes, strict=True):
            chunk = arena.chunk(number)
            if chunk is None:
                chunk = yield Work(functools.partial(arena.map, number, deadline_ns))
            chunks.append(chunk)
            views.append(chunk.view(offset, size))
        return views, chunks

    def close(self) -> None:
        """Let go of an earlier session's arena."""
        if self._arena is not None:
            with self._connection.lock:
                self._connection.lifeline.drop()
            self._arena.close()
            self._arena = None

    def abandon(self) -> None:
        """In a forked child."""
        self._lock = threading.Lock()
        self._arena_session_no = 0
        if self._arena is not None:
            self._arena.abandon()
            self._arena = None

    def begin(self, handle: NamespaceHandle, build: Build, keys: Keys, deadline_ns: int) -> Plan[Begun | None]:
        """Ask what `reserve` or `acquire` with the same `build` will wait for."""
        frames = (as_frame(keys),)
        return (yield from self._asking.begin([handle], build, frames, deadline_ns, prepare=self._attached))

    def drop(self, begun: Begun) -> Plan[None]:
        """Give back what was begun and will not be taken."""
        yield from self._asking.drop(begun)

    def let_go(self, begun: Begun) -> None:
        """As `drop`, without waiting."""
        self._asking.let_go(begun)

    def _asked(
        self, handle: NamespaceHandle, build: Build, data: memoryview, deadline_ns: int, begun: Begun | None
    ) -> Plan[Received | None]:
        """The reply to what was begun; where that reached no session, or nothing was begun, to the same asked now."""
        if begun is not None:
            received: Received | None = (yield Finish(begun))[0]
            if not self._asking.undelivered(received, deadline_ns):
                return received
        return (yield from self._asking.request([handle], build, (data,), deadline_ns, prepare=self._attached))

    def reserve(
        self, handle: NamespaceHandle, keys: Keys, build: Build, deadline_ns: int, begun: Begun | None = None
    ) -> Plan[Granted]:
        """Slots to write into; without arena or daemon every block is refused. `begun` is what `begin` gave."""
        data = as_frame(keys)
        count = data.nbytes // KEY_BYTES
        nothing = Granted(0, 0, np.full(count, SLOT_BUSY, np.uint8), [None] * count)
        received = yield from self._asked(handle, build, data, deadline_ns, begun)
        reply = self._asking.accept(received, ReserveReply)
        if reply is None or received is None:
            self._counters["stores_dropped_unavailable"] += count
            return nothing
        session_no = received[2]
        slots = descriptors(received[1], count)
        status = slots["status"].copy()
        granted = np.flatnonzero(status == SLOT_GRANTED)
        try:
            sizes = sizes_of(None, handle.geometry, granted.size)
            views, _ = yield from self._views(slots[granted], sizes, deadline_ns)
        except ArenaError:
            self._counters["arena_errors"] += 1
            self.abort(reply.reservation, session_no)
            return nothing
        placed: list[Bytes | None] = [None] * count
        for i, view in zip(granted.tolist(), views, strict=True):
            placed[i] = view
        return Granted(reply.reservation, session_no, status, placed)

    def commit(
        self,
        grant: Granted,
        handle: NamespaceHandle,
        index: Sequence[int] | None,
        sums: Sums | None,
        *,
        verify: bool,
        wait: bool,
        deadline_ns: int,
    ) -> Plan[CommitReply]:
        """Make written blocks visible; none are where the session or the daemon is gone.

        Without `wait` the reply says how many blocks were handed to the daemon, which serves requests in their order.

        Raises ValueError for a block that was not granted, or sums of another shape.
        """
        if index is None:
            index = [i for i, view in enumerate(grant.views) if view is not None]
        views = granted_views(grant, index)
        wanted = (len(index), handle.geometry.layers)
        if sums is None:
            sums = yield Work(lambda: self._copier.sum_slots(views, handle.geometry))
        elif sums.shape != wanted:
            raise ValueError(f"sums have shape {sums.shape}; {wanted} is wanted")
        sums = np.ascontiguousarray(sums, "<u8")
        reply = yield from self._commit(grant, index, sums, verify=verify, wait=wait, deadline_ns=deadline_ns)
        self._committed(grant, index, reply)
        return reply

    def begin_commit(self, grant: Granted, index: Sequence[int], sums: Sums, deadline_ns: int) -> Plan[Begun | None]:
        """As `commit` of blocks whose layer sums are `sums`, without waiting: `finish_commit` must follow.

        None where the daemon is away, or nothing is to be committed.
        """
        if not index or not grant.number or (not self._connection.up and not (yield Connect(deadline_ns))):
            return None
        request, frames = _commit_of(grant, index, np.ascontiguousarray(sums, "<u8"), verify=False)
        begun: Begun = yield Begin(Ask([(request, frames)], grant.session_no, deadline_ns))
        return begun

    def finish_commit(self, begun: Begun | None, grant: Granted, index: Sequence[int]) -> Plan[CommitReply]:
        """Wait for what `begin_commit` has sent."""
        reply = None
        if begun is not None:
            received = yield Finish(begun)
            reply = self._asking.accept(received[0], CommitReply)
        reply = reply or CommitReply(id=0, committed=0)
        self._committed(grant, index, reply)
        return reply

    def _committed(self, grant: Granted, index: Sequence[int], reply: CommitReply) -> None:
        if reply.committed + reply.existed == len(index):
            for i in index:
                grant.views[i] = None
        else:
            self._counters["stores_dropped_unavailable"] += len(index)

    def _commit(
        self, grant: Granted, index: Sequence[int], sums: Sums, *, verify: bool, wait: bool, deadline_ns: int
    ) -> Plan[CommitReply]:
        nothing = CommitReply(id=0, committed=0)
        if not index or not grant.number:
            return nothing
        if not self._connection.up and not (yield Connect(deadline_ns)):
            return nothing
        request, frames = _commit_of(grant, index, sums, verify=verify)
        if not wait:
            with self._connection.lock:
                mine = grant.session_no == self._connection.session_no
                sent = mine and self._connection.hand_over(request, frames, len(index))
            return CommitReply(id=0, committed=len(index)) if sent else nothing
        received = yield Ask([(request, frames)], grant.session_no, deadline_ns)
        return self._asking.accept(received[0], CommitReply) or nothing

    def give_back(self, grant: Granted) -> None:
        """Abort what is left of a reservation, once."""
        if any(view is not None for view in grant.views):
            self.abort(grant.number, grant.session_no)
        grant.number = 0
        grant.views[:] = [None] * len(grant.views)

    def abort(self, number: int, session_no: int) -> None:
        """Give a reservation back; where the daemon is away, as soon as the session goes on."""
        # Plans call this between their steps, where nobody holds the lock for them.
        with self._connection.lock:
            if number:
                self._connection.give_up(session_no, number)

    def acquire(
        self, handle: NamespaceHandle, keys: Keys, build: Build, deadline_ns: int, begun: Begun | None = None
    ) -> Plan[Leased]:
        """A lease on the leading run; empty without arena or daemon. `begun` is what `begin` gave."""
        received = yield from self._asked(handle, build, as_frame(keys), deadline_ns, begun)
        reply = self._asking.accept(received, AcquireReply)
        if reply is None or received is None:
            self._counters["lookups_missed_unavailable"] += 1
            return self._no_lease(handle)
        if not reply.count:
            return self._no_lease(handle)
        session_no, layers = received[2], handle.geometry.layers
        slots = descriptors(received[1], reply.count)
        sums, spans = sums_of(received[1], 1, reply.count, layers), spans_of(received[1], reply.count)
        try:
            views, chunks = yield from self._views(slots, sizes_of(spans, handle.geometry, reply.count), deadline_ns)
        except ArenaError:
            self._counters["arena_errors"] += 1
            self.release(reply.lease, session_no)
            return self._no_lease(handle)
        for view in views:
            view.flags.writeable = False
        codecs = np.frombuffer(reply.codecs, np.uint8)
        return Leased(reply.lease, session_no, reply.count, slots, views, chunks, sums, spans, codecs)

    def _no_lease(self, handle: NamespaceHandle) -> Leased:
        sums = np.empty((0, handle.geometry.layers), np.uint64)
        return Leased(0, 0, 0, np.empty(0, SLOT_DTYPE), [], [], sums)

    def end(self, leased: Leased) -> None:
        """Release a lease, once."""
        self.release(leased.number, leased.session_no)
        leased.number = 0

    def release(self, number: int, session_no: int) -> None:
        """End a lease without waiting; one that the daemon never hears of expires."""
        with self._connection.lock:
            if number and session_no == self._connection.session_no:
                self._connection.post(Release(id=0, leases=[number], quiet=True))

    def copy_out(self, lease: Leased, out: Bytes, handle: NamespaceHandle, *, verify: bool) -> Plan[int]:
        """Copy a lease's blocks; how many leading ones are good."""
        geometry = handle.geometry
        if not verify:
            yield Work(lambda: self._copier.copy_out(lease.views, out, geometry))
            return lease.unchanged()
        sums = yield Work(lambda: self._copier.copy_out_and_sum(lease.views, out, geometry))
        good = min(lease.unchanged(), leading(sums, lease.sums))
        self._counters["blocks_mismatched"] += lease.count - good
        return good


def _commit_of(
    grant: Granted, index: Sequence[int], sums: Sums, *, verify: bool
) -> tuple[Commit, tuple[memoryview, memoryview]]:
    """The request and its frames."""
    # All that is left needs no list: the daemon then has nothing to look up block by block.
    whole = len(index) == sum(view is not None for view in grant.views)
    request = Commit(
        id=0, reservation=grant.number, index=None if whole and ascends(index) else list(index), verify=verify
    )
    return request, (raw(sums), raw(block_sums(sums)))
