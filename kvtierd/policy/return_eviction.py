"""The default eviction policy: what is least likely to come back within the space it takes goes first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.index.memory import reserve
from kvtierd.policy import leaf_lists, leaves
from kvtierd.policy.eviction import CLASSES_MAX
from kvtierd.policy.kinds import UNKNOWN_KIND
from kvtierd.policy.rates import LEVEL_MAX, LEVELS_AN_OCTAVE
from kvtierd.policy.returns import ReturnModel, Usage

Slots = npt.NDArray[np.int32]
Kinds = npt.NDArray[np.uint16]
SLOTS_MAX = 1 << 30


class ReturnEviction:
    """Victims by the model's estimate of when blocks return, chains from their tails on (see EvictionPolicy).

    The model may be shared by several tiers. `copied_worth` is what keeping a block is worth while another tier has a
    copy, against what it is worth otherwise: about the time to fetch it over the time to compute it. Raises ValueError
    when a limit or a class is out of range.
    """

    def __init__(
        self, slots_max: int, model: ReturnModel, classes_max: int = CLASSES_MAX, copied_worth: float = 1 / 8
    ) -> None:
        if not 1 <= slots_max <= SLOTS_MAX or not 1 <= classes_max <= SLOTS_MAX // leaf_lists.LISTS:
            raise ValueError(f"slots_max {slots_max} or classes_max {classes_max} is out of range")
        if not 0 < copied_worth <= 1:
            raise ValueError(f"copied_worth is {copied_worth}; it must be above 0 and at most 1")
        self._model = model
        self._classes_max = classes_max
        self._copied_less = min(LEVEL_MAX, round(-LEVELS_AN_OCTAVE * math.log2(copied_worth)))
        self._slots: leaf_lists.Rowset = reserve((slots_max,), leaf_lists.SLOT, huge=False)
        self._ends: leaf_lists.Ends = reserve((3, classes_max * leaf_lists.LISTS), np.int32, huge=False)
        self._marks: leaf_lists.Marks = reserve((classes_max, 2), np.uint64, huge=False)
        self._cursors: leaf_lists.Ends = reserve((classes_max, 2), np.int32, huge=False)
        self._offered: tuple[int, Slots] = (0, np.empty(0, np.int32))

    @property
    def model(self) -> ReturnModel:
        """What it asks about blocks."""
        return self._model

    @property
    def columns(self) -> tuple[leaf_lists.Rowset, leaf_lists.Ends, leaf_lists.Marks, leaf_lists.Ends]:
        """Leaves, ends, marks and cursors, for compiled code that works on them."""
        return self._slots, self._ends, self._marks, self._cursors

    def used(self, cls: int, slots: Slots, usage: Usage, first: int = 0, before: int = -1) -> None:
        """See EvictionPolicy."""
        end = first + slots.size
        self._use(cls, slots, usage.kinds[first:end], usage.paces[first:end], before, chained=True)

    def inserted(self, cls: int, slots: Slots) -> None:
        """See EvictionPolicy. Of blocks that no usage was told of it only knows when they were used."""
        fresh = slots[self._slots["kind"][slots] == 0]
        if fresh.size:
            unknown = np.full(fresh.size, UNKNOWN_KIND, np.uint16)
            self._use(cls, fresh, unknown, np.zeros(fresh.size, np.uint8), -1, chained=False)

    def accessed(self, cls: int, slots: Slots) -> None:
        """See EvictionPolicy."""
        present = self._slots["kind"][slots]
        known = slots[present > 0]
        self._use(cls, known, present[present > 0] - np.uint16(1), self._slots["pace"][known], -1, chained=False)

    def chained(self, cls: int, slots: Slots, before: Slots) -> None:
        """See EvictionPolicy."""
        self._check(cls)
        self.take_back()
        leaves.chain_slots(
            self._slots, self._ends, self._marks, self._cursors, self._model.levels, cls, self._model.now, slots, before
        )

    def copied(self, cls: int, slots: Slots, *, elsewhere: bool = True) -> None:
        """See EvictionPolicy."""
        self._check(cls)
        self.take_back()
        less = self._copied_less if elsewhere else 0
        leaves.mark_copied(
            self._slots, self._ends, self._marks, self._cursors, self._model.levels, cls, self._model.now, slots, less
        )

    def remembered(self, slots: Slots) -> tuple[Kinds, npt.NDArray[np.uint8], npt.NDArray[np.uint32], Slots]:
        """What is known of the blocks in these slots, [n] each: kind plus 1, pace, when they were used (in ticks), and
        the slot of the block before each, -1 for none."""
        found = self._slots[slots]
        parents = found["parent"].astype(np.int32)
        stale = (parents >= 0) & (self._slots["birth"][parents] != found["parent_birth"])
        parents[stale] = -1
        return found["kind"].copy(), found["pace"].copy(), found["at"].copy(), parents

    def recall(
        self,
        cls: int,
        slots: Slots,
        kinds: Kinds,
        paces: npt.NDArray[np.uint8],
        at: npt.NDArray[np.uint32],
        parents: Slots,
    ) -> None:
        """Blocks that were inserted are those of an earlier life, of which `remembered` said this, on the same clock.

        All of them were known then: no kind is 0.
        """
        now = self._model.now
        ages = np.uint32(now) - at
        order = np.argsort(ages, kind="stable")[::-1]
        begins = np.flatnonzero(np.diff(ages[order], prepend=np.int64(-1)))
        try:
            for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), order.size], strict=True):
                some = order[begin:end]
                self._model.now = int(at[some[0]])
                self._use(cls, slots[some], kinds[some] - np.uint16(1), paces[some], -1, chained=False)
        finally:
            self._model.now = now
        self.chained(cls, slots, parents)

    def removed(self, cls: int, slots: Slots) -> None:
        """See EvictionPolicy."""
        self._check(cls)
        leaves.remove_slots(
            self._slots, self._ends, self._marks, self._cursors, self._model.levels, cls, self._model.now, slots
        )
        self.take_back()

    def victims(self, cls: int, holds: npt.NDArray[Any], out_max: int, scan_max: int) -> Slots:
        """See EvictionPolicy."""
        self._check(cls)
        self.take_back()
        out = np.empty(max(0, out_max), np.int32)
        found = leaves.name_victims(
            self._slots,
            self._ends,
            self._marks,
            self._cursors,
            self._model.levels,
            cls,
            self._model.now,
            holds,
            scan_max,
            out,
        )
        self._offered = (cls, out[:found].copy())
        return out[:found]

    def length(self, cls: int) -> int:
        """Leaves of a class."""
        self._check(cls)
        return int(self._ends[2, cls * leaf_lists.LISTS : (cls + 1) * leaf_lists.LISTS].sum())

    def _use(
        self,
        cls: int,
        slots: Slots,
        kinds: npt.NDArray[np.uint16],
        paces: npt.NDArray[np.uint8],
        before: int,
        *,
        chained: bool,
    ) -> None:
        self._check(cls)
        self.take_back()
        leaves.use_slots(
            self._slots, self._ends, self._marks, self._cursors, self._model.levels, cls, self._model.now, slots,
            np.ascontiguousarray(kinds), np.ascontiguousarray(paces), before, chained,
        )  # fmt: skip

    def take_back(self) -> None:
        """Those of the victims named last that have not gone are in the lists again."""
        cls, offered = self._offered
        if offered.size:
            leaves.take_back(
                self._slots, self._ends, self._marks, self._cursors, self._model.levels, cls, self._model.now, offered
            )
            self._offered = (0, offered[:0])

    def _check(self, cls: int) -> None:
        if not 0 <= cls < self._classes_max:
            raise ValueError(f"class {cls} is not in 0..{self._classes_max - 1}")
