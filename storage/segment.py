"""A segment: its header on disk, and what the owner knows about the blocks in it (FORMAT.md §3)."""

from __future__ import annotations

import asyncio
import enum
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtierd.core.keys import Keys
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.interface import Extent, Extents
from kvtierd.storage.io import SegmentFile
from kvtierd.storage.layout import FIRST_RECORD
from kvtierd.storage.record import Kill, Life

NO_TAG = -1
Column = npt.NDArray[np.uint64]


class RowState(enum.IntEnum):
    """Where a block's row stands."""

    PENDING = 0  # placed, its write is not acknowledged
    LIVE = 1
    DEAD = 2  # failed, deleted, or about to be recycled


class Rows:
    """Blocks of a segment as columns, in the order of their offsets.

    `sequences` are origins, which a kill names. `prints` are 64 bits of namespace and key: a stale extent is told from
    the block that has its place now.
    """

    __slots__ = ("lengths", "offsets", "prints", "sequences", "states", "tags")

    def __init__(self) -> None:
        self.offsets = array("Q")
        self.lengths = array("Q")
        self.sequences = array("Q")
        self.prints = array("Q")
        self.tags = array("q")
        self.states = bytearray()

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def of(cls, offsets: Column, lengths: Column, sequences: Column, prints: Column) -> Rows:
        """Live rows without tags, from columns sorted by offset."""
        rows = cls()
        pairs = (rows.offsets, offsets), (rows.lengths, lengths), (rows.sequences, sequences), (rows.prints, prints)
        for target, column in pairs:
            target.frombytes(np.ascontiguousarray(column, np.uint64).tobytes())
        rows.tags = array("q", [NO_TAG]) * len(offsets)
        rows.states = bytearray([RowState.LIVE]) * len(offsets)
        return rows

    def add(self, offset: int, length: int, sequence: int, fingerprint: int, tag: int) -> int:
        """Append a pending row; returns its number."""
        self.offsets.append(offset)
        self.lengths.append(length)
        self.sequences.append(sequence)
        self.prints.append(fingerprint)
        self.tags.append(tag)
        self.states.append(RowState.PENDING)
        return len(self.offsets) - 1

    def find(self, extent: Extent) -> int:
        """The live row at an extent, or -1."""
        row = bisect_left(self.offsets, extent.offset)
        if row == len(self.offsets) or self.offsets[row] != extent.offset or self.lengths[row] != extent.length:
            return -1
        return row if self.states[row] == RowState.LIVE else -1

    def are_live(self, extents: Extents, prints: Column) -> npt.NDArray[np.bool_]:
        """At which of these extents lies a live block of that fingerprint, [n]."""
        if not self.offsets:
            return np.zeros(len(extents), np.bool_)
        offsets = np.frombuffer(self.offsets, np.uint64)
        places = extents.page.astype(np.uint64) * np.uint64(PAGE_BYTES)
        rows = np.minimum(np.searchsorted(offsets, places), offsets.size - 1)
        found: npt.NDArray[np.bool_] = offsets[rows] == places
        found &= np.frombuffer(self.lengths, np.uint64)[rows] == extents.length.astype(np.uint64)
        found &= np.frombuffer(self.prints, np.uint64)[rows] == prints
        found &= np.frombuffer(self.states, np.uint8)[rows] == RowState.LIVE
        return found

    def adopt(self, extents: Extents, tags: npt.NDArray[np.int64]) -> None:
        """Set the tags of the live rows at these extents."""
        offsets = np.frombuffer(self.offsets, np.uint64)
        places = extents.page.astype(np.uint64) * np.uint64(PAGE_BYTES)
        rows = np.minimum(np.searchsorted(offsets, places), max(offsets.size - 1, 0))
        if not offsets.size:
            return
        same = (offsets[rows] == places) & (np.frombuffer(self.lengths, np.uint64)[rows] == extents.length)
        same &= np.frombuffer(self.states, np.uint8)[rows] == RowState.LIVE
        held = np.frombuffer(self.tags, np.int64).copy()
        held[rows[same]] = tags[same]
        self.tags = array("q", held.tobytes())

    def live(self) -> Iterator[int]:
        """Numbers of the live rows."""
        return iter(np.flatnonzero(np.frombuffer(bytes(self.states), np.uint8) == RowState.LIVE).tolist())


def fingerprint(namespace: bytes, key: bytes) -> int:
    """64 bits of a digest and a key."""
    return int.from_bytes(namespace[:8], "little") ^ int.from_bytes(key[:8], "little")


def fingerprints(namespace: bytes, keys: Keys) -> Column:
    """The same for many keys of a namespace, [n]."""
    heads = np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
    found: Column = heads ^ np.uint64(int.from_bytes(namespace[:8], "little"))
    return found


class Unsynced:
    """What was written to a segment since its last sync.

    `blocks` are rows, each with the kill that would strike it out; `placed` their sequence numbers, block sums and
    codecs; `kills` those of tombstones. `dirty` is also true for a write that failed: part of it may have landed.
    """

    __slots__ = ("blocks", "dirty", "kills", "placed")

    def __init__(self) -> None:
        self.dirty = False
        self.blocks: list[tuple[int, Kill]] = []
        self.placed: list[tuple[int, int, int]] = []
        self.kills: list[Kill] = []


class Segment:
    """One segment as its owner, the loop, sees it. `head` is where the next record goes.

    `pins` counts requests in flight: the segment is not recycled before it is back to 0. `life` is None while the
    segment holds nothing; `retiring` says that its extents were announced and it waits for its last requests.
    `open_runs` are the offsets of write requests under way; `journaled` is what the journal knows of head and state;
    `unreadable` says that a scan could not read all of it, so that a later one should; `doubtful` that no sync of what
    was written in this life has ever succeeded.
    """

    def __init__(self, number: int, path: Path, file: SegmentFile, size_bytes: int) -> None:
        self.number = number
        self.path = path
        self.file = file
        self.size_bytes = size_bytes
        self.pins = 0
        self.clear()
        self._idle: asyncio.Future[None] | None = None

    def clear(self) -> None:
        """Forget every record: the segment has no life."""
        self.life: Life | None = None
        self.retiring = False
        self.head = FIRST_RECORD
        self.rows = Rows()
        self.live_bytes = 0
        self.live_count = 0
        self.namespaces: set[bytes] = set()
        self.unsynced = Unsynced()
        self.open_runs: list[int] = []
        self.journaled: tuple[int, bool] | None = None
        self.unreadable = False
        self.doubtful = False

    @property
    def is_void(self) -> bool:
        """Whether nothing in it counts: no sync of it succeeded, and all that it was given has failed or is owed again,
        tombstones too."""
        waiting = self.pins or self.unsynced.blocks or self.unsynced.kills or RowState.PENDING in self.rows.states
        return self.doubtful and not self.live_count and not waiting

    @property
    def settled_head(self) -> int:
        """Before this offset no write is under way: what lies there has its outcome."""
        return min(self.open_runs, default=self.head)

    @property
    def room_bytes(self) -> int:
        """What fits behind the head."""
        return self.life.end_bytes - self.head if self.life is not None else 0

    def begin_run(self, offset: int) -> None:
        """A write request at an offset starts."""
        self.open_runs.append(offset)
        self.pin()

    def end_run(self, offset: int) -> None:
        """A write request has its outcome, and that is entered."""
        self.open_runs.remove(offset)
        self.unpin()

    def take_unsynced(self) -> Unsynced:
        """What a sync that starts now will cover."""
        unsynced, self.unsynced = self.unsynced, Unsynced()
        return unsynced

    def is_live(self, row: int) -> bool:
        """Whether a row's block can be read."""
        return self.rows.states[row] == RowState.LIVE

    def is_pending(self, row: int) -> bool:
        """Whether a row's block is still on its way."""
        return self.rows.states[row] == RowState.PENDING

    def set_live(self, row: int) -> None:
        """A block's write is done: it can be read."""
        self.rows.states[row] = RowState.LIVE
        self.live_bytes += self.rows.lengths[row]
        self.live_count += 1

    def set_dead(self, row: int) -> None:
        """A block is no longer served."""
        if self.rows.states[row] == RowState.LIVE:
            self.live_bytes -= self.rows.lengths[row]
            self.live_count -= 1
        self.rows.states[row] = RowState.DEAD

    def extent(self, row: int) -> Extent:
        """Where a row's block lies."""
        return Extent(self.number, self.rows.offsets[row], self.rows.lengths[row])

    def pin(self) -> None:
        """A request on this segment starts."""
        self.pins += 1

    def unpin(self) -> None:
        """A request on this segment has ended."""
        self.pins -= 1
        assert self.pins >= 0
        if self.pins == 0 and self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    async def idle(self) -> None:
        """Return when no request is in flight."""
        while self.pins:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)
