"""A host tier that is left for the daemon's next life: its chunks in somebody's keeping, and a table of their slots."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Host
from kvtierd.gpu.slot_pool import ORPHAN, SlotClass, Slots
from kvtierd.index import warm_rows
from kvtierd.index.block_table import BlockTable
from kvtierd.policy.eviction import EvictionPolicy
from kvtierd.protocol.service import Session
from kvtierd.tiers.arena import Chunk, GenerationTable
from kvtierd.tiers.compress_forms import EXTENT
from kvtierd.tiers.host_tier import HostTier
from kvtierd.tiers.warm_table import WarmTable
from kvtierd.tiers.warm_verify import Unverified

_log = logging.getLogger(__name__)

TABLE: Final = "t"
"""Name of the block table among what is kept; short, since all names together are one variable of the environment."""
CHUNK: Final = "c"
GENERATIONS: Final = "g"
PROCESS: Final = "p"
"""Before the number of a chunk, of a table of generations, and of a client's process (a pidfd)."""
SNAPSHOT: Final = "s"
"""Name of the snapshot (kvtierd.tiers.warm_snapshot)."""


class Keeper(Protocol):
    """Who keeps open files over the daemon's end: systemd's file descriptor store, or whoever starts us."""

    def keep(self, name: str, fd: int) -> None:
        """Keep a copy of a descriptor under a name."""
        ...

    def forget(self, name: str) -> None:
        """Close all that is kept under a name."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The keeper, and what it has handed back from the life before: names and descriptors, which become ours."""

    keeper: Keeper
    passed: list[tuple[str, int]]


class WarmHostTier(HostTier):
    """As HostTier; what becomes of its slots it writes down in `table`.

    `start` gives it the table, new or of the life before (kvtierd.tiers.warm_takeover).
    """

    def __init__(self, settings: Host, policy: EvictionPolicy, keeper: Keeper) -> None:
        super().__init__(settings, policy)
        self.keeper = keeper
        self.table: WarmTable
        self._blocks: BlockTable
        self._next_table = 1
        self._when = 1
        self._writers: dict[int, set[int]] = {}
        """Sessions that were lent slots, by process."""
        self.unverified = Unverified(self.pool.slots_max)

    def start(self, table: WarmTable, blocks: BlockTable, next_table: int) -> None:
        """Write down in this table what becomes of slots; their blocks are rows of `blocks`."""
        self.table, self._blocks, self._next_table = table, blocks, next_table

    def settle(self, cls: SlotClass, slots: Slots, rows: npt.NDArray[np.int32]) -> None:
        """Filled slots become their rows' copies."""
        super().settle(cls, slots, rows)
        self.published(slots, rows)

    def published(self, slots: Slots, rows: npt.NDArray[np.int32]) -> None:
        """Write down which blocks these slots hold."""
        blocks, pool = self._blocks, self.pool
        self._when += warm_rows.publish(
            self.table.rows, pool.run_slab, pool.run_first, pool.shift, self.table.stride, self.generation,
            self.table.digests, blocks.records, blocks.words, blocks.octets, blocks.block_sum, EXTENT, self._when,
            slots, rows,
        )  # fmt: skip

    def disown(self, cls: SlotClass, slots: Slots) -> None:
        """Slots that had rows have none any more: nor in the next life."""
        self.withdraw(slots)
        self.unverified.discard(slots)
        super().disown(cls, slots)

    def withdraw(self, slots: Slots) -> None:
        """The rows of these slots are not true any more."""
        pool = self.pool
        warm_rows.withdraw(self.table.rows, pool.run_slab, pool.run_first, pool.shift, self.table.stride, slots)

    def absent(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these, -1 for no slot, hold nothing that may be served as it is, [n]."""
        missing = super().absent(slots)
        return missing | self.unverified.among(slots) if self.unverified.pending else missing

    def unproven(self, slots: Slots) -> bool:
        """Whether a block of the life before is among these that must be verified before it is served."""
        return self.unverified.pending > 0 and bool(self.unverified.among(slots).any())

    @property
    def all_proven(self) -> bool:
        """Whether no block of the life before is left to be verified."""
        return self.unverified.pending == 0

    def lent(self, slots: Slots, session: Session, reservation: int) -> None:
        """A client writes these slots until it commits or aborts, and may do so beyond the daemon's end."""
        pool = self.pool
        owner = np.array([session.pid, reservation, *np.frombuffer(session.token, "<u8")], np.uint64)
        warm_rows.lend(
            self.table.rows, pool.run_slab, pool.run_first, pool.shift, self.table.stride, self.generation, owner,
            slots,
        )  # fmt: skip
        if session.pid not in self._writers:
            self.keeper.keep(f"{PROCESS}{session.pid}", session.pidfd)
        self.writers_of(session.pid).add(session.id)

    def writers_of(self, pid: int) -> set[int]:
        """Sessions of a process that may write slots; the process is kept while there are any."""
        return self._writers.setdefault(pid, set())

    def writer_gone(self, session: Session) -> None:
        """Nothing of a session can be written any more."""
        self.writer_gone_of(session.pid, session.id)

    def writer_gone_of(self, pid: int, session: int) -> None:
        """As `writer_gone`."""
        sessions = self._writers.get(pid)
        if sessions is None:
            return
        sessions.discard(session)
        if not sessions:
            del self._writers[pid]
            self.keeper.forget(f"{PROCESS}{pid}")

    def has_class(self, slab: int) -> bool:
        """Whether a slab is cut into slots."""
        return self._cuts[slab] is not None

    def take(self, cls: SlotClass, slots: Slots) -> None:
        """These free slots of the life before are somebody's, with one hold each, as with `take_free`."""
        cleared = cls.free.clear(slots.astype(np.int64))
        assert cleared == slots.size, "a slot of the life before is taken"
        cls.free_count -= cleared
        self.pool.row[slots] = ORPHAN
        self.pool.holds[slots] = 1

    def adopt(self, slab: int, chunk: Chunk) -> None:
        """A slab has got its memory."""
        super().adopt(slab, chunk)
        self.keeper.keep(f"{CHUNK}{chunk.number}", chunk.data_fd)

    def adopt_again(self, slab: int, chunk: Chunk) -> None:
        """A slab has got the memory of a chunk that is kept already."""
        self.missing.remove(slab)
        super().adopt(slab, chunk)
        self._next_number = max(self._next_number, chunk.number + 1)

    def attach_slab(self, cls: SlotClass, slab: int) -> bool:
        """Cut a chunk into slots of a class."""
        if not super().attach_slab(cls, slab):
            return False
        cut, chunk = self._cut(slab), self._chunks[slab]
        assert chunk is not None
        try:
            self.table.cut(
                slab, cls.slots_per_slab, chunk=chunk.number, slot_bytes=cls.slot_bytes, layers=cls.layers,
                table=cut.table.number, part=cut.part, tenant=cls.tenant,
            )  # fmt: skip
        except OSError as error:
            _log.error("host tier: there is no memory for the block table: %s", error.strerror or error)
            self.pool.remove_slab(slab)
            self._cuts[slab] = None
            self._give_part(cut)
            return False
        return True

    def drop(self, slab: int) -> Chunk:
        """Take the memory of a slab away, from the next life too."""
        self.table.uncut(slab)
        chunk = super().drop(slab)
        self.keeper.forget(f"{CHUNK}{chunk.number}")
        return chunk

    def close(self) -> None:
        """Let go of all memory; what is kept goes on."""
        super().close()
        self.table.close()

    def _new_table(self, cls: SlotClass) -> GenerationTable:
        table = GenerationTable(cls.slots_per_slab, lasting=True)
        table.number = self._next_table
        self._next_table += 1
        self.keeper.keep(f"{GENERATIONS}{table.number}", table.own_fd)
        return table

    def _give_part(self, cut: Any) -> None:
        super()._give_part(cut)
        if cut.table.closed:
            self.keeper.forget(f"{GENERATIONS}{cut.table.number}")
