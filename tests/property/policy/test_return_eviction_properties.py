"""The default policy against a plain model of who comes before whom, under random lives of prompts."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import ReturnModel

SLOTS = 24
CLASS = 1
SECOND = 1_000_000_000


class Lives(RuleBasedStateMachine):
    """Prompts are paths in a small tree; a block's key is its path, its slot any free one."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.rng = np.random.default_rng(seed)
        self.model = ReturnModel(SLOTS, seed=seed, records=64)
        self.policy = ReturnEviction(SLOTS, self.model, 2)
        self.slot_of: dict[tuple[int, ...], int] = {}
        self.holds = np.zeros(SLOTS, np.int32)
        self.linked: set[tuple[int, ...]] = set()
        self.now = 0

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6), step=st.sampled_from([0, 1, 30, 4000]))
    def request(self, path, step):
        """Use a prompt: those of its blocks that fit get slots, from the head on."""
        self.now += step * SECOND
        names = [tuple(path[: end + 1]) for end in range(len(path))]
        free = sorted(set(range(SLOTS)) - set(self.slot_of.values()))
        for name in names:
            if name not in self.slot_of and not free:
                break
            if name not in self.slot_of:
                self.slot_of[name] = free.pop(int(self.rng.integers(len(free))))
        slots = [self.slot_of.get(name, -1) for name in names]
        keys = np.array([hash_of(name) for name in names], np.uint64)
        self.policy.used(CLASS, np.array(slots, np.int32), self.model.observe(keys, 0, self.now))
        for name in names[1:]:
            if name in self.slot_of and name[:-1] in self.slot_of:
                self.linked.add(name)

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(0, 2))
    def hold(self, slot, count):
        """A lease comes or goes."""
        self.holds[slot] = count

    @rule(count=st.integers(0, SLOTS), scan=st.integers(0, 2 * SLOTS), kept=st.floats(0, 1))
    def evict(self, count, scan, kept):
        """Ask for victims and let some of them go."""
        victims = self.policy.victims(CLASS, self.holds, count, scan).tolist()
        assert len(victims) <= min(count, scan)
        assert len(set(victims)) == len(victims)
        assert not self.holds[victims].any(), "a held slot was named"
        name_of = {slot: name for name, slot in self.slot_of.items()}
        assert set(victims) <= set(name_of), "a slot without a block was named"
        gone = set()
        for slot in victims:
            after = {name for name in self.slot_of if name[:-1] == name_of[slot] and name in self.linked}
            assert after <= gone, "a kept block would come after a hole"
            gone.add(name_of[slot])
        self._drop([slot for slot in victims if self.rng.random() >= kept])

    @rule(pick=st.integers(0, SLOTS - 1))
    def delete(self, pick):
        """Somebody else drops a block, whatever comes after it."""
        if self.slot_of:
            self._drop([sorted(self.slot_of.values())[pick % len(self.slot_of)]])

    def _drop(self, slots):
        self.policy.removed(CLASS, np.array(slots, np.int32))
        for name in [name for name, slot in self.slot_of.items() if slot in slots]:
            del self.slot_of[name]
            # What came after it comes after nothing, until a request tells again.
            self.linked -= {name} | {other for other in self.linked if other[:-1] == name}

    @invariant()
    def everything_unheld_can_go(self):
        """Nothing is lost: with no holds every block is a victim."""
        if hasattr(self, "policy"):
            nobody = np.zeros(SLOTS, np.uint16)
            named = self.policy.victims(CLASS, nobody, SLOTS, 10 * SLOTS).tolist()
            assert sorted(named) == sorted(self.slot_of.values())


def hash_of(name: tuple[int, ...]) -> int:
    """A number for a path, the same in every process."""
    value = 7
    for part in name:
        value = (value * 1_000_003 + part + 1) % (1 << 64)
    return value


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
