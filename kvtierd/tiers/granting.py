"""What a store gets: rows for the keys that are not there, slots for as many of them as can be, and a reservation."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.keys import Keys
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.policy.admission import leading
from kvtierd.protocol.messages import SLOT_BUSY, SLOT_DTYPE, SLOT_EXISTS, SLOT_GRANTED
from kvtierd.protocol.service import Session
from kvtierd.tiers.blocks import WRITING, Rows
from kvtierd.tiers.host_tier import empty_descriptors
from kvtierd.tiers.lease_quota import LeaseQuota
from kvtierd.tiers.leases import Register, Reservation
from kvtierd.tiers.pressure import RETRY_MS
from kvtierd.tiers.quick import Quick, Reserved, Want
from kvtierd.tiers.room import Room
from kvtierd.tiers.steps.records import STATUS_AT
from kvtierd.tiers.usage import Store, Uses


@dataclasses.dataclass(slots=True, eq=False)
class Grant:
    """A reservation, or None where nothing was granted, and the descriptors ([n, 24], a SLOT_DTYPE each) of all blocks
    that were asked for.

    `busy` of them got nothing; `retry_after_ms` says when to ask for these again.
    """

    reservation: Reservation | None
    descriptors: npt.NDArray[np.uint8]
    busy: int
    retry_after_ms: int


class Granting:
    """Grants stores. Everything runs on the loop."""

    def __init__(self, room: Room, clock: Clock, uses: Uses, quick: Quick, max_reservations: int, ttl_ms: int) -> None:
        self._room = room
        self._copies = room.copies
        self._clock = clock
        self._uses = uses
        self._quick = quick
        self.ttl_ms = ttl_ms
        """How long a reservation lasts before it is quarantined."""
        self.reservations: Register[Reservation] = Register(max_reservations)
        self.closed = False
        """Whether stores are refused: the daemon stops, or was drained."""

    def grant(self, want: Want) -> Grant:
        """Reserve what can be reserved now. RequestError when stores are closed or too many reservations are open."""
        number = self._new_number(want.session)
        tail = None
        if (leased := self._copies.host.leased) is not None:
            want, tail = self._within(leased, want)
        got = self._quick.reserve(want)
        if got is None:
            got = self._reserve(want)
        self.drop_rows(got.refused)
        if tail is not None:
            got.descriptors = np.concatenate([got.descriptors, tail])
            got.busy += int(np.count_nonzero(tail[:, STATUS_AT] == SLOT_BUSY))
        if got.busy:
            self._copies.counters["busy_stores"] += got.busy
        retry_ms = self._room.pressure.retry_ms(want.cls, got.busy) if got.busy else 0
        return Grant(self._add(number, want, got) if got.slots.size else None, got.descriptors, got.busy, retry_ms)

    def drop_rows(self, rows: Rows) -> None:
        """Rows that were being written and never became blocks."""
        if rows.size:
            table = self._copies.blocks.table
            table.flags[rows] &= np.uint8(~WRITING & 0xFF)
            self._copies.blocks.drop(rows)

    def _within(self, leased: LeaseQuota, want: Want) -> tuple[Want, npt.NDArray[np.uint8] | None]:
        """The leading part of a store that its tenant's share of the tier allows, and descriptors ([n, 24]) of the
        rest: None where all of it may be."""
        room = leased.room(want.cls)
        if len(want.keys) <= room:
            return want, None
        absent = self._copies.blocks.pages.lookup(want.keys, want.entry.number) < 0
        count = leading(np.cumsum(absent) <= room)
        if count == absent.size:
            return want, None
        leased.refused[want.cls.tenant] += 1
        if not absent[:count].any():
            raise leased.refusal(want.cls.tenant)
        rest = empty_descriptors(absent.size - count)
        rest["status"] = np.where(absent[count:], SLOT_BUSY, SLOT_EXISTS)
        part = dataclasses.replace(want, keys=want.keys[:count])
        return part, rest.view(np.uint8).reshape(rest.size, SLOT_DTYPE.itemsize)

    def _new_number(self, session: Session) -> int:
        if self.closed:
            raise RequestError(
                ErrorCode.SHUTTING_DOWN, "the daemon takes no more stores: it is stopping, or was drained"
            )
        number = self.reservations.next_id(session.id, session.tenant)
        if number is None:
            message = f"too many reservations are open ({self.reservations.limits()})"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=RETRY_MS)
        return number

    def _reserve(self, want: Want) -> Reserved:
        """Step by step, what `Quick.reserve` does in one."""
        copies, keys, cls = self._copies, want.keys, want.cls
        copies.ensure_rows(len(keys))
        rows, position, chain = copies.blocks.add(keys, want.entry.number, WRITING)
        copies.blocks.link_behind(want.parent, want.entry.number, chain)
        returned = self._room.pressure.lately_evicted(cls, rows)
        slots = self._take_slots(Store(want.session, want.entry, keys, chain, position, want.parent), cls)
        self._room.pressure.count(cls, rows.size, returned)
        descriptors = empty_descriptors(len(keys))
        descriptors["status"] = SLOT_EXISTS
        descriptors["status"][chain < 0] = SLOT_BUSY  # the block table is full
        descriptors["status"][position[slots.size :]] = SLOT_BUSY
        granted = empty_descriptors(slots.size)
        copies.host.describe(cls, slots, granted)
        granted["status"] = SLOT_GRANTED
        mine = position[: slots.size]
        descriptors[mine] = granted
        return Reserved(
            rows[: slots.size], slots, mine, chain, copies.blocks.ids(chain),
            descriptors.view(np.uint8).reshape(len(keys), SLOT_DTYPE.itemsize), rows[slots.size :],
            int(np.count_nonzero(descriptors["status"] == SLOT_BUSY)),
        )  # fmt: skip

    def _take_slots(self, store: Store, cls: SlotClass) -> Slots:
        """Slots for the new blocks of a store, and word to the policies that all of its blocks were used.

        They are told now and not when the blocks are whole, so that the blocks before those that are being written are
        nobody's victims. Nor may they go to make this room: they are held meanwhile.
        """
        host = self._copies.host
        told = self._uses.old_slots(store)
        kept = told[told >= 0]
        host.pool.hold(kept)
        slots = self._room.take_host(cls, store.position.size)
        host.release(cls, kept)
        self._uses.stored(store, cls, told, slots)
        return slots

    def _add(self, number: int, want: Want, got: Reserved) -> Reservation:
        expires_ns = self._clock.now_ns() + self.ttl_ms * 1_000_000
        # Frames do not outlive the request.
        keys: Keys = want.keys[got.position]
        parent = None if want.parent is None else want.parent.copy()
        reservation = Reservation(
            number, want.session.id, want.entry, want.cls, keys, got.rows, got.slots, got.position, got.chain, got.ids,
            parent, expires_ns,
        )  # fmt: skip
        self.reservations.add(reservation)
        if self._copies.host.leased is not None:
            self._copies.host.leased.begin(want.cls, got.slots)
        self._copies.counters["reserved_blocks"] += got.slots.size
        return reservation
