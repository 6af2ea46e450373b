"""The common cases of Lookup, Acquire, Reserve and Commit, each one call of compiled code (kvtierd.tiers.steps).

Whatever is not common is left to `reads.py` and `granting.py`, which can do everything: LRU, prefixes tracked by the
front, blocks in extents of other sizes, in FP8 or in gpu, or not verified yet after a restart, namespaces with a time
to live, a class that thrashes, the first slabs. `None` as an answer says so, and nothing was done then. Both ways have
the same effects; tests/property/tiers/test_quick_ways.py holds them to it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums
from kvtierd.core.clock import Clock
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index.board import Board
from kvtierd.index.long_lookups import LONG_KEYS
from kvtierd.policy.ages import ticks
from kvtierd.policy.history import STORY_WORDS
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import Usage
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST
from kvtierd.protocol.service import Session
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import EventSink
from kvtierd.tiers.demand import SECOND_NS, Demand
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.room import Room
from kvtierd.tiers.sessions import state_of
from kvtierd.tiers.steps import evicting, places, reading, storing
from kvtierd.tiers.steps.records import DESCRIPTOR_BYTES

_NO_KEYS = np.empty((0, KEY_BYTES), np.uint8)
_NO_BYTES = np.empty(0, np.uint8)


@dataclasses.dataclass(slots=True, eq=False)
class Want:
    """A request for the blocks `keys` ([n, 32], views of a frame) of a prefix, or of a part of one that comes after the
    block with the key `parent` ([1, 32]). `cls` is the class of their slots in host."""

    session: Session
    entry: NamespaceEntry
    cls: SlotClass
    keys: Keys
    parent: Keys | None


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """The leading run of a read, whose slots are held: rows, slots, descriptors and layer sums [n] of its blocks."""

    rows: Rows
    slots: Slots
    descriptors: npt.NDArray[np.uint8]
    sums: Sums
    usage: Usage
    not_on_nvme: bool
    more_behind: bool


@dataclasses.dataclass(slots=True, eq=False)
class Reserved:
    """What a store has got: rows, slots and positions of its new blocks, rows and ids of all, and descriptors of all.

    `refused` rows found no slot and are to be dropped; `busy` blocks got nothing. Descriptors are [n, 24] uint8.
    """

    rows: Rows
    slots: Slots
    position: npt.NDArray[np.intp]
    chain: Rows
    ids: npt.NDArray[np.uint64]
    descriptors: npt.NDArray[np.uint8]
    refused: Rows
    busy: int


class Quick:
    """The quick ways of one manager. Everything runs on the loop."""

    def __init__(self, room: Room, demand: Demand, clock: Clock) -> None:
        self._room = room
        self._copies = copies = room.copies
        self._demand = demand
        self._clock = clock
        self._blocks = copies.blocks
        self._host = copies.host
        self._board: Board | None = None
        self._classes: dict[int, tuple[Board, object]] = {}
        self._told = np.zeros(storing.TOLD_WORDS, np.int64)
        if isinstance(copies.host.policy, ReturnEviction):
            self._policy, self._model = copies.host.policy, copies.host.policy.model
            self._board = places.board_of(copies, demand, self._policy, self._model)

    def turn_off(self) -> None:
        """Leave everything to the other way from now on, which has the same effects."""
        self._board = None

    def tiers_changed(self) -> None:
        """A tier came: its ghosts are told too."""
        if self._board is not None:
            places.put_ghosts(self._board, self._demand)

    def lookup(self, entry: NamespaceEntry, keys: Keys) -> npt.NDArray[np.uint8] | None:
        """Residency masks of the leading run, [hit], where all blocks are exact."""
        if self._board is None or len(keys) >= LONG_KEYS or self._copies.shapes.forms.is_lossy(entry.number):
            return None
        if entry.number in self._blocks.limits:
            return None
        masks = np.empty(len(keys), np.uint8)
        return masks[: reading.lookup(self._board.words, keys, entry.number, masks)]

    def acquire(self, want: Want, window: int) -> Held | None:
        """Hold the leading run where all of it lies in host slots of its own, and tell policies that it is used.

        `window` is how many blocks are fetched ahead.
        """
        keys, cls = want.keys, want.cls
        if self._board is None or len(keys) >= LONG_KEYS or self._in_gpu() or not self._host.all_proven:
            return None
        if want.entry.number in self._blocks.limits:
            return None
        count, now_ns, was = len(keys), self._clock.now_ns(), self._model.now
        self._policy.take_back()
        self._model.now = now = ticks(now_ns)
        usage = _new_usage(count, now)
        rows, slots = np.empty(count, np.int32), np.empty(count, np.int32)
        descriptors, sums = np.empty((count, DESCRIPTOR_BYTES), np.uint8), np.empty((count, cls.layers), np.uint64)
        found = reading.acquire(
            self._board.words, self._class_board(cls), keys, _parent(want), want.entry.number, window, now,
            now_ns // SECOND_NS, self._demand.half_life_s, usage.kinds, usage.paces, usage.story, rows, slots,
            descriptors, sums, self._told,
        )  # fmt: skip
        if found < 0:
            self._model.now = was
            return None
        told = self._told.tolist()
        if found:
            usage.last_key = int(keys.view(np.uint64)[count - 1, 0])
            state_of(want.session).requests.add(usage, now_ns)
            self._host.in_use(cls)
            if used := told[reading.AHEAD_USED]:
                self._copies.counters["prefetch_used_blocks"] += used
            if late := told[reading.AHEAD_LATE]:
                self._copies.counters["prefetch_late_blocks"] += late
        else:
            self._model.now = was
        return Held(
            rows[:found], slots[:found], descriptors[:found], sums[:found], usage, told[reading.NOT_ON_NVME] > 0,
            told[reading.NEXT] > 0,
        )  # fmt: skip

    def reserve(self, want: Want) -> Reserved | None:
        """Rows and slots for the keys that are not there, with victims as needed; policies are told of all of them."""
        keys, cls = want.keys, want.cls
        if self._board is None or not self._ordinary(cls) or not self._room.pressure.is_calm(cls):
            return None
        count, now_ns, was = len(keys), self._clock.now_ns(), self._model.now
        self._policy.take_back()
        requests = state_of(want.session).requests
        number = requests.find(keys, now_ns)
        known = requests.usage(number) if number >= 0 else None
        usage, began = _usage_for(known, count, ticks(now_ns))
        observed = usage is not known
        rows, slots = np.empty(count, np.int32), np.empty(count, np.int32)
        position, chain = np.empty(count, np.int64), np.empty(count, np.int32)
        ids, descriptors = np.empty(count, np.uint64), np.empty((count, DESCRIPTOR_BYTES), np.uint8)
        listener = self._copies.listener(cls.tenant)
        keys_out = _NO_BYTES if listener is None else np.empty(count * KEY_BYTES, np.uint8)
        before = _parent(want)
        while True:
            granted = storing.reserve(
                self._board.words, self._class_board(cls), keys, before, want.entry.number, cls.free_count,
                self._host.spare_for(cls), observed, began, usage.story, usage.kinds, usage.paces, was,
                usage.at if observed else was, self._copies.absences.now_ms(), rows, slots, position, chain, ids,
                descriptors, keys_out, self._told,
            )  # fmt: skip
            if granted != storing.NEEDS_SLAB:
                break
            if not self._host.attach_spare(cls):
                return None
        if granted == storing.LEFT_ALONE:
            return None
        if observed:
            self._observed(want.session, usage, number, keys, now_ns)
        told = self._told.tolist()
        self._account(cls, told, granted, keys_out, listener)
        new, short = told[storing.NEW], told[storing.SHORT]
        if told[evicting.VICTIMS] or short:
            self._room.move_slab(cls)
        self._room.pressure.count(cls, new, told[storing.RETURNED])
        return Reserved(
            rows[:granted], slots[:granted], position[:granted], chain, ids, descriptors, rows[granted:new],
            short + told[storing.NO_ROW],
        )  # fmt: skip

    def commit(self, cls: SlotClass, rows: Rows, slots: Slots, sums: Sums, totals: Sums) -> bool:
        """Reserved blocks, whose sums are right, become visible, and their holds end; False leaves all as it is."""
        if self._board is None or not self._ordinary(cls):
            return False
        now_s = self._clock.now_ns() // SECOND_NS
        done = storing.commit(
            self._board.words, self._class_board(cls), rows, slots, sums, totals, now_s, self._demand.half_life_s
        )
        if done < 0:
            return False
        self._blocks.copies[TIER_HOST] += done
        self._host.in_use(cls)
        self._host.published(slots, rows)
        return True

    def _observed(self, session: Session, usage: Usage, number: int, keys: Keys, now_ns: int) -> None:
        usage.last_key = int(keys.view(np.uint64)[-1, 0]) if len(keys) else 0
        self._model.now = usage.at
        requests = state_of(session).requests
        if number < 0:
            requests.add(usage, now_ns)
        else:
            requests.extend(number, usage)

    def _account(
        self,
        cls: SlotClass,
        told: list[int],
        granted: int,
        keys_out: npt.NDArray[np.uint8],
        listener: EventSink | None,
    ) -> None:
        """Bring what is kept in Python in step with what a reserve did."""
        counters, victims = self._copies.counters, told[evicting.VICTIMS]
        cls.free_count += victims - granted
        self._blocks.table.backed()
        self._blocks.pages.backed()
        self._host.in_use(cls)
        if victims:
            self._blocks.copies[TIER_HOST] -= victims
            counters["host_evicted_blocks"] += victims
            counters["host_lost_blocks"] += told[evicting.LOST]
            counters["prefetch_wasted_blocks"] += told[evicting.WASTED]
            gone = told[evicting.FORGOTTEN]
            if gone and listener is not None:
                names = keys_out.tobytes()
                listener.removed([names[at : at + KEY_BYTES] for at in range(0, KEY_BYTES * gone, KEY_BYTES)], "host")

    def _in_gpu(self) -> bool:
        return self._blocks.copies[TIER_GPU] > 0

    def _ordinary(self, cls: SlotClass) -> bool:
        """Whether nothing needs to know of rows that come and go in this class but what is on the board."""
        return self._host.all_proven and not (
            self._in_gpu()
            or self._copies.shapes.known
            or self._copies.shapes.forms.touches(cls)
            or self._blocks.long.front.tracks
        )

    def _class_board(self, cls: SlotClass) -> npt.NDArray[np.int64]:
        board, kept = self._classes.get(cls.id, (None, None))
        evicted = self._room.pressure.evicted_keys(cls)
        if board is None:
            board = places.class_board(cls)
        if evicted is not None and kept is not evicted:
            cells, secret = evicted.columns
            board.put(places.EVICTED, cells)
            board.set(places.EVICTED_SECRET, secret)
        self._classes[cls.id] = (board, evicted)
        return board.words


def _parent(want: Want) -> Keys:
    return _NO_KEYS if want.parent is None else want.parent


def _new_usage(count: int, now: int) -> Usage:
    return Usage(np.empty(count, np.uint16), np.empty(count, np.uint8), 0, now, np.zeros(STORY_WORDS, np.int64))


def _usage_for(known: Usage | None, count: int, now: int) -> tuple[Usage, int]:
    """The usage of a store, and when the request that it belongs to was told of first (-1: it is told of now).

    `known` itself where that has all of its blocks, else one that is to be filled in.
    """
    if known is None:
        return _new_usage(count, now), -1
    if known.size >= count:
        return known, -1
    usage = _new_usage(count, now)
    usage.story = known.story.copy()
    return usage, known.at
