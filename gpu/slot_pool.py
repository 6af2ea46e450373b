"""Bookkeeping of a pool cut into slots: which slot is free, whose it is, and who holds it.

A pool is a row of slabs of equal size. A slab belongs to one class (slot size, layers, tenant) at a time and is cut
into that class's slots; slabs go to classes on demand, so blocks of different models share one budget. Slots have
dense numbers, `slab * stride + index`, which index the columns. Nothing here touches the memory itself.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums
from kvtierd.core.units import PAGE_BYTES
from kvtierd.index.bitmap import HierarchicalBitmap

Slots = npt.NDArray[np.int32]
NO_SLOT = -1


@dataclasses.dataclass(slots=True, eq=False)
class SlotClass:
    """Slots of one size. `free` has a bit per free slot; `sums` holds the layer sums of each slot's block."""

    id: int
    slot_bytes: int
    layers: int
    tenant: str
    slots_per_slab: int
    free: HierarchicalBitmap
    slabs: list[int] = dataclasses.field(default_factory=list)
    free_count: int = 0
    sums: Sums = dataclasses.field(default_factory=lambda: np.empty((0, 0), np.uint64))

    @property
    def total(self) -> int:
        """Slots of all slabs of this class."""
        return len(self.slabs) * self.slots_per_slab

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.total - self.free_count


class SlotPool:
    """Slots of several sizes in slabs of one size.

    Columns over slot numbers: `row` (owner in the block table, -1 when free) and `holds` (leases, moves and pins that
    keep a slot from changing hands).
    """

    def __init__(self, slab_bytes: int, slabs_max: int) -> None:
        self.slab_bytes = slab_bytes
        self.stride = slab_bytes // PAGE_BYTES
        size = self.stride * slabs_max
        self.row = np.full(size, NO_SLOT, np.int32)
        self.holds = np.zeros(size, np.int32)
        self.classes: list[SlotClass] = []
        self._by_shape: dict[tuple[int, int, str], SlotClass] = {}
        self._slab_class = np.full(slabs_max, -1, np.int32)
        self._slab_ordinal = np.zeros(slabs_max, np.int64)

    def class_for(self, slot_bytes: int, layers: int, tenant: str) -> SlotClass:
        """Return the class of a slot shape, making it when it is new. The slot must fit a slab."""
        shape = (slot_bytes, layers, tenant)
        known = self._by_shape.get(shape)
        if known is None:
            per_slab = self.slab_bytes // slot_bytes
            assert per_slab > 0, "the caller checks that a block fits"
            free = HierarchicalBitmap(self.row.size)
            known = SlotClass(len(self.classes), slot_bytes, layers, tenant, per_slab, free)
            self.classes.append(known)
            self._by_shape[shape] = known
        return known

    def add_slab(self, cls: SlotClass, slab: int) -> None:
        """Give a slab to a class: its slots become free ones."""
        assert self._slab_class[slab] == -1, f"slab {slab} has an owner"
        self._slab_class[slab] = cls.id
        ordinal = self._free_ordinal(cls)
        self._slab_ordinal[slab] = ordinal
        cls.slabs.append(slab)
        rows_needed = (ordinal + 1) * cls.slots_per_slab
        if cls.sums.shape[0] < rows_needed:
            grown = np.zeros((rows_needed, cls.layers), np.uint64)
            if cls.sums.size:
                grown[: cls.sums.shape[0]] = cls.sums
            cls.sums = grown
        first = slab * self.stride
        cls.free.set_range(first, first + cls.slots_per_slab)
        cls.free_count += cls.slots_per_slab

    def remove_slab(self, slab: int) -> None:
        """Take an empty slab from its class; every slot of it must be free and unheld."""
        cls = self.classes[self._slab_class[slab]]
        slots = self.slots_of(slab)
        assert (self.row[slots] == NO_SLOT).all(), f"slab {slab} has blocks"
        assert not self.holds[slots].any(), f"slab {slab} is held"
        first, end = int(slots[0]), int(slots[-1]) + 1
        assert cls.free.count(first, end) == slots.size, f"slab {slab} has reserved slots"
        cls.free.clear_range(first, end)
        cls.free_count -= slots.size
        cls.slabs.remove(slab)
        self._slab_class[slab] = -1

    def slots_of(self, slab: int) -> Slots:
        """Every slot number of a slab."""
        cls = self.classes[self._slab_class[slab]]
        return np.arange(slab * self.stride, slab * self.stride + cls.slots_per_slab, dtype=np.int32)

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
        np.add.at(self.holds, slots, 1)

    def unhold(self, slots: Slots) -> None:
        """Undo one hold of each."""
        assert self.holds[slots].all(), "a slot that nobody holds was released"
        np.subtract.at(self.holds, slots, 1)

    def slab_of(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Slab numbers of slots."""
        return np.asarray(slots, np.int64) // self.stride

    def offsets(self, cls: SlotClass, slots: Slots) -> npt.NDArray[np.int64]:
        """Bytes from the start of their slab at which slots of a class begin."""
        return np.asarray(slots, np.int64) % self.stride * cls.slot_bytes

    def sum_rows(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Row of each slot in its class's `sums`."""
        wide = np.asarray(slots, np.int64)
        cls = self.classes[self._slab_class[int(wide[0]) // self.stride]] if wide.size else None
        per_slab = cls.slots_per_slab if cls is not None else 1
        return self._slab_ordinal[wide // self.stride] * per_slab + wide % self.stride

    def _free_ordinal(self, cls: SlotClass) -> int:
        taken = {int(self._slab_ordinal[slab]) for slab in cls.slabs}
        return next(i for i in range(len(taken) + 1) if i not in taken)
