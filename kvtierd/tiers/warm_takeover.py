"""Taking over the arena of the daemon's life before: its chunks become chunks of this host tier, cut as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index import warm_rows
from kvtierd.index.block_table import BlockTable
from kvtierd.tiers.arena import Chunk, GenerationTable
from kvtierd.tiers.host_tier import _Cut
from kvtierd.tiers.warm_host import CHUNK, GENERATIONS, PROCESS, TABLE, WarmHostTier
from kvtierd.tiers.warm_table import KnownNamespace, WarmTable, WarmTableError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Slots of a class with a true row, and these rows ([n, 8], copies): whole blocks, or slots that were lent."""

    cls: SlotClass
    slots: Slots
    rows: warm_rows.Words64

    def of(self, which: npt.NDArray[np.bool_]) -> Found:
        """Those of a mask, [n]."""
        return Found(self.cls, self.slots[which], self.rows[which])


@dataclasses.dataclass(slots=True)
class Taken:
    """What there was. `reason` says why nothing of it could be used, "" where it was or there was nothing.

    `processes` are (pid, pidfd) of clients that may still write slots.
    """

    reason: str = ""
    namespaces: list[KnownNamespace] = dataclasses.field(default_factory=list)
    blocks: list[Found] = dataclasses.field(default_factory=list)
    lent: list[Found] = dataclasses.field(default_factory=list)
    processes: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def take_over(host: WarmHostTier, passed: list[tuple[str, int]], blocks: BlockTable) -> Taken:
    """Give the tier the memory that was passed, and its table; or a new one, when nothing was or it does not fit.

    All slots are free afterwards: the caller takes those of what it wants to keep. Descriptors that are no use are
    closed, and forgotten by the keeper.
    """
    taken = Taken()
    files: dict[str, int] = {}
    for name, fd in passed:
        if name[:1] == PROCESS and name[1:].isdigit():
            taken.processes.append((int(name[1:]), fd))
        elif name not in files and (name == TABLE or (name[:1] in {CHUNK, GENERATIONS} and name[1:].isdigit())):
            files[name] = fd
        else:
            _log.warning("a file was passed under the name %r, which nothing here has; it is closed", name)
            os.close(fd)
    table, next_table = None, 1
    if files:
        try:
            table, taken.namespaces = _table_of(host, files)
        except WarmTableError as error:
            taken.reason = f"what was kept of the host tier is not used: {error}"
            _log.warning("%s", taken.reason)
    if table is not None:
        next_table = _Adoption(host, table, files).run(taken)
    for name, fd in files.items():
        host.keeper.forget(name)
        with contextlib.suppress(OSError):  # mapping may have closed it
            os.close(fd)
    if table is None:
        table = WarmTable(host.chunk_bytes, host.slabs_max)
        host.keeper.keep(TABLE, table.fd)
    host.start(table, blocks, next_table)
    return taken


def _table_of(host: WarmHostTier, files: dict[str, int]) -> tuple[WarmTable, list[KnownNamespace]]:
    if TABLE not in files:
        raise WarmTableError("the block table is not among it")
    table = WarmTable(host.chunk_bytes, host.slabs_max, files[TABLE])
    del files[TABLE]
    try:
        return table, table.namespaces()
    except WarmTableError:
        host.keeper.forget(TABLE)
        table.close()
        raise


class _Adoption:
    """Takes out of `files` what becomes part of the tier."""

    def __init__(self, host: WarmHostTier, table: WarmTable, files: dict[str, int]) -> None:
        self._host, self._table, self._files = host, table, files
        self._generations: dict[int, tuple[SlotClass, GenerationTable]] = {}

    def run(self, taken: Taken) -> int:
        """Adopt every slab that has a record, and spare chunks; number of the next table of generations."""
        for slab in range(self._host.slabs_max):
            record = self._table.slab(slab)
            if record is None:
                continue
            try:
                self._adopt(taken, slab, record)
            except WarmTableError as error:
                _log.warning("host tier: chunk %d of the life before: %s; its blocks are lost", record["chunk"], error)
                self._table.uncut(slab)
        for name in [name for name in self._files if name[0] == CHUNK]:
            self._adopt_spare(int(name[1:]), name)
        for number, (cls, generations) in self._generations.items():
            if len(generations.free_parts) == generations.parts:
                generations.close()
                self._host.keeper.forget(f"{GENERATIONS}{number}")
            elif generations.free_parts:
                self._host._tables.setdefault(cls.id, []).append(generations)
        return max(self._generations, default=0) + 1

    def _adopt(self, taken: Taken, slab: int, record: Any) -> None:
        host, part = self._host, int(record["part"])
        name = f"{CHUNK}{record['chunk']}"
        if name not in self._files:
            raise WarmTableError("it was not passed")
        if not 0 < int(record["slot_bytes"]) <= host.chunk_bytes:
            raise WarmTableError(f"its slots have {record['slot_bytes']} bytes")
        cls = host.class_for(int(record["slot_bytes"]), int(record["layers"]), record["tenant"].decode())
        table = self._generation_table(cls, int(record["table"]))
        if part not in table.free_parts:
            raise WarmTableError(f"part {part} of its generations is another's")
        chunk = self._chunk(int(record["chunk"]), name)
        table.free_parts.remove(part)
        host.adopt_again(slab, chunk)
        host.spare.remove(slab)
        host.pool.add_slab(cls, slab)
        cut = host._cuts[slab] = _Cut(cls, table, part)
        slots = host.pool.slots_of(slab)
        shared = table.generations[cut.first : cut.first + cls.slots_per_slab]
        host.generation[slots] = shared
        host.shared[slab] = shared.ctypes.data
        self._sort(taken, cls, slab, slots, shared)

    def _sort(self, taken: Taken, cls: SlotClass, slab: int, slots: Slots, generations: npt.NDArray[np.uint64]) -> None:
        first, kinds = slab * self._table.stride, np.empty(slots.size, np.uint8)
        warm_rows.check(self._table.rows, first, generations, self._table.digests, kinds)
        for kind, out in ((warm_rows.BLOCK, taken.blocks), (warm_rows.LENT, taken.lent)):
            if (mine := np.flatnonzero(kinds == kind)).size:
                out.append(Found(cls, slots[mine], self._table.rows[first + mine]))

    def _generation_table(self, cls: SlotClass, number: int) -> GenerationTable:
        known = self._generations.get(number)
        if known is not None:
            return known[1]
        name = f"{GENERATIONS}{number}"
        if name not in self._files:
            raise WarmTableError("its generations were not passed")
        try:
            table = GenerationTable.again(cls.slots_per_slab, self._files[name])
        except ValueError as error:
            raise WarmTableError(f"its generations: {error}") from error
        table.number = number
        del self._files[name]
        self._generations[number] = (cls, table)
        return table

    def _chunk(self, number: int, name: str) -> Chunk:
        try:
            chunk = Chunk.again(number, self._host.chunk_bytes, self._files[name])
        except ValueError as error:
            raise WarmTableError(str(error)) from error
        del self._files[name]
        return chunk

    def _adopt_spare(self, number: int, name: str) -> None:
        """A chunk that belonged to no class."""
        if not self._host.missing:
            return
        try:
            chunk = self._chunk(number, name)
        except WarmTableError as error:
            _log.warning("host tier: chunk %d of the life before: %s", number, error)
        else:
            self._host.adopt_again(self._host.missing[-1], chunk)
