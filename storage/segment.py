"""A segment: its header on disk, and what the owner knows about the blocks in it (FORMAT.md §3)."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.interface import Extent, Extents
from kvtierd.storage.io import SegmentFile, read_exact, write_exact
from kvtierd.storage.layout import CHECKED_FROM, FIRST_RECORD, READABLE_VERSIONS, SEGMENT, SEGMENT_MAGIC
from kvtierd.storage.record import Kill, Life

NO_TAG = -1
Column = npt.NDArray[np.uint64]


def encode_header(life: Life, uuid: bytes, page: Bytes) -> None:
    """Write a segment header into `page` ([4096] uint8)."""
    page[:] = 0
    fields = (life.version, life.segment, uuid, life.generation, life.salt, life.size_bytes, life.free)
    SEGMENT.pack_into(page.data, 0, SEGMENT_MAGIC, 0, *fields)
    checksum = xxhash.xxh3_64_intdigest(page[CHECKED_FROM:].data)
    page[8:16] = np.frombuffer(checksum.to_bytes(8, "little"), np.uint8)


def decode_header(page: Bytes, segment: int, uuid: bytes) -> Life | None:
    """Read a segment header; None unless it is valid, of this store and this segment."""
    magic, checksum, version, number, owner, generation, salt, size, free = SEGMENT.unpack_from(page.data)
    if magic != SEGMENT_MAGIC or xxhash.xxh3_64_intdigest(page[CHECKED_FROM:PAGE_BYTES].data) != checksum:
        return None
    if version not in READABLE_VERSIONS or number != segment or owner != uuid or size % PAGE_BYTES:
        return None
    return Life(segment, generation, salt, size, version, free=free == 1)


def write_headers(file: SegmentFile, life: Life, uuid: bytes, scratch: Scratch) -> None:
    """Write a life's header, both copies where its version has two, and return when they are on stable storage."""
    page = scratch.headers[:PAGE_BYTES]
    encode_header(life, uuid, page)
    write_exact(file, [page], 0, scratch)
    if life.version > 1:
        write_exact(file, [page], life.end_bytes, scratch)
    file.sync()


@dataclasses.dataclass(frozen=True, slots=True)
class FoundHeader:
    """The life that a segment file names; None when no copy is valid. `problem` says what is wrong, if anything."""

    life: Life | None
    problem: str = ""

    @property
    def lost(self) -> bool:
        """Whether there may be records that nobody can read."""
        return self.life is None


def read_headers(file: SegmentFile, number: int, uuid: bytes, scratch: Scratch) -> FoundHeader:
    """Read both copies of a segment's header; the valid one of the larger generation counts."""
    size = file.size_bytes() // PAGE_BYTES * PAGE_BYTES
    first, cause = _read_header(file, 0, number, uuid, scratch)
    if first is not None and first.version == 1:
        return FoundHeader(first)
    second, second_cause = _read_header(file, max(size - PAGE_BYTES, 0), number, uuid, scratch)
    if first is not None and first == second:
        return FoundHeader(first)
    if first is None and second is None:
        return FoundHeader(None, f"its header {cause}, and the copy of it {second_cause}")
    if first is None or (second is not None and second.generation > first.generation):
        return FoundHeader(second, f"its header {cause or 'is of an earlier life'}; the copy of it counts")
    return FoundHeader(first, f"the copy of its header {second_cause or 'is of an earlier life'}")


def _read_header(file: SegmentFile, offset: int, number: int, uuid: bytes, scratch: Scratch) -> tuple[Life | None, str]:
    page = scratch.headers[:PAGE_BYTES]
    try:
        read_exact(file, [page], offset, scratch)
    except OSError as error:
        return None, f"cannot be read ({error.strerror or error})"
    life = decode_header(page, number, uuid)
    if life is not None and life.version > 1 and offset not in {0, life.end_bytes}:
        return None, "is not where it should be"
    return life, "" if life is not None else "is not valid"


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
        rows.tags.extend(NO_TAG for _ in range(len(offsets)))
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


class Unsynced:
    """What was written to a segment since its last sync.

    `blocks` are rows, each with the kill that would strike it out; `placed` their sequence numbers and block sums;
    `kills` those of tombstones. `dirty` is also true for a write that failed: part of it may have landed.
    """

    __slots__ = ("blocks", "dirty", "kills", "placed")

    def __init__(self) -> None:
        self.dirty = False
        self.blocks: list[tuple[int, Kill]] = []
        self.placed: list[tuple[int, int]] = []
        self.kills: list[Kill] = []


class Segment:
    """One segment as its owner, the loop, sees it. `head` is where the next record goes.

    `pins` counts requests in flight: the segment is not recycled before it is back to 0. `life` is None while the
    segment holds nothing; `retiring` says that its extents were announced and it waits for its last requests.
    `open_runs` are the offsets of write requests under way; `journaled` is what the journal knows of head and state;
    `unreadable` says that a scan could not read all of it, so that a later one should.
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
