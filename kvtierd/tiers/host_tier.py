"""The host tier: slots in shared-memory chunks that local clients map."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Host
from kvtierd.core.checksum import Bytes
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.policy.eviction import EvictionPolicy
from kvtierd.protocol.messages import SLOT_DTYPE
from kvtierd.tiers.arena import Chunk
from kvtierd.tiers.slot_tier import SlotTier

Descriptors = npt.NDArray[np.void]


class HostTier(SlotTier):
    """Chunks are made one by one, in the background, until the tier has its capacity; a slab is one chunk."""

    def __init__(self, settings: Host, policy: EvictionPolicy) -> None:
        self.slabs_max = settings.capacity // settings.chunk_bytes
        super().__init__(settings.chunk_bytes, self.slabs_max, policy)
        self.chunk_bytes = settings.chunk_bytes
        self.missing = list(range(self.slabs_max - 1, -1, -1))
        """Slabs that have no memory yet."""
        self._chunks: dict[int, Chunk] = {}
        self._slab_of_number: dict[int, int] = {}
        self._slab_class: dict[int, SlotClass] = {}
        self._numbers = np.zeros(self.slabs_max, np.uint32)
        self._generation = np.ones(self.pool.row.size, np.uint64)
        self._next_number = 1

    def new_number(self) -> int:
        """Number of the next chunk; never reused within an epoch."""
        self._next_number += 1
        return self._next_number - 1

    def adopt(self, slab: int, chunk: Chunk) -> None:
        """A slab has got its memory."""
        self._chunks[slab] = chunk
        self._slab_of_number[chunk.number] = slab
        self._numbers[slab] = chunk.number
        first = slab * self.pool.stride
        chunk.generations[: self.pool.stride] = self._generation[first : first + self.pool.stride]
        self.spare.append(slab)

    def drop(self, slab: int) -> Chunk:
        """Take the memory of a slab without a class away; the caller closes it."""
        chunk = self._chunks.pop(slab)
        del self._slab_of_number[chunk.number]
        self._slab_class.pop(slab, None)
        self.missing.append(slab)
        return chunk

    def attach_slab(self, cls: SlotClass, slab: int) -> None:
        """Cut a chunk into slots of a class."""
        super().attach_slab(cls, slab)
        self._slab_class[slab] = cls

    def chunk_of(self, number: int, tenant: str) -> tuple[Chunk, SlotClass] | None:
        """The chunk with this number, if it is cut into slots of this tenant."""
        slab = self._slab_of_number.get(number, -1)
        cls = self._slab_class.get(slab)
        if cls is None or cls.tenant != tenant:
            return None
        return self._chunks[slab], cls

    def free(self, cls: SlotClass, slots: Slots) -> None:
        """Put slots back; their generation moves on first, so that a late reader sees that they changed hands."""
        self._generation[slots] += np.uint64(1)
        wide = slots.astype(np.int64)
        slabs = wide // self.pool.stride
        for slab in np.unique(slabs):
            mine = wide[slabs == slab]
            self._chunks[int(slab)].generations[mine - int(slab) * self.pool.stride] = self._generation[mine]
        super().free(cls, slots)

    def view(self, cls: SlotClass, slot: int) -> Bytes:
        """The memory of a slot, [slot_bytes] uint8."""
        slab, index = divmod(slot, self.pool.stride)
        begin = index * cls.slot_bytes
        return self._chunks[slab].memory[begin : begin + cls.slot_bytes]

    def describe(self, cls: SlotClass, slots: Slots, out: Descriptors) -> None:
        """Fill slot descriptors (SLOT_DTYPE) for the wire: chunk, offset, generation."""
        slabs = slots // self.pool.stride
        out["chunk"] = self._numbers[slabs]
        out["offset"] = self.pool.offsets(cls, slots)
        out["generation"] = self._generation[slots]

    def close(self) -> None:
        """Let go of all memory."""
        for chunk in self._chunks.values():
            chunk.close()
        self._chunks.clear()


def empty_descriptors(count: int) -> Descriptors:
    """Zeroed descriptors of shape [count]."""
    return np.zeros(count, SLOT_DTYPE)
