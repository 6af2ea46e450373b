"""Reserve, Commit, Abort and Put: how blocks come in. A block is visible only when whole."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Settings
from kvtierd.core.checksum import Sums
from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.gpu.slot_pool import Slots
from kvtierd.protocol.messages import (
    SLOT_EXISTS,
    Abort,
    AnyReply,
    Commit,
    CommitReply,
    OkReply,
    Put,
    PutReply,
    Reserve,
    ReserveReply,
)
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.blocks import VISIBLE, WRITING, Rows
from kvtierd.tiers.demand import Demand
from kvtierd.tiers.granting import Granting
from kvtierd.tiers.leases import Reservation
from kvtierd.tiers.offload import Offload
from kvtierd.tiers.pressure import RETRY_MS
from kvtierd.tiers.quick import Quick, Want
from kvtierd.tiers.room import Room
from kvtierd.tiers.sessions import keys_of, namespace_of, need_arena, need_frames, parent_of, sums_of
from kvtierd.tiers.steps.records import STATUS_AT
from kvtierd.tiers.usage import Uses
from kvtierd.tiers.verify import check_totals, fill, places_of, whole_blocks
from kvtierd.tiers.workers import Workers

Frames = Sequence[memoryview]


def _refused(reply: AnyReply) -> bool:
    return isinstance(reply, ReserveReply) and not reply.granted and reply.retry_after_ms > 0


class Writes:
    """Serves stores."""

    def __init__(
        self,
        settings: Settings,
        room: Room,
        workers: Workers,
        clock: Clock,
        *,
        demand: Demand,
        offload: Offload | None,
        uses: Uses,
        quick: Quick,
    ) -> None:
        self._quick = quick
        self._demand = demand
        self._offload = offload
        self._copies = room.copies
        self._room = room
        self._workers = workers
        self._clock = clock
        limits = settings.leases
        self._granting = Granting(room, clock, uses, quick, limits.max_leases, limits.reservation_ttl_ms)
        self.reservations = self._granting.reservations

    def apply(self, settings: Settings) -> None:
        """Take over what may change while the daemon runs."""
        self._granting.ttl_ms = settings.leases.reservation_ttl_ms

    def take_stores(self, *, yes: bool) -> None:
        """Take stores, or answer each with `shutting_down`."""
        self._granting.closed = not yes

    def reserve(self, session: Session, request: Reserve, frames: Frames) -> Answer | Awaitable[Answer]:
        """Grant host slots for the keys that are not there; just after a start it waits for the arena's memory."""
        need_arena(session)
        need_frames(frames, 1)
        entry = namespace_of(session, request.namespace)
        want = Want(session, entry, self._copies.host_class(entry), keys_of(frames[0]), parent_of(request.parent))
        answer = None if self._lacks_memory(want) else self._granted(want)
        # It may have found no slot and had a chunk of another class given to its own: then memory is on its way now.
        if answer is None or (_refused(answer.reply) and self._lacks_memory(want)):
            return self._reserve_later(want)
        return answer

    async def _reserve_later(self, want: Want) -> Answer:
        await self._memory_for(want)
        return self._granted(want)

    def _lacks_memory(self, want: Want) -> bool:
        return self._room.lacks_memory(want.cls, len(want.keys))

    async def _memory_for(self, want: Want) -> None:
        await self._room.memory_for(want.cls, len(want.keys))

    def _granted(self, want: Want) -> Answer:
        grant = self._granting.grant(want)
        reservation = grant.reservation
        if reservation is not None:
            self._copies.host.lent(reservation.slots, want.session, reservation.id)
        reply = ReserveReply(
            id=0,
            reservation=reservation.id if reservation else 0,
            granted=reservation.slots.size if reservation else 0,
            retry_after_ms=grant.retry_after_ms,
        )
        return Answer(reply, [grant.descriptors.tobytes()])

    def commit(self, session: Session, request: Commit, frames: Frames) -> Answer | Awaitable[Answer]:
        """Make reserved blocks visible; nothing changes when anything about the request is off."""
        need_frames(frames, 2)
        if request.verify:
            return self._commit_verified(session, request, frames)
        return self._finish(*self._checked(session, request, frames))

    def abort(self, session: Session, request: Abort, frames: Frames) -> Answer:
        """Give a reservation back."""
        need_frames(frames, 0)
        self._give_back(self._reservation(session, request.reservation))
        return Answer(OkReply(id=0))

    async def put(self, session: Session, request: Put, frames: Frames) -> Answer:
        """Store blocks that came in frames; all are checked before the first becomes visible."""
        if len(frames) < 2:
            message = f"{len(frames)} frames follow the header; keys and sums are wanted"
            raise RequestError(ErrorCode.BAD_FRAMES, message)
        entry = namespace_of(session, request.namespace)
        keys = keys_of(frames[0])
        need_frames(frames, 2 + len(keys))
        totals = sums_of(frames[1], len(keys), 1, "block sums")[:, 0]
        payloads = frames[2:]
        for i, payload in enumerate(payloads):
            if payload.nbytes != entry.geometry.block_bytes:
                wanted = entry.geometry.block_bytes
                message = f"block {i} has {payload.nbytes} bytes; this namespace's blocks have {wanted}"
                raise RequestError(ErrorCode.GEOMETRY_MISMATCH, message)
        want = Want(session, entry, self._copies.host_class(entry), keys, parent_of(request.parent))
        await self._memory_for(want)
        grant = self._granting.grant(want)
        if grant.reservation is None:  # as in `reserve`
            await self._memory_for(want)
            grant = self._granting.grant(want)
        existed = int((grant.descriptors[:, STATUS_AT] == SLOT_EXISTS).sum())
        reservation, refused, retry = grant.reservation, grant.busy, grant.retry_after_ms
        if reservation is None:
            return Answer(PutReply(id=0, stored=0, existed=existed, refused=refused, retry_after_ms=retry))
        reservation.busy = True
        try:
            sums = await self._workers.run(lambda: fill(self._copies.host, reservation, payloads, totals))
        except BaseException:
            self._give_back(reservation)
            raise
        reservation.busy = False
        positions = reservation.position
        answer = self._finish(reservation, np.arange(positions.size), sums, totals[positions])
        assert isinstance(answer.reply, CommitReply)
        stored = answer.reply.committed
        return Answer(
            PutReply(id=0, stored=stored, existed=existed + answer.reply.existed, refused=refused, retry_after_ms=retry)
        )

    def expire(self, now_ns: int) -> None:
        """Quarantine reservations whose time is up: their keys become free, their slots do not."""
        for reservation in self.reservations.expired(now_ns):
            if not reservation.quarantined:
                self._quarantine(reservation)

    def session_detached(self, session: Session) -> int:
        """The client is gone or silent, its process may not be: quarantine what it might still write; how many."""
        mine = self.reservations.of_session(session.id) if session.attached else []
        for reservation in mine:
            if not reservation.quarantined:
                self._quarantine(reservation)
        return len(mine)

    def process_gone(self, session: Session) -> None:
        """Nobody can write any more: give everything back."""
        for reservation in self.reservations.of_session(session.id):
            reservation.abandoned = True
            if not reservation.busy:
                self._give_back(reservation)

    def _checked(
        self, session: Session, request: Commit, frames: Frames
    ) -> tuple[Reservation, npt.NDArray[np.intp], Sums, Sums]:
        """What a Commit names: (reservation, places in it, layer sums, block sums). RequestError when it is off."""
        reservation = self._reservation(session, request.reservation)
        which = places_of(reservation, request.index)
        sums = sums_of(frames[0], which.size, reservation.entry.geometry.layers, "layer sums")
        totals = sums_of(frames[1], which.size, 1, "block sums")[:, 0]
        check_totals(which, sums, totals)
        return reservation, which, sums, totals

    async def _commit_verified(self, session: Session, request: Commit, frames: Frames) -> Answer:
        # Looked up here and not in `commit`: another request could end the reservation before this task begins.
        reservation, which, sums, totals = self._checked(session, request, frames)
        reservation.busy = True
        try:
            host, cls, slots = self._copies.host, reservation.cls, reservation.slots[which]
            good = await self._workers.run(lambda: whole_blocks(host, cls, slots, sums, reservation.entry.geometry))
            if good < slots.size:
                raise RequestError(
                    ErrorCode.CHECKSUM_MISMATCH,
                    f"block {int(reservation.position[which[good]])}: its bytes do not match its layer sums",
                )
            return self._finish(reservation, which, sums, totals)
        finally:
            reservation.busy = False
            # The owner's process ended meanwhile: whatever became of the Commit, nobody comes for what is left.
            if reservation.abandoned and reservation.id in self.reservations.items:
                self._give_back(reservation)

    def _finish(self, reservation: Reservation, which: npt.NDArray[np.intp], sums: Sums, totals: Sums) -> Answer:
        """Blocks become visible; the rest of the reservation stays."""
        copies, entry = self._copies, reservation.entry
        rows, slots = reservation.rows, reservation.slots
        if which.size < rows.size:
            rows, slots = rows[which], slots[which]
        if reservation.quarantined or not self._quick.commit(reservation.cls, rows, slots, sums, totals):
            rows = self._finish_slowly(reservation, which, rows, slots, sums, totals)
        self._shrink(reservation, which)
        self._no_longer_held(reservation, slots)
        if rows.size:
            self._offload_stored(reservation, rows)
            copies.counters["committed_blocks"] += rows.size
            copies.counters["committed_bytes"] += rows.size * entry.geometry.block_bytes
            if (sink := copies.listener(entry.tenant)) is not None:
                keys = [key.tobytes() for key in copies.blocks.table.key[rows]]
                sink.stored(keys, None, entry.geometry.block_size, "host")
        return Answer(CommitReply(id=0, committed=rows.size, existed=which.size - rows.size))

    def _finish_slowly(
        self,
        reservation: Reservation,
        which: npt.NDArray[np.intp],
        rows: Rows,
        slots: Slots,
        sums: Sums,
        totals: Sums,
    ) -> Rows:
        """Step by step, what `Quick.commit` does in one; also where others may have stored the blocks meanwhile."""
        copies, cls, table = self._copies, reservation.cls, self._copies.blocks.table
        keep = np.ones(which.size, np.bool_)
        if reservation.quarantined:
            keep = copies.blocks.pages.lookup(reservation.keys[which], reservation.entry.number) < 0
            if keep.any():
                copies.blocks.show(rows[keep])
        fresh = rows[keep]
        copies.host.set_sums(cls, slots[keep], sums[keep])
        table.block_sum[fresh] = totals[keep]
        table.flags[fresh] = (table.flags[fresh] | VISIBLE) & np.uint8(~WRITING & 0xFF)
        copies.add_host(cls, fresh, slots[keep])
        if fresh.size:
            self._demand.stored(fresh, reservation.entry.geometry.slot_bytes)
        self._granting.drop_rows(rows[~keep])
        copies.host.release(cls, slots)
        return fresh

    def _offload_stored(self, reservation: Reservation, fresh: Rows) -> None:
        if self._offload is None:
            return
        blocks, entry, chain = self._copies.blocks, reservation.entry, reservation.chain
        # A row may have been given to another block since the reservation.
        same = (chain >= 0) & (blocks.ids(chain) == reservation.chain_ids)
        same &= blocks.table.namespace[chain] == entry.number
        open_end = reservation.parent is not None and self._offload.follows_a_hole(
            blocks.row_of(reservation.parent, entry.number)
        )
        chain = np.where(same, chain, np.int32(-1))
        self._offload.stored(entry, reservation.cls, chain, fresh, open_end=open_end)

    def _shrink(self, reservation: Reservation, which: npt.NDArray[np.intp]) -> None:
        if which.size == reservation.rows.size:
            self.reservations.remove(reservation)
            return
        rest = np.ones(reservation.rows.size, np.bool_)
        rest[which] = False
        for name in ("rows", "slots", "position", "keys"):
            setattr(reservation, name, getattr(reservation, name)[rest])

    def _give_back(self, reservation: Reservation) -> None:
        self.reservations.remove(reservation)
        self._copies.counters["aborted_blocks"] += reservation.rows.size
        self._granting.drop_rows(reservation.rows)
        self._no_longer_held(reservation, reservation.slots)
        self._copies.host.release(reservation.cls, reservation.slots)

    def _no_longer_held(self, reservation: Reservation, slots: Slots) -> None:
        if self._copies.host.leased is not None:
            self._copies.host.leased.end(reservation.cls, slots)

    def _quarantine(self, reservation: Reservation) -> None:
        reservation.quarantined = True
        self._copies.counters["quarantined_blocks"] += reservation.rows.size
        self._copies.blocks.hide(reservation.rows)
        # Whatever becomes of them: nothing that may go should wait for it.
        self._copies.host.policy.removed(reservation.cls.id, reservation.slots)

    def _reservation(self, session: Session, number: int) -> Reservation:
        reservation = self.reservations.get(number, session.id)
        if reservation is None:
            raise RequestError(ErrorCode.NOT_YOURS, f"reservation {number} is not this session's, or has ended")
        if reservation.busy:
            raise RequestError(ErrorCode.BUSY, f"reservation {number} is being committed", retry_after_ms=RETRY_MS)
        return reservation
