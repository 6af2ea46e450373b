"""The slot pool against a plain model: sets of (slab, place), whatever the order in which slabs change classes.

A pool of pages that are no multiple of a run, and slots from one page to a whole slab, so that numbers are given out,
given back and given again in every pattern.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.gpu.slot_pool import NO_SLOT, SlotPool

SLABS = 4
SIZES = (1, 3, 7, 24)
"""Pages of a slot, by class."""

classes = st.integers(0, len(SIZES) - 1)


class PoolLife(RuleBasedStateMachine):
    @initialize(pages=st.sampled_from([24, 32, 36, 64, 65]))
    def begin(self, pages):
        self.pool = SlotPool(pages * 4096, SLABS)
        self.classes = [self.pool.class_for(4096 * size, 2, "default") for size in SIZES]
        self.owner: dict[int, int] = {}
        self.taken: dict[int, tuple[int, int, int, int]] = {}
        """By slot number: class, slab, place, and what its sums must be."""
        self.holds: dict[int, int] = {}
        self.stamp = 0

    @rule(cls=classes, slab=st.integers(0, SLABS - 1))
    def add(self, cls, slab):
        if slab in self.owner:
            return
        slots = self.pool.add_slab(self.classes[cls], slab)
        self.owner[slab] = cls
        assert slots.size == self.classes[cls].slots_per_slab
        assert not set(slots.tolist()) & set(self.taken)

    @precondition(lambda self: self.owner)
    @rule(pick=st.integers(0, 99))
    def remove(self, pick):
        slab = sorted(self.owner)[pick % len(self.owner)]
        if all(where[1] != slab for where in self.taken.values()):
            self.pool.remove_slab(slab)
            del self.owner[slab]

    @rule(cls=classes, count=st.integers(0, 40))
    def take(self, cls, count):
        before = self.classes[cls].free_count
        slots = self.pool.take(self.classes[cls], count)
        assert slots.size == min(count, before)
        for slot in slots.tolist():
            assert slot not in self.taken
            slab, place = self.pool.place(slot)
            assert self.owner[slab] == cls
            self.stamp += 1
            self.taken[slot] = (cls, slab, place, self.stamp)
            self.pool.row[slot] = self.stamp
            self.classes[cls].sums[self.pool.sum_rows(np.array([slot], np.int32))] = self.stamp

    @precondition(lambda self: self.taken)
    @rule(pick=st.integers(0, 99), count=st.integers(1, 30))
    def give(self, pick, count):
        idle = [slot for slot in self.taken if not self.holds.get(slot)]
        if not idle:
            return
        cls = self.taken[idle[pick % len(idle)]][0]
        mine = [slot for slot in idle if self.taken[slot][0] == cls][:count]
        self.pool.give(self.classes[cls], np.array(mine, np.int32))
        for slot in mine:
            del self.taken[slot]

    @precondition(lambda self: self.taken)
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=5))
    def hold(self, picks):
        slots = [sorted(self.taken)[pick % len(self.taken)] for pick in picks]
        self.pool.hold(np.array(slots, np.int32))
        for slot in slots:
            self.holds[slot] = self.holds.get(slot, 0) + 1

    @precondition(lambda self: any(self.holds.values()))
    @rule(pick=st.integers(0, 99))
    def unhold(self, pick):
        held = [slot for slot, count in self.holds.items() if count]
        slot = held[pick % len(held)]
        self.pool.unhold(np.array([slot], np.int32))
        self.holds[slot] -= 1

    @invariant()
    def accounts_agree(self):
        places = [where[1:3] for where in self.taken.values()]
        assert len(set(places)) == len(places), "two blocks in one place"
        numbers = [slot for slab in self.owner for slot in self.pool.slots_of(slab).tolist()]
        assert len(set(numbers)) == len(numbers), "a number was given to two slabs"
        assert all(0 <= number < self.pool.slots_max for number in numbers)
        for cls in self.classes:
            mine = sorted(slot for slot, where in self.taken.items() if where[0] == cls.id)
            total = sum(owner == cls.id for owner in self.owner.values()) * cls.slots_per_slab
            assert (cls.total, cls.used, cls.free.count()) == (total, len(mine), total - len(mine))
            self.check_columns(cls, np.array(mine, np.int32))

    def check_columns(self, cls, slots):
        known = [self.taken[slot] for slot in slots.tolist()]
        assert self.pool.slabs_of(slots).tolist() == [slab for _, slab, _, _ in known]
        assert self.pool.offsets(cls, slots).tolist() == [place * cls.slot_bytes for _, _, place, _ in known]
        assert cls.sums[self.pool.sum_rows(slots)].tolist() == [[stamp] * 2 for _, _, _, stamp in known]
        assert self.pool.row[slots].tolist() == [stamp for _, _, _, stamp in known]
        assert self.pool.holds[slots].tolist() == [self.holds.get(slot, 0) for slot in slots.tolist()]
        numbers = [slot for slab in self.owner for slot in self.pool.slots_of(slab).tolist()]
        free = np.array([slot for slot in numbers if slot not in self.taken], np.int32)
        assert (self.pool.row[free] == NO_SLOT).all()


PoolLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolLife = PoolLife.TestCase
