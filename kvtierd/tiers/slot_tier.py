"""What the host and the gpu tier have in common: slots, their holds, and who goes first when room is needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums
from kvtierd.gpu.slot_pool import NO_SLOT, ORPHAN, SlotClass, SlotPool, Slots
from kvtierd.index import slot_steps
from kvtierd.policy.eviction import EvictionPolicy
from kvtierd.policy.returns import Usage
from kvtierd.tiers.lease_quota import LeaseQuota
from kvtierd.tiers.slab_quota import SlabQuota

MAX_SCAN = 4096
"""Slots that one search for victims looks at: bounds its time, whatever is held."""

IDLE_TICKS = 100
"""A class that was not used for this long (5 s) gives its slabs to classes that have to evict."""

SLABS_LOOKED_AT = 32
"""Slabs of a donor among which the emptiest is picked: bounds the time of one search."""


class SlotTier:
    """Slots of one tier. A slot is free, or has a row, or is an orphan; holds keep it from changing hands.

    Subclasses say what happens to memory: `spare` lists slabs that have memory and no class.
    """

    def __init__(self, slab_bytes: int, slabs_max: int, policy: EvictionPolicy) -> None:
        self.pool = SlotPool(slab_bytes, slabs_max)
        self.policy = policy
        self.spare: list[int] = []
        self.ticks = 0
        """Turns of the manager's ticker: a clock that is exact enough to tell who is idle."""
        self._used_at: dict[int, int] = {}
        self.quota: SlabQuota | None = None
        """Of tenants, where one has any."""
        self.leased: LeaseQuota | None = None
        """What tenants hold, where there are several."""

    def class_for(self, slot_bytes: int, layers: int, tenant: str) -> SlotClass:
        """Class of a slot shape."""
        return self.pool.class_for(slot_bytes, layers, tenant)

    def take_free(self, cls: SlotClass, count: int) -> Slots:
        """Take up to `count` free slots, cutting spare slabs as needed. They come with one hold each."""
        self.make_free(cls, count)
        slots = self.pool.take(cls, count)
        self.pool.row[slots] = ORPHAN
        self.pool.holds[slots] = 1
        return slots

    def make_free(self, cls: SlotClass, count: int) -> int:
        """Cut spare slabs until `count` slots are free; how many of these are."""
        while cls.free_count < count and self.spare_for(cls):
            if not self.attach_spare(cls):
                break
        return min(count, cls.free_count)

    def spare_for(self, cls: SlotClass, coming: int = 0) -> int:
        """How many slabs a class may still be given: of those that are spare, and of `coming` ones."""
        spare = len(self.spare) + coming
        return spare if self.quota is None else max(0, min(spare, self.quota.left(cls.tenant)))

    def may_grow(self, cls: SlotClass) -> bool:
        """Whether the quota of its tenant leaves a class room for another slab."""
        return self.quota is None or self.quota.left(cls.tenant) > 0

    def attach_spare(self, cls: SlotClass) -> bool:
        """Cut the last spare slab into slots of a class; False where that cannot be."""
        if not self.attach_slab(cls, self.spare[-1]):
            return False
        self.spare.pop()
        return True

    def in_use(self, cls: SlotClass) -> None:
        """Somebody reads or stores blocks of this class."""
        self._used_at[cls.id] = self.ticks

    def attach_slab(self, cls: SlotClass, slab: int) -> bool:
        """Cut a spare slab into slots of a class, or leave it as it is: then False."""
        self.pool.add_slab(cls, slab)
        return True

    def victims(self, cls: SlotClass, count: int) -> Slots:
        """Up to `count` slots that may go: unheld, coldest first."""
        slots: Slots = self.policy.victims(cls.id, self.pool.holds, count, MAX_SCAN)
        return slots

    def settle(self, cls: SlotClass, slots: Slots, rows: npt.NDArray[np.int32]) -> None:
        """Filled slots become their rows' copies; the holds of `take_free` go on until `release`."""
        self.pool.row[slots] = rows
        self.policy.inserted(cls.id, slots)
        self._used_at[cls.id] = self.ticks

    def used(self, cls: SlotClass, slots: Slots, usage: Usage, first: int = 0, before: int = -1) -> None:
        """A request uses or stores the blocks in these slots (see EvictionPolicy.used)."""
        self.policy.used(cls.id, slots, usage, first, before)
        self._used_at[cls.id] = self.ticks

    def chained(self, cls: SlotClass, slots: Slots, before: Slots) -> None:
        """The block in each slot comes right after that in slot `before[i]`, or nothing is known (-1)."""
        self.policy.chained(cls.id, slots, before)

    def copied(self, slots: Slots, *, elsewhere: bool) -> None:
        """The blocks in these slots, of any class, have copies in other tiers now, or have none any more."""
        classes = self.pool.class_ids(slots)
        for number in np.unique(classes).tolist():
            self.policy.copied(number, slots[classes == number], elsewhere=elsewhere)

    def touch(self, cls: SlotClass, slots: Slots) -> None:
        """The blocks in these slots, in prefix order, were used."""
        self.policy.accessed(cls.id, slots)
        self._used_at[cls.id] = self.ticks

    def disown(self, cls: SlotClass, slots: Slots) -> None:
        """Slots that had rows have none any more: free now where nobody holds them, else with the last hold."""
        self.policy.removed(cls.id, slots)
        idle = np.empty(slots.size, np.int32)
        found = slot_steps.disown(self.pool.holds, self.pool.row, ORPHAN, slots, idle)
        if found:
            self.free(cls, idle[:found])

    def release(self, cls: SlotClass, slots: Slots) -> None:
        """End one hold of each slot, and free orphans that nobody holds any more."""
        ended = self.pool.unhold(slots)
        if ended.size:
            # Of slots that were reserved and never filled the policy was told already.
            self.policy.removed(cls.id, ended)
            self.free(cls, ended)

    def free(self, cls: SlotClass, slots: Slots) -> None:
        """Put unheld slots back."""
        self.pool.give(cls, slots)

    def sums_of(self, cls: SlotClass, slots: Slots) -> Sums:
        """Layer sums of the slots' blocks, a copy of shape [n, layers]."""
        return cls.sums[self.pool.sum_rows(slots)]

    def set_sums(self, cls: SlotClass, slots: Slots, sums: Sums) -> None:
        """Record the layer sums of the slots' blocks, [n, layers]."""
        cls.sums[self.pool.sum_rows(slots)] = sums

    def used_bytes(self) -> int:
        """Bytes of slots that are not free."""
        return sum(cls.used * cls.slot_bytes for cls in self.pool.classes)

    def slab_to_take(self, cls: SlotClass) -> int | None:
        """Pick a slab that another class should give to `cls`, with no hold in it: the emptiest of those looked at.

        Fairness between models of different block sizes: a class can get as many slabs as any other has, and any slab
        of a class that nobody has used for a while. At its quota a tenant takes from itself only.
        """
        grows = self.may_grow(cls)
        donors = [
            other
            for other in self.pool.classes
            if other is not cls
            and other.slabs
            and (grows or other.tenant == cls.tenant)
            and self._should_give(other, cls)
        ]
        for donor in sorted(donors, key=lambda other: (not self._is_idle(other), -len(other.slabs))):
            if (slab := self.emptiest(donor)) is not None:
                return slab
        return None

    def emptiest(self, cls: SlotClass) -> int | None:
        """That of the slabs of a class, as far as they are looked at, which has the fewest blocks, and no hold."""
        best: tuple[int, int] | None = None
        for slab in cls.slabs[:SLABS_LOOKED_AT]:
            slots = self.pool.slots_of(slab)
            if self.pool.holds[slots].any():
                continue
            used = int((self.pool.row[slots] != NO_SLOT).sum())
            if best is None or used < best[0]:
                best = (used, slab)
        return None if best is None else best[1]

    def _should_give(self, donor: SlotClass, cls: SlotClass) -> bool:
        return len(donor.slabs) > len(cls.slabs) + 1 or not cls.slabs or self._is_idle(donor)

    def _is_idle(self, cls: SlotClass) -> bool:
        return self.ticks - self._used_at.get(cls.id, 0) > IDLE_TICKS
