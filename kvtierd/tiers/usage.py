"""What requests tell the eviction policies: which blocks they use, when, and what was there."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.core.clock import Clock
from kvtierd.core.keys import Keys
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.policy.admission import leading
from kvtierd.policy.returns import NO_USAGE, ReturnModel, Usage
from kvtierd.protocol.service import Session
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.sessions import state_of

Keys64 = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    """A request to store the blocks of a prefix, or of a part of one that comes after the block with the key `parent`.

    `chain` [n] has the rows of its blocks (-1: none), those at `position` are new.
    """

    session: Session
    entry: NamespaceEntry
    keys: Keys
    chain: Rows
    position: npt.NDArray[np.intp]
    parent: Keys | None


class Uses:
    """Observes requests and tells the policies of host and gpu. Without a model (LRU) there is nothing to observe."""

    def __init__(self, copies: Copies, model: ReturnModel | None, clock: Clock) -> None:
        self._copies = copies
        self._model = model
        self._clock = clock

    def read(
        self, session: Session, entry: NamespaceEntry, keys: Keys, rows: Rows, slots: Slots, parent: Keys | None
    ) -> None:
        """A request asks for the blocks `keys`; the first are there, in `rows` [n] and host `slots` [m <= n]."""
        if not slots.size:
            return
        usage = NO_USAGE
        if self._model is not None:
            now_ns = self._clock.now_ns()
            usage = self._model.observe(first_words(keys), rows.size, now_ns)
            state_of(session).requests.add(usage, now_ns)
        before = self.slot_before(parent, entry)
        self._tell(entry, self._copies.host_class(entry), slots, rows[: slots.size], usage, before)

    def old_slots(self, store: Store) -> Slots:
        """Host slots of a store's blocks that are there, [n + 1]: -1 for others, and first the one before them all."""
        rows = store.chain.copy()
        rows[store.position] = -1
        found = np.empty(rows.size + 1, np.int32)
        found[0] = self.slot_before(store.parent, store.entry)
        found[1:] = np.where(rows >= 0, self._copies.blocks.table.host_slot[rows], np.int32(-1))
        return found

    def stored(self, store: Store, cls: SlotClass, old: Slots, new: Slots) -> None:
        """A store has got the slots `new` for its first new blocks; `old` are those of `old_slots`."""
        if not len(store.keys):
            return
        slots = old[1:]
        usage = self._usage_of(store, slots >= 0)
        slots[store.position[: new.size]] = new
        self._tell(store.entry, cls, slots, store.chain, usage, int(old[0]))

    def _usage_of(self, store: Store, there: npt.NDArray[np.bool_]) -> Usage:
        if self._model is None:
            return NO_USAGE
        now_ns, words = self._clock.now_ns(), first_words(store.keys)
        requests = state_of(store.session).requests
        number = requests.find(store.keys, now_ns)
        if number < 0:
            usage = self._model.observe(words, leading(there), now_ns)
            requests.add(usage, now_ns)
            return usage
        usage = requests.usage(number)
        if usage.size < len(words):
            usage = self._model.observe(words, 0, now_ns, again=usage)
            requests.extend(number, usage)
        return usage

    def slot_before(self, parent: Keys | None, entry: NamespaceEntry) -> int:
        """Host slot of the block with this key, or -1."""
        if parent is None:
            return -1
        row = self._copies.blocks.row_of(parent, entry.number)
        return -1 if row < 0 else int(self._copies.blocks.table.host_slot[row])

    def _tell(self, entry: NamespaceEntry, cls: SlotClass, slots: Slots, rows: Rows, usage: Usage, before: int) -> None:
        """The first blocks of a request lie in these host slots and rows (-1: not there)."""
        self._copies.host.used(cls, slots, usage, before=before)
        gpu = self._copies.gpu
        if gpu is None or not gpu.used_bytes():
            return
        gpu_slots = np.where(rows >= 0, self._copies.blocks.table.gpu_slot[rows], np.int32(-1))
        if (gpu_slots >= 0).any():
            gpu.used(self._copies.gpu_class(entry), gpu_slots, usage)


def first_words(keys: Keys) -> Keys64:
    """The first 8 bytes of each key, [n] uint64: enough to tell blocks apart where a mistake costs nothing."""
    return keys[:, :8].copy().view(np.uint64)[:, 0]
