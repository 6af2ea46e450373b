"""Taking the snapshot of what changes too often to be written down at once, and beginning with that of the life before.

A round goes over the slots of host, a few slabs in a turn of the ticker, and is then written by a thread. What it says
of a slot is checked against the slot's generation when it is read, so it does not matter that the slots of one
snapshot were looked at in different turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvtierd import __version__
from kvtierd.core.checksum import Sums
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.protocol.messages import TIER_HOST
from kvtierd.tiers.blocks import RESIDENT, RETURNED, VISIBLE, Rows
from kvtierd.tiers.compress_forms import COMPRESSED, EXTENT
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.warm_extents import extents_of, recall_extents
from kvtierd.tiers.warm_host import WarmHostTier
from kvtierd.tiers.warm_snapshot import FORM, USE, Extent, Forms, Pins, Snapshot, SnapshotFile
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)

SLOTS_A_TURN = 4096
"""Slots looked at in a turn of the ticker: some hundred microseconds."""
EVERY_NS = 10_000_000_000
"""From the end of one round to the next one: what a kill -9 may lose of it."""
LEARNED_BYTES = 4 << 20
"""Most that is copied of what was learned in one turn of the loop, about a millisecond; at the daemon's end all is."""

Uses = npt.NDArray[np.void]


class Memory:
    """Of one host tier. Everything runs on the loop but the writing."""

    def __init__(self, copies: Copies, host: WarmHostTier, file: SnapshotFile, workers: Workers) -> None:
        self._copies = copies
        self._host = host
        self._file = file
        self._workers = workers
        self._round: Iterator[None] | None = None
        self._next_ns = 0
        self._uses: list[Uses] = []
        self._forms: list[Forms] = []
        self._extents: list[Extent] = []
        self._writing: asyncio.Task[None] | None = None

    # Taking it

    def step(self, now_ns: int, pins: Callable[[], list[Pins]]) -> None:
        """Go on with a round, or begin one where it is time; call it every so often."""
        if self._round is None:
            if now_ns < self._next_ns or (self._writing is not None and not self._writing.done()):
                return
            self._round = self._look()
        if next(self._round, self) is self:
            self._round, self._next_ns = None, now_ns + EVERY_NS
            self._writing = asyncio.create_task(self._write(self._taken(pins(), LEARNED_BYTES)), name="warm-snapshot")

    async def close(self, pins: list[Pins]) -> None:
        """Take the last one, of everything as it is now."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        self._uses, self._forms, self._extents = [], [], []
        for _ in self._look():
            pass
        await self._write(self._taken(pins, 1 << 62))
        self._file.close()

    async def _write(self, made: Callable[[], Snapshot]) -> None:
        try:
            await self._workers.run(lambda: self._file.write(made()))
        except OSError as error:
            _log.warning("host tier: heat and uses are not kept for the next life: %s", error.strerror or error)

    def _taken(self, pins: list[Pins], learned_bytes: int) -> Callable[[], Snapshot]:
        """What a round has found, put together by whoever calls this: a thread, since it can be long."""
        policy, uses, forms, extents = self._host.policy, self._uses, self._forms, self._extents
        learned = policy.model.learned(learned_bytes) if isinstance(policy, ReturnEviction) else {}
        self._uses, self._forms, self._extents = [], [], []
        return lambda: Snapshot(
            version=__version__,
            uses=b"".join(part.tobytes() for part in uses),
            forms=forms,
            extents=extents,
            pins=pins,
            learned=learned,
        )

    def _look(self) -> Iterator[None]:
        seen = 0
        for cls in list(self._host.pool.classes):
            for slab in list(cls.slabs):
                if slab not in cls.slabs:  # it was given away meanwhile
                    continue
                slots = self._host.pool.slots_of(slab)
                self._note(cls, slots[self._host.pool.row[slots] >= 0])
                seen += slots.size
                if seen >= SLOTS_A_TURN:
                    seen = 0
                    yield

    def _note(self, cls: SlotClass, slots: Slots) -> None:
        table, rows = self._copies.blocks.table, self._host.pool.row[slots]
        marks = table.marks[rows]
        whole = (marks & EXTENT) == 0
        whole &= (table.flags[rows] & (VISIBLE | TIER_HOST)) == (VISIBLE | TIER_HOST)
        if np.count_nonzero(whole):
            self._uses.append(self._uses_of(slots[whole], rows[whole]))
        if self._copies.shapes.extents:
            other = (marks & EXTENT != 0) & (marks & COMPRESSED == 0)
            mine = slots[other]
            self._extents += extents_of(self._copies, self._places(mine).tolist(), rows[other], mine, cls)
        forms = self._copies.shapes.forms
        if not forms.seen:
            return
        coded, decoded = (marks & COMPRESSED) != 0, whole & forms.in_tier(rows, TIER_HOST)
        if np.count_nonzero(coded):
            self._forms.append(self._forms_of(cls, slots[coded], forms.blocks_of(rows[coded]), decoded=False))
        if np.count_nonzero(decoded):
            self._forms.append(self._forms_of(cls, slots[decoded], rows[decoded], decoded=True))

    def _uses_of(self, slots: Slots, rows: Rows) -> Uses:
        table = self._copies.blocks.table
        found = np.zeros(rows.size, USE)
        found["place"], found["generation"] = self._places(slots), self._host.generation[slots]
        found["last_access_s"], found["heat"] = table.last_access_s[rows], table.heat[rows]
        found["marks"], found["parent"] = table.marks[rows] & RETURNED, -1
        if isinstance(self._host.policy, ReturnEviction):
            found["kind"], found["pace"], found["at"], parents = self._host.policy.remembered(slots)
            found["parent"][parents >= 0] = self._places(parents[parents >= 0])
        return found

    def _forms_of(self, cls: SlotClass, slots: Slots, blocks: Rows, *, decoded: bool) -> Forms:
        table = self._copies.blocks.table
        found = np.zeros(blocks.size, FORM)
        found["place"], found["generation"] = self._places(slots), self._host.generation[slots]
        found["key"], found["namespace"] = table.key[blocks], table.namespace[blocks]
        found["block_sum"], found["marks"] = table.block_sum[blocks], table.marks[blocks] & RETURNED
        found["last_access_s"], found["heat"] = table.last_access_s[blocks], table.heat[blocks]
        found["decoded_sum"] = self._copies.shapes.forms.host_sums(blocks)
        return Forms(decoded, cls.layers, found.tobytes(), self._host.sums_of(cls, slots).tobytes())

    def _places(self, slots: Slots) -> npt.NDArray[np.int64]:
        pool = self._host.pool
        return pool.slabs_of(slots).astype(np.int64) * self._host.table.stride + pool.indices(slots)

    # Beginning with it

    def slots_at(self, places: npt.NDArray[np.int64], generations: Sums) -> Slots:
        """The slots at these places, [n]; -1 where there is none, or it has changed hands since."""
        slabs, indices = np.divmod(places, self._host.table.stride)
        found = np.full(places.size, -1, np.int32)
        for slab in np.unique(slabs[(slabs >= 0) & (slabs < self._host.slabs_max)]).tolist():
            if self._host.has_class(slab):
                slots, mine = self._host.pool.slots_of(slab), slabs == slab
                mine &= indices < slots.size
                found[mine] = slots[indices[mine]]
        stale = (found < 0) | (self._host.generation[found] != generations)
        found[stale] = -1
        return found

    def recall_forms(self, snapshot: Snapshot) -> list[tuple[NamespaceEntry, SlotClass, Rows, Slots]]:
        """Blocks that lay in FP8 do so again, and decoded ones are known as such: namespace, class, rows and slots.

        After those that rows tell of have been entered. A form is verified against its layer sums when it is decoded,
        as any other; a decoded block before it is served, as any of the life before.
        """
        taken: list[tuple[NamespaceEntry, SlotClass, Rows, Slots]] = []
        for group in snapshot.forms:
            rows = np.frombuffer(group.rows, FORM)
            sums = np.frombuffer(group.sums, "<u8").reshape(rows.size, group.layers)
            slots = self.slots_at(rows["place"], rows["generation"])
            for cls in self._host.pool.classes:
                mine = (slots >= 0) & (self._host.pool.class_ids(np.maximum(slots, 0)) == cls.id)
                if cls.layers == group.layers and mine.any():
                    taken += self._enter_forms(cls, rows[mine], sums[mine], slots[mine], decoded=group.decoded)
        return taken

    def _enter_forms(
        self, cls: SlotClass, found: Uses, sums: Sums, slots: Slots, *, decoded: bool
    ) -> Iterator[tuple[NamespaceEntry, SlotClass, Rows, Slots]]:
        copies, table, spaces = self._copies, self._copies.blocks.table, self._copies.namespaces
        for number in np.unique(found["namespace"]).tolist():
            if number >= len(spaces) or spaces[number].tenant != cls.tenant:
                continue
            mine = np.flatnonzero(found["namespace"] == number)
            keys = np.ascontiguousarray(found["key"][mine])
            fresh, position, rows = copies.blocks.add(keys, number, VISIBLE)
            table.block_sum[fresh] = found["block_sum"][mine[position]]
            fits = (rows >= 0) & (table.block_sum[rows] == found["block_sum"][mine])
            fits &= (table.host_slot[rows] < 0) & ((table.flags[rows] & TIER_HOST) == 0)
            first = np.zeros(rows.size, np.bool_)
            first[np.unique(rows, return_index=True)[1]] = True
            mine, rows = mine[fits & first], rows[fits & first]
            forms = rows if decoded else copies.shapes.rows_for(rows.size)
            bare = rows[forms.size :]  # the block table is full
            copies.blocks.drop(bare[(table.flags[bare] & RESIDENT) == 0])
            mine, rows = mine[: forms.size], rows[: forms.size]
            if not rows.size:
                continue
            self._host.take(cls, slots[mine])
            self._host.set_sums(cls, slots[mine], sums[mine])
            table.heat[rows], table.last_access_s[rows] = found["heat"][mine], found["last_access_s"][mine]
            table.marks[rows] |= found["marks"][mine] & np.uint8(RETURNED)
            if decoded:
                self._host.unverified.add(slots[mine])
                copies.add_host(cls, rows, slots[mine])
                copies.shapes.forms.recalled(rows, found["decoded_sum"][mine])
                self._host.withdraw(slots[mine])  # its row would say that it is the exact block
            else:
                copies.blocks.mark(rows, TIER_HOST)
                copies.shapes.forms.settle(cls, rows, forms, slots[mine])
            self._host.release(cls, slots[mine])
            yield spaces[number], cls, rows, slots[mine]

    def recall_extents(self, snapshot: Snapshot) -> list[Slots]:
        """Blocks that lay in extents of other sizes do so again; the slots of these. After all others were entered."""
        return recall_extents(self._copies, self._host, snapshot.extents, self.slots_at)

    def recall_uses(self, snapshot: Snapshot, now_ns: int) -> None:
        """Blocks that have been entered have their heat and uses again, and eviction knows what it had learned."""
        found = np.frombuffer(snapshot.uses, USE)
        slots = self.slots_at(found["place"], found["generation"])
        there = slots >= 0
        there[there] = self._host.pool.row[slots[there]] >= 0
        found, slots = found[there], slots[there]
        rows, table = self._host.pool.row[slots], self._copies.blocks.table
        table.heat[rows], table.last_access_s[rows] = found["heat"], found["last_access_s"]
        table.marks[rows] |= found["marks"] & np.uint8(RETURNED)
        policy = self._host.policy
        if isinstance(policy, ReturnEviction) and snapshot.version == __version__:
            policy.model.relearn(snapshot.learned, now_ns)
            self._recall_policy(policy, found, slots)

    def _recall_policy(self, policy: ReturnEviction, found: Uses, slots: Slots) -> None:
        order = np.argsort(found["place"])
        at = np.minimum(np.searchsorted(found["place"], found["parent"], sorter=order), max(0, found.size - 1))
        parents = np.full(slots.size, -1, np.int32)
        if found.size:
            known = found["place"][order[at]] == found["parent"]
            parents[known] = slots[order[at[known]]]
        classes = self._host.pool.class_ids(slots)
        for number in np.unique(classes).tolist():
            mine = (classes == number) & (found["kind"] > 0)
            same = np.where((parents >= 0) & (self._host.pool.class_ids(np.maximum(parents, 0)) == number), parents, -1)
            policy.recall(
                number, slots[mine], found["kind"][mine], found["pace"][mine], found["at"][mine],
                same[mine].astype(np.int32),
            )  # fmt: skip
