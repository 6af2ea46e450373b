"""One round of making everything durable: what is owed, a sync of every segment written since, then the journal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator

from kvtierd.storage.interface import DiskError, Extent
from kvtierd.storage.journaling import Journaling
from kvtierd.storage.pool import IoPool
from kvtierd.storage.ring import NO_ROOM, Ring
from kvtierd.storage.segment import NO_TAG, Segment
from kvtierd.storage.write_path import WritePath


class Syncer:
    """Syncs data files and then journals what they hold; names and headers were synced when they were made.

    `tell` announces blocks that a failed sync put in doubt.
    """

    def __init__(
        self,
        ring: Ring,
        pool: IoPool,
        writes: WritePath,
        journaling: Journaling,
        counters: Counter[str],
        tell: Callable[[list[tuple[int, Extent]]], None],
    ) -> None:
        self._ring = ring
        self._pool = pool
        self._writes = writes
        self._journaling = journaling
        self._counters = counters
        self._tell = tell
        self._covered = False

    def is_covered(self) -> bool:
        """Whether the last round went well, with nothing under way beside it: then all that was written before it lies
        before the heads in the index."""
        return self._covered and self._journaling.is_complete

    async def sync(self) -> None:
        """Return when all that was written or deleted before is on stable storage. Raises StorageError."""
        self._covered = False
        await self._writes.settle()
        await self._writes.strike_out()
        is_still = not any(segment.open_runs for segment in self._ring)
        outcomes = await asyncio.gather(*self._segment_syncs(), return_exceptions=True)
        self._counters["syncs"] += 1
        await self._journal()
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        self._covered = is_still

    async def _journal(self) -> None:
        """Append what was synced; a journal that fails once is given up and another one tried."""
        for last in (False, True):
            try:
                return await self._journaling.append()
            except OSError as error:
                self._counters["failed_journals"] += 1
                if error.errno in NO_ROOM and not last:
                    # Others have filled the disk: what is oldest here makes room for what says what is here.
                    await self._writes.appender.alone(self._ring.give_back)
                if last:
                    raise DiskError(f"cannot write the journal: {error.strerror or error}") from error
        return None

    def _segment_syncs(self) -> Iterator[Coroutine[None, None, None]]:
        """Syncs of what was written to; what was not may have been sealed since."""
        for segment in list(self._ring):
            head = segment.settled_head
            sealed = segment is not self._ring.active and not segment.open_runs
            if segment.unsynced.dirty:
                yield self._sync_segment(segment, head, sealed=sealed)
            else:
                self._journaling.note_head(segment, head, sealed=sealed)

    async def _sync_segment(self, segment: Segment, head: int, *, sealed: bool) -> None:
        unsynced = segment.take_unsynced()
        segment.pin()
        try:
            await self._pool.submit(lambda _: segment.file.sync())
        except OSError as error:
            self._counters["failed_syncs"] += 1
            gone = self._writes.distrust(segment, unsynced)
            if told := [(tag, extent) for tag, extent in gone if tag != NO_TAG]:
                self._tell(told)
            raise DiskError(f"cannot sync {segment.path}: {error.strerror or error}") from error
        finally:
            segment.unpin()
        segment.doubtful = False
        self._journaling.synced(segment, unsynced, head, sealed=sealed)
