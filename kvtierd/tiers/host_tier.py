"""The host tier: slots in shared-memory chunks that local clients map."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Host
from kvtierd.core.checksum import Bytes
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index.memory import reserve
from kvtierd.policy.eviction import EvictionPolicy
from kvtierd.protocol.messages import SLOT_DTYPE
from kvtierd.protocol.service import ChunkFiles, Session
from kvtierd.tiers.arena import Chunk, Generations, GenerationTable
from kvtierd.tiers.slot_tier import SlotTier

Descriptors = npt.NDArray[np.void]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class _Cut:
    """A chunk that was cut into slots of a class: where their generations are, as clients see them."""

    cls: SlotClass
    table: GenerationTable
    part: int

    @property
    def first(self) -> int:
        """Place in the table of the chunk's first slot."""
        return self.part * self.cls.slots_per_slab


class HostTier(SlotTier):
    """Chunks are made one by one, in the background, until the tier has its capacity; a slab is one chunk."""

    def __init__(self, settings: Host, policy: EvictionPolicy) -> None:
        self.slabs_max = settings.capacity // settings.chunk_bytes
        super().__init__(settings.chunk_bytes, self.slabs_max, policy)
        self.chunk_bytes = settings.chunk_bytes
        self.missing = list(range(self.slabs_max - 1, -1, -1))
        """Slabs that have no memory yet."""
        self._chunks: list[Chunk | None] = [None] * self.slabs_max
        self._slab_of_number: dict[int, int] = {}
        self._cuts: list[_Cut | None] = [None] * self.slabs_max
        self._tables: dict[int, list[GenerationTable]] = {}
        """By class: tables with room for another chunk."""
        self.numbers = np.zeros(self.slabs_max, np.uint32)
        self.generation: Generations = reserve((self.pool.slots_max,), np.uint64, huge=False)
        self.shared = np.zeros(self.slabs_max, np.int64)
        """By slab: the address at which clients see the generations of its slots, for compiled code."""
        self._next_number = 1

    def new_number(self) -> int:
        """Number of the next chunk; never reused within an epoch."""
        self._next_number += 1
        return self._next_number - 1

    def adopt(self, slab: int, chunk: Chunk) -> None:
        """A slab has got its memory."""
        self._chunks[slab] = chunk
        self._slab_of_number[chunk.number] = slab
        self.numbers[slab] = chunk.number
        self.spare.append(slab)

    def chunks(self) -> list[Chunk]:
        """All chunks that are there."""
        return [chunk for chunk in self._chunks if chunk is not None]

    def drop(self, slab: int) -> Chunk:
        """Take the memory of a slab without a class away; the caller closes it."""
        chunk, cut = self._chunks[slab], self._cuts[slab]
        assert chunk is not None, f"slab {slab} has no memory"
        self._chunks[slab] = self._cuts[slab] = None
        self.shared[slab] = 0
        del self._slab_of_number[chunk.number]
        if cut is not None:
            self._give_part(cut)
        self.missing.append(slab)
        return chunk

    def attach_slab(self, cls: SlotClass, slab: int) -> bool:
        """Cut a chunk into slots of a class."""
        try:
            cut = self._take_part(cls)
        except OSError as error:
            # A page of memory or a descriptor: whoever wanted the slots finds none, and may ask again.
            _log.error("host tier: a generation table could not be made: %s", error.strerror or error)
            return False
        super().attach_slab(cls, slab)
        self._cuts[slab] = cut
        shared = cut.table.generations[cut.first : cut.first + cls.slots_per_slab]
        # On from what a chunk left there that is gone: a reader that still has it mapped sees its slots change.
        shared += np.uint64(1)
        self.shared[slab] = shared.ctypes.data
        self.generation[self.pool.slots_of(slab)] = shared
        return True

    def chunk_of(self, number: int, tenant: str) -> tuple[Chunk, SlotClass] | None:
        """The chunk with this number, if it is cut into slots of this tenant."""
        slab = self._slab_of_number.get(number)
        if slab is None or (cut := self._cuts[slab]) is None or cut.cls.tenant != tenant:
            return None
        chunk = self._chunks[slab]
        assert chunk is not None
        return chunk, cut.cls

    def chunk_files(self, number: int, tenant: str) -> ChunkFiles | None:
        """What a client of a tenant gets to map a chunk (protocol.service.ChunkSource)."""
        found = self.chunk_of(number, tenant)
        if found is None:
            return None
        chunk, cls = found
        cut = self._cut(self._slab_of_number[number])
        return ChunkFiles(
            number, chunk.chunk_bytes, cls.slot_bytes, cls.slots_per_slab, chunk.data_fd, cut.table.fd, cut.first
        )

    def shared_generations(self, number: int) -> Generations:
        """Generations of a chunk's slots in the table that clients see, a view."""
        cut = self._cut(self._slab_of_number[number])
        return cut.table.generations[cut.first : cut.first + cut.cls.slots_per_slab]

    def free(self, cls: SlotClass, slots: Slots) -> None:
        """Put slots back; their generation moves on first, so that a late reader sees that they changed hands."""
        self.generation[slots] += np.uint64(1)
        slabs, indices = self.pool.slabs_of(slots), self.pool.indices(slots)
        first = slabs.item(0)
        for slab in (first,) if np.count_nonzero(slabs == first) == slabs.size else np.unique(slabs).tolist():
            cut, mine = self._cut(slab), slabs == slab
            cut.table.generations[cut.first + indices[mine]] = self.generation[slots[mine]]
        super().free(cls, slots)

    def view(self, cls: SlotClass, slot: int) -> Bytes:
        """The memory of a slot, [slot_bytes] uint8."""
        slab, index = self.pool.place(slot)
        begin, chunk = index * cls.slot_bytes, self._chunks[slab]
        assert chunk is not None
        return chunk.memory[begin : begin + cls.slot_bytes]

    def views(self, cls: SlotClass, slots: Slots) -> list[Bytes]:
        """The memory of slots, as `view` of each."""
        size, slabs = cls.slot_bytes, self.pool.slabs_of(slots).tolist()
        begins = self.pool.offsets(cls, slots).tolist()
        memory = {slab: chunk.memory for slab in set(slabs) if (chunk := self._chunks[slab]) is not None}
        return [memory[slab][begin : begin + size] for slab, begin in zip(slabs, begins, strict=True)]

    def describe(self, cls: SlotClass, slots: Slots, out: Descriptors) -> None:
        """Fill slot descriptors (SLOT_DTYPE) for the wire: chunk, offset, generation."""
        out["chunk"] = self.numbers[self.pool.slabs_of(slots)]
        out["offset"] = self.pool.offsets(cls, slots)
        out["generation"] = self.generation[slots]

    def absent(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these, -1 for no slot, hold nothing that may be served as it is, [n]."""
        return slots < 0

    def unproven(self, slots: Slots) -> bool:  # noqa: ARG002 - for those that have some
        """Whether a block is among these that must be verified before it is served."""
        return False

    def withdraw(self, slots: Slots) -> None:
        """What these slots hold is not to be kept for the daemon's next life, where somebody keeps it at all."""

    @property
    def all_proven(self) -> bool:
        """Whether no block is left that must be verified before it is served."""
        return True

    def lent(self, slots: Slots, session: Session, reservation: int) -> None:
        """A client may write these slots from now on; called before it hears of them."""

    def published(self, slots: Slots, rows: npt.NDArray[np.int32]) -> None:
        """Filled slots are their rows' copies now; `settle` says so too."""

    def close(self) -> None:
        """Let go of all memory."""
        for chunk in self._chunks:
            if chunk is not None:
                chunk.close()
        for table in {id(table): table for table in self._all_tables()}.values():
            table.close()
        self._chunks = [None] * self.slabs_max
        self._cuts = [None] * self.slabs_max
        self._tables.clear()

    def _cut(self, slab: int) -> _Cut:
        cut = self._cuts[slab]
        assert cut is not None, f"slab {slab} has no class"
        return cut

    def _all_tables(self) -> Iterator[GenerationTable]:
        yield from (cut.table for cut in self._cuts if cut is not None)
        for tables in self._tables.values():
            yield from tables

    def _take_part(self, cls: SlotClass) -> _Cut:
        """Room for a chunk's generations in a table of its class, made when there is none. May raise OSError."""
        tables = self._tables.setdefault(cls.id, [])
        if not tables:
            tables.append(self._new_table(cls))
        table = tables[-1]
        part = table.free_parts.pop()
        if not table.free_parts:
            tables.pop()
        return _Cut(cls, table, part)

    def _new_table(self, cls: SlotClass) -> GenerationTable:
        return GenerationTable(cls.slots_per_slab)

    def _give_part(self, cut: _Cut) -> None:
        tables = self._tables[cut.cls.id]
        cut.table.free_parts.append(cut.part)
        if len(cut.table.free_parts) == 1 < cut.table.parts:
            tables.append(cut.table)
        if len(cut.table.free_parts) == cut.table.parts:
            if cut.table in tables:
                tables.remove(cut.table)
            cut.table.close()


def empty_descriptors(count: int) -> Descriptors:
    """Zeroed descriptors of shape [count]."""
    return np.zeros(count, SLOT_DTYPE)
