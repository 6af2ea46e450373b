"""The segments in the order they were filled: the newest is written, the oldest is recycled (FORMAT.md §3)."""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvtierd.core.units import PAGE_BYTES, format_bytes
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.headers import write_headers
from kvtierd.storage.interface import DiskError, Extent
from kvtierd.storage.io import SegmentFile, StorageIo, write_exact
from kvtierd.storage.layout import FIRST_RECORD, segment_name
from kvtierd.storage.pool import IoPool
from kvtierd.storage.record import Life
from kvtierd.storage.segment import NO_TAG, Segment
from kvtierd.storage.space import MIN_SEGMENTS, Plan, Punchable

T = TypeVar("T")

TRIAL_NAME = "trial-data"
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

Reclaimed = Callable[[list[tuple[int, Extent]]], None]


class Sequences:
    """Store-wide sequence numbers; generations are drawn from them too."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self) -> int:
        """The next number, never given before in this store."""
        self._next += 1
        return self._next - 1


class Ring:
    """Owns the segments. Only `advance` and `shrink` change the order, one call at a time (the appender's lock)."""

    def __init__(self, directory: Path, io: StorageIo, pool: IoPool, plan: Plan, uuid: bytes) -> None:
        self._directory = directory
        self._io = io
        self._pool = pool
        self.plan = plan
        self._uuid = uuid
        self._segments: dict[int, Segment] = {}
        self._sealed: deque[Segment] = deque()
        self._free: list[Segment] = []
        self.active: Segment | None = None
        self.sequences = Sequences(1)
        self.tell: Reclaimed = lambda _: None
        self.sealed: Callable[[], None] = lambda: None
        self.header_written: Callable[[], None] = lambda: None
        """Called after each writing of a header."""
        self.metadata_bytes: Callable[[], int] = lambda: 0
        """What the index takes beyond what the plan sets aside for it."""
        self.metadata_bound: Callable[[], int] = lambda: 0
        """What it may come to take."""
        self.reclaimed_segments = 0

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, number: int) -> Segment | None:
        """A segment that holds records, by its id."""
        segment = self._segments.get(number)
        return segment if segment is not None and segment.life is not None else None

    def add(self, segment: Segment) -> None:
        """Take in a segment found at start: those with records oldest first, those without in any order."""
        self._segments[segment.number] = segment
        if segment.life is None:
            self._free.append(segment)
        else:
            self._sealed.append(segment)

    def resume(self, head: int) -> None:
        """Go on writing in the newest segment, from `head`."""
        self.active = self._sealed.pop()
        self.active.head = head

    def used_bytes(self) -> int:
        """What the store takes on the disk, everything counted."""
        sizes = sum(segment.size_bytes for segment in self)
        return self.plan.footprint(sizes, len(self._segments)) + self.metadata_bytes()

    @property
    def largest_record(self) -> int:
        """Bytes that the records of one segment can have."""
        return self.plan.segment_bytes - 2 * PAGE_BYTES

    @property
    def oldest(self) -> Segment | None:
        """The segment that is recycled next."""
        return self._sealed[0] if self._sealed else None

    def has_room(self) -> bool:
        """Whether another segment can be begun without recycling one."""
        grown = self._footprint_with(self.plan.segment_bytes, 1)
        return bool(self._free) or grown <= self.plan.capacity_bytes

    def _footprint_with(self, size_bytes: int, count: int) -> int:
        """What the store would take with more segments."""
        sizes = sum(segment.size_bytes for segment in self) + size_bytes
        metadata = max(self.metadata_bytes(), self.metadata_bound())
        return self.plan.footprint(sizes, len(self._segments) + count) + metadata

    async def reclaim_if_oldest(self, segment: Segment) -> None:
        """Recycle a segment now, unless somebody else has."""
        if segment is self.oldest and not self.has_room():
            await self._reclaim_oldest()

    def seal(self) -> None:
        """Write no more into the active segment; `sealed` is called."""
        if self.active is not None:
            self._sealed.append(self.active)
            self.active = None
            self.sealed()

    async def advance(self) -> Segment:
        """Seal the active segment and start another: a free one, a new one, or else the oldest.

        Raises StorageError when there is none; what is stored then stays as it is.
        """
        self.seal()
        # A disk whose syncs fail for a while would otherwise take a whole segment for each, and what is good for it.
        for void in [segment for segment in self._sealed if segment.is_void]:
            with contextlib.suppress(DiskError):  # then it stays as it is, and there may be others
                await self._recycle(void)
        while True:
            segment = await self._usable_free() or await self._create()
            if segment is not None:
                await self._begin(segment)
                self.active = segment
                return segment
            await self._reclaim_oldest()

    async def shrink(self) -> int:
        """At start: remove free and then the oldest segments until the capacity holds; returns how many went."""
        removed = 0
        while self.used_bytes() > self.plan.capacity_bytes and self._segments:
            await self._remove(self._free.pop() if self._free else self._sealed.popleft())
            removed += 1
        return removed

    async def give_back(self) -> None:
        """Return a segment's space to a disk that others have filled: a free one, or the oldest."""
        if not self._free and self._sealed:
            await self._reclaim_oldest()
        if self._free:
            await self._remove(self._free.pop())

    async def _usable_free(self) -> Segment | None:
        while self._free:
            segment = self._free.pop()
            fits = self._footprint_with(0, 0) <= self.plan.capacity_bytes or len(self._segments) <= MIN_SEGMENTS
            if segment.size_bytes == self.plan.segment_bytes and fits:
                return segment
            await self._remove(segment)
        return None

    async def _create(self) -> Segment | None:
        size = self.plan.segment_bytes
        if self._footprint_with(size, 1) > self.plan.capacity_bytes:
            return None
        number = next(n for n in range(len(self._segments) + 1) if n not in self._segments)
        path = self._directory / segment_name(number)
        try:
            file = await self._do(lambda: self._allocate(path, size))
        except OSError as error:
            if error.errno in NO_ROOM:
                return None
            raise DiskError(f"cannot make {path}: {error.strerror or error}") from error
        segment = Segment(number, path, file, size)
        self._segments[number] = segment
        return segment

    def _allocate(self, path: Path, size: int) -> SegmentFile:
        if self._io.space(self._directory).free_bytes < size + self.plan.reserve_bytes:
            raise OSError(errno.ENOSPC, "the reserve of free space would be touched")
        file = self._io.create(path, size)
        try:
            self._io.sync_directory(self._directory)
        except OSError:
            file.close()
            self._io.remove(path)
            raise
        return file

    async def _begin(self, segment: Segment) -> None:
        """Give a segment a new life: its header is on stable storage before any record is written."""
        life = Life(segment.number, self.sequences.take(), secrets.randbits(64), segment.size_bytes)
        segment.clear()
        try:
            await self._pool.submit(lambda scratch: self._write_header(segment, life, scratch))
        except OSError as error:
            self._free.append(segment)
            raise DiskError(f"cannot write the header of {segment.path}: {error.strerror or error}") from error
        segment.life, segment.doubtful = life, True
        self.header_written()

    def _write_header(self, segment: Segment, life: Life, scratch: Scratch) -> None:
        write_headers(segment.file, life, self._uuid, scratch)

    async def _reclaim_oldest(self) -> None:
        """Announce the oldest segment's extents, wait for requests on it, and free it."""
        if not self._sealed:
            free = self._io.space(self._directory).free_bytes
            raise DiskError(f"no room in {self._directory}: {format_bytes(free)} free, and no segment to recycle")
        await self._recycle(self._sealed[0])
        self.reclaimed_segments += 1

    async def _recycle(self, segment: Segment) -> None:
        await self._check_writable(segment)
        self._sealed.remove(segment)
        self._announce(segment)
        await segment.idle()
        await self._empty(segment)
        segment.clear()
        self._free.append(segment)

    async def _empty(self, segment: Segment) -> None:
        """Begin a life in which nothing is, and give the old one's pages back to the device.

        A start after a crash must not find the old life, which is punched out. What fails here costs nothing: the
        segment is given another life before it is written.
        """
        life = Life(segment.number, self.sequences.take(), secrets.randbits(64), segment.size_bytes, free=True)

        def empty(scratch: Scratch) -> None:
            write_headers(segment.file, life, self._uuid, scratch)
            if isinstance(segment.file, Punchable):
                segment.file.punch(FIRST_RECORD, life.end_bytes - FIRST_RECORD)

        with contextlib.suppress(OSError):
            await self._pool.submit(empty)
        self.header_written()

    async def try_disk(self) -> None:
        """Make, write, sync and remove a file as segments are. Raises DiskError."""
        path = self._directory / TRIAL_NAME

        def attempt(scratch: Scratch) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._io.remove(path)
            file = self._io.create(path, PAGE_BYTES)
            try:
                write_exact(file, [scratch.headers[:PAGE_BYTES]], 0, scratch)
                file.sync()
            finally:
                file.close()
                self._io.remove(path)

        try:
            await self._pool.submit(attempt)
        except OSError as error:
            raise DiskError(f"cannot write in {self._directory}: {error.strerror or error}") from error

    async def _check_writable(self, segment: Segment) -> None:
        """Write the header that is there once more: a disk that takes no writes must not cost us what can be read."""
        life = segment.life
        assert life is not None
        try:
            await self._pool.submit(lambda scratch: self._write_header(segment, life, scratch))
        except OSError as error:
            raise DiskError(f"cannot recycle {segment.path}: {error.strerror or error}") from error
        self.header_written()

    def _announce(self, segment: Segment) -> None:
        rows = segment.rows
        live = list(rows.live())
        told = [(rows.tags[row], segment.extent(row)) for row in live if rows.tags[row] != NO_TAG]
        segment.retiring = True
        for row in live:
            segment.set_dead(row)
        if told:
            self.tell(told)

    async def _remove(self, segment: Segment) -> None:
        segment.clear()
        try:
            await self._do(lambda: self._unlink(segment.path))
        except OSError as error:
            self._free.append(segment)
            raise DiskError(f"cannot remove {segment.path}: {error.strerror or error}") from error
        segment.file.close()
        del self._segments[segment.number]

    def _unlink(self, path: Path) -> None:
        self._io.remove(path)
        self._io.sync_directory(self._directory)

    async def _do(self, call: Callable[[], T]) -> T:
        return await self._pool.submit(lambda _: call())
