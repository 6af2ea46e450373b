"""Reclaiming ahead: the oldest segment is emptied before its room is needed, and what is hot in it is written again.

A full store recycles its segments in the order in which they were filled. A block that is still in use when its turn
comes moves to the newest segment, within a share of what a segment holds, so that the bytes written stay bounded: with
a share s every byte that is stored costs at most 1 / (1 - s) bytes of the device.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.errors import StorageError
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import MIB
from kvtierd.storage.appender import Appender
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.interface import Extent, WriteItem
from kvtierd.storage.payloads import read_record
from kvtierd.storage.pool import IoPool
from kvtierd.storage.record import Kind, RecordHeader, decode, stored_sums
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import NO_TAG, Segment
from kvtierd.storage.write_path import WritePath
from kvtierd.storage.writer import Draft

_log = logging.getLogger(__name__)

REWRITE_SHARE = 0.2
"""Most of a segment that is written again: write amplification stays below 1.25."""
BATCH_BYTES = 8 * MIB
"""Read and written at a time: bounds the memory, and lets requests come between."""

Heats = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]
"""Heat of blocks by their tags; 0 is cold and not worth its bytes."""
Moved = Callable[[list[tuple[int, Extent, Extent]]], list[bool]]
"""Told (tag, old place, new place) of blocks that lie elsewhere now; says which its caller still holds there."""


class _Flush(Protocol):
    async def __call__(self) -> None: ...


@dataclasses.dataclass(slots=True)
class _Copy:
    """A hot block on its way: its row in the old segment, and its bytes once they are read and verified."""

    row: int
    extent: Extent
    header: RecordHeader | None = None
    data: Bytes | None = None
    sums: Sums | None = None


class Rewriter:
    """Empties the oldest segment when none is free. One run at a time."""

    def __init__(
        self,
        ring: Ring,
        pool: IoPool,
        appender: Appender,
        writes: WritePath,
        flush: _Flush,
        namespaces: dict[bytes, Namespace],
        counters: Counter[str],
    ) -> None:
        self._ring = ring
        self._pool = pool
        self._appender = appender
        self._writes = writes
        self._flush = flush
        self._namespaces = namespaces
        self._counters = counters
        self.heats: Heats | None = None
        self.moved: Moved = lambda told: [False] * len(told)

    async def make_room(self) -> None:
        """Empty the oldest segment, if there is no other place to go on.

        A disk that fails leaves all as it is: the next `advance` finds that out, and says so to whoever writes.
        """
        segment = self._ring.oldest
        if self.heats is None or segment is None or self._ring.has_room():
            return
        try:
            await self._rewrite_hot(segment)
            await self._flush()
            await self._appender.alone(lambda: self._ring.reclaim_if_oldest(segment))
        except StorageError as error:
            _log.warning("nvme reclaim: %s", error)

    async def _rewrite_hot(self, segment: Segment) -> None:
        copies, life = self._hot_rows(segment), segment.life
        begin, size = 0, 0
        for number, copy in enumerate(copies):
            size += copy.extent.length
            if segment.life is not life or segment.retiring:
                return
            if size >= BATCH_BYTES or number == len(copies) - 1:
                await self._rewrite(segment, copies[begin : number + 1])
                begin, size = number + 1, 0

    def _hot_rows(self, segment: Segment) -> list[_Copy]:
        """The hottest live blocks, as many as the share allows, in the order of their places."""
        assert self.heats is not None
        rows = np.array([row for row in segment.rows.live() if segment.rows.tags[row] != NO_TAG], np.int64)
        if not rows.size:
            return []
        heats = self.heats(np.array([segment.rows.tags[row] for row in rows.tolist()], np.int64))
        order = np.argsort(-heats, kind="stable")
        lengths = np.array([segment.rows.lengths[row] for row in rows[order].tolist()], np.int64)
        chosen = order[(np.cumsum(lengths) <= REWRITE_SHARE * segment.size_bytes) & (heats[order] > 0)]
        return [_Copy(row, segment.extent(row)) for row in np.sort(rows[chosen]).tolist()]

    async def _rewrite(self, segment: Segment, copies: list[_Copy]) -> None:
        """Copy blocks to the head, tell their owner, and give up the old places.

        Should the segment be recycled meanwhile, its blocks were announced as gone: then no copy is wanted.
        """
        rows, life = segment.rows, segment.life
        segment.pin()
        try:
            await self._pool.read_patiently(lambda scratch: _read_all(segment, copies, scratch))
        finally:
            segment.unpin()
        good = [copy for copy in copies if copy.header is not None and copy.header.namespace in self._namespaces]
        drafts = self._writes.drafts([self._item(rows.tags[copy.row], copy) for copy in good])
        for draft, copy in zip(drafts, good, strict=True):
            assert copy.header is not None
            draft.rewrite, draft.origin = True, copy.header.origin
        await self._writes.write(drafts)
        places = self._writes.acknowledge(drafts)
        told = [
            (rows.tags[copy.row], copy.extent, place, draft, copy.row)
            for copy, place, draft in zip(good, places, drafts, strict=True)
            if isinstance(place, Extent)
        ]
        if segment.life is not life or segment.retiring:
            self._writes.disown([draft for _, _, _, draft, _ in told])
            return
        kept = self.moved([(tag, old, new) for tag, old, new, _, _ in told])
        refused: list[Draft] = []
        for (_, _, _, draft, row), is_kept in zip(told, kept, strict=True):
            if is_kept and segment.is_live(row):
                segment.set_dead(row)
                self._counters["rewritten_blocks"] += 1
            else:
                # Its owner gave it up meanwhile, or has a newer one: a kill of this origin strikes out both copies.
                refused.append(draft)
        self._writes.disown(refused)

    def _item(self, tag: int, copy: _Copy) -> WriteItem:
        assert copy.header is not None
        assert copy.data is not None
        assert copy.sums is not None
        geometry = self._namespaces[copy.header.namespace].geometry
        return WriteItem(copy.header.namespace, copy.header.key, geometry, copy.data, copy.sums, tag, copy.header.codec)


def _read_all(segment: Segment, copies: list[_Copy], scratch: Scratch) -> None:
    """Read what can be read; what cannot, or is not what its header says, stays where it is and goes with its segment.
    The bytes are verified when they are written again."""
    for copy in copies:
        try:
            memory = read_record(segment.file, copy.extent.offset, copy.extent.length, scratch)
        except OSError as error:
            _log.warning("nvme reclaim: segment %d at %d: %s", segment.number, copy.extent.offset, error)
            continue
        assert segment.life is not None
        header = decode(memory, segment.life, copy.extent.offset)
        if header is not None and header.kind is Kind.BLOCK and header.length == copy.extent.length:
            copy.header = header
            copy.sums = stored_sums(memory, header).astype(np.uint64)
            copy.data = memory[header.header_bytes :]
