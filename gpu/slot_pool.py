"""Bookkeeping of a pool cut into slots: which slot is free, whose it is, and who holds it.

A pool is a row of slabs of equal size. A slab belongs to one class (slot size, layers, tenant) at a time and is cut
into that class's slots; slabs go to classes on demand, so blocks of different models share one budget. Nothing here
touches the memory itself.

Slots have dense numbers, which index the columns: a slab that is cut gets numbers for the slots it has then, and gives
them back with its class. A pool could be cut into as many slots as it has pages, and columns over these are reserved;
only what is numbered is ever touched, so a pool of large slots has small columns. Numbers come in **runs** of up to
RUN_SLOTS neighbours. A slab's runs need not lie side by side, so whatever the order in which slabs come and go, numbers
never run out before slabs do; what a slot's number says of its place is looked up by run.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums
from kvtierd.core.units import PAGE_BYTES
from kvtierd.index import slot_steps
from kvtierd.index.bitmap import HierarchicalBitmap
from kvtierd.index.memory import reserve

Slots = npt.NDArray[np.int32]
NO_SLOT = -1
ORPHAN = -2
"""In the `row` column: the slot's block is gone or never came; the slot is freed when its last hold ends."""

RUN_SLOTS = 16
"""Most numbers of a run: a line of an int32 column. A slab leaves less than one run unused."""


@dataclasses.dataclass(slots=True, eq=False)
class SlotClass:
    """Slots of one size. `free` has a bit per free slot; `sums` holds the layer sums of each slot's block.

    `sums` is [most slots the class can have, layers] uint64, reserved; a slab's rows follow each other.
    """

    id: int
    slot_bytes: int
    layers: int
    tenant: str
    slots_per_slab: int
    free: HierarchicalBitmap
    sums: Sums
    slabs: list[int] = dataclasses.field(default_factory=list)
    free_count: int = 0
    ordinals: int = 0
    """Parts of `sums` that were ever given to a slab; `ordinals_freed` of them are nobody's now, a heap."""
    ordinals_freed: list[int] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Slots of all slabs of this class."""
        return len(self.slabs) * self.slots_per_slab

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.total - self.free_count

    def next_ordinal(self) -> int:
        """Take the first part of `sums` that no slab has."""
        if self.ordinals_freed:
            return heapq.heappop(self.ordinals_freed)
        self.ordinals += 1
        return self.ordinals - 1


class _Runs:
    """Which runs of numbers are free: those given back first, neighbours where there are, then fresh ones."""

    def __init__(self, count: int) -> None:
        self._freed = HierarchicalBitmap(max(1, count))
        self._freed_count = 0
        self._fresh = 0
        self._count = count

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """Take `count` runs."""
        again = self._freed.take(min(count, self._freed_count))
        self._freed_count -= again.size
        fresh = np.arange(self._fresh, self._fresh + count - again.size)
        self._fresh += fresh.size
        assert self._fresh <= self._count, "slabs have more slots than the pool has pages"
        return np.concatenate([again, fresh])

    def give(self, runs: npt.NDArray[np.int64]) -> None:
        """Put runs back."""
        self._freed_count += self._freed.set(runs)


class SlotPool:
    """Slots of several sizes in slabs of one size. Slot numbers are in 0..`slots_max` - 1.

    Columns over slot numbers: `row` (owner in the block table, -1 when free) and `holds` (leases, moves and pins that
    keep a slot from changing hands).
    """

    def __init__(self, slab_bytes: int, slabs_max: int) -> None:
        self.slab_bytes = slab_bytes
        self.slabs_max = slabs_max
        pages = slab_bytes // PAGE_BYTES
        # A power of two that divides a slab's pages: rounding its slots up to whole runs never exceeds its pages.
        run_slots = min(RUN_SLOTS, max(1, pages & -pages))
        self.shift, self.mask = run_slots.bit_length() - 1, run_slots - 1
        self.slots_max = pages * slabs_max
        self.row: Slots = reserve((self.slots_max,), np.int32, huge=False)
        self.holds: npt.NDArray[np.int32] = reserve((self.slots_max,), np.int32, huge=False)
        self.classes: list[SlotClass] = []
        self._by_shape: dict[tuple[int, int, str], SlotClass] = {}
        self._slab_class = np.full(slabs_max, -1, np.int32)
        self._slab_runs: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)] * slabs_max
        self._runs = _Runs(self.slots_max >> self.shift)
        self.run_slab: npt.NDArray[np.int32] = reserve((self.slots_max >> self.shift,), np.int32, huge=False)
        self.run_first: npt.NDArray[np.int32] = reserve((self.slots_max >> self.shift,), np.int32, huge=False)
        self.run_sums: npt.NDArray[np.int32] = reserve((self.slots_max >> self.shift,), np.int32, huge=False)

    def class_for(self, slot_bytes: int, layers: int, tenant: str) -> SlotClass:
        """Return the class of a slot shape, making it when it is new. The slot must fit a slab."""
        shape = (slot_bytes, layers, tenant)
        known = self._by_shape.get(shape)
        if known is None:
            per_slab = self.slab_bytes // slot_bytes
            assert per_slab > 0, "the caller checks that a block fits"
            assert slot_bytes >= PAGE_BYTES, "a slot has whole pages"
            sums = reserve((per_slab * self.slabs_max, layers), np.uint64, huge=False)
            free = HierarchicalBitmap(max(1, self.slots_max))
            known = SlotClass(len(self.classes), slot_bytes, layers, tenant, per_slab, free, sums)
            self.classes.append(known)
            self._by_shape[shape] = known
        return known

    def add_slab(self, cls: SlotClass, slab: int) -> Slots:
        """Give a slab to a class: its slots become free ones. Returns their numbers, in the order of their places."""
        assert self._slab_class[slab] == -1, f"slab {slab} has an owner"
        self._slab_class[slab] = cls.id
        runs = self._runs.take((cls.slots_per_slab + self.mask) >> self.shift)
        self._slab_runs[slab] = runs.astype(np.int32)
        first = np.arange(runs.size) << self.shift
        self.run_slab[runs] = slab
        self.run_first[runs] = first
        self.run_sums[runs] = cls.next_ordinal() * cls.slots_per_slab + first
        cls.slabs.append(slab)
        slots = self.slots_of(slab)
        self.row[slots] = NO_SLOT
        cls.free.set(slots.astype(np.int64))
        cls.free_count += cls.slots_per_slab
        return slots

    def remove_slab(self, slab: int) -> None:
        """Take an empty slab from its class; every slot of it must be free and unheld."""
        cls = self.classes[self._slab_class[slab]]
        slots = self.slots_of(slab)
        assert (self.row[slots] == NO_SLOT).all(), f"slab {slab} has blocks"
        assert not self.holds[slots].any(), f"slab {slab} is held"
        cleared = cls.free.clear(slots.astype(np.int64))
        assert cleared == slots.size, f"slab {slab} has reserved slots"
        cls.free_count -= slots.size
        cls.slabs.remove(slab)
        self._slab_class[slab] = -1
        runs = self._slab_runs[slab].astype(np.int64)
        heapq.heappush(cls.ordinals_freed, int(self.run_sums[runs[0]]) // cls.slots_per_slab)
        self._runs.give(runs)

    def slots_of(self, slab: int) -> Slots:
        """Every slot number of a slab, in the order of their places."""
        cls = self.classes[self._slab_class[slab]]
        numbers = (self._slab_runs[slab] << self.shift)[:, None] + np.arange(self.mask + 1)
        return numbers.ravel()[: cls.slots_per_slab].astype(np.int32)

    def take(self, cls: SlotClass, count: int) -> Slots:
        """Take up to `count` free slots of a class; neighbours where there is a run, fewer when there are fewer."""
        slots = cls.free.take(min(count, cls.free_count)).astype(np.int32)
        cls.free_count -= slots.size
        return slots

    def give(self, cls: SlotClass, slots: Slots) -> None:
        """Put slots back; they must be unheld."""
        assert not self.holds[slots].any(), "a held slot cannot be freed"
        freed = cls.free.set(slots.astype(np.int64))
        assert freed == slots.size, "a slot was freed twice"
        self.row[slots] = NO_SLOT
        cls.free_count += freed

    def hold(self, slots: Slots) -> None:
        """Keep slots from changing hands once more; a slot may be named several times."""
        slot_steps.hold(self.holds, slots)

    def unhold(self, slots: Slots) -> Slots:
        """Undo one hold of each; returns the orphans that nobody holds any more, each once."""
        ended = np.empty(slots.size, np.int32)
        found = slot_steps.unhold(self.holds, self.row, ORPHAN, slots, ended)
        assert found >= 0, "a slot that nobody holds was released"
        return ended[:found]

    def place(self, slot: int) -> tuple[int, int]:
        """Slab of a slot, and which of the slab's slots it is."""
        run = slot >> self.shift
        return self.run_slab.item(run), self.run_first.item(run) + (slot & self.mask)

    def class_of(self, slot: int) -> SlotClass:
        """The class whose slot it is."""
        return self.classes[self._slab_class.item(self.run_slab.item(slot >> self.shift))]

    def slabs_of(self, slots: Slots) -> npt.NDArray[np.int32]:
        """Slab numbers of slots."""
        slabs: npt.NDArray[np.int32] = self.run_slab[slots >> self.shift]
        return slabs

    def indices(self, slots: Slots) -> npt.NDArray[np.int32]:
        """Which of their slab's slots these are."""
        places: npt.NDArray[np.int32] = self.run_first[slots >> self.shift] + (slots & self.mask)
        return places

    def class_ids(self, slots: Slots) -> npt.NDArray[np.int32]:
        """Class of each slot."""
        ids: npt.NDArray[np.int32] = self._slab_class[self.slabs_of(slots)]
        return ids

    def offsets(self, cls: SlotClass, slots: Slots) -> npt.NDArray[np.int64]:
        """Bytes from the start of their slab at which slots of a class begin."""
        return self.indices(slots) * np.int64(cls.slot_bytes)

    def sum_rows(self, slots: Slots) -> npt.NDArray[np.int32]:
        """Row of each slot in its class's `sums`."""
        rows: npt.NDArray[np.int32] = self.run_sums[slots >> self.shift] + (slots & self.mask)
        return rows
