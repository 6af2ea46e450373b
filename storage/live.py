"""An open store's parts, put together, and what they do by themselves: syncs, checkpoints, making room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter

from kvtierd.core.errors import StorageError
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.endurance import Endurance
from kvtierd.storage.facts import Facts, Head
from kvtierd.storage.flusher import Flusher
from kvtierd.storage.health import Health
from kvtierd.storage.journaling import Journaling
from kvtierd.storage.layer_reads import LayerReads
from kvtierd.storage.opening import Opened
from kvtierd.storage.pool import IoPool
from kvtierd.storage.read_path import ReadPath
from kvtierd.storage.rewriting import Rewriter
from kvtierd.storage.ring import Reclaimed
from kvtierd.storage.scrub import Scrubber
from kvtierd.storage.space import INDEX_BYTES_PLANNED
from kvtierd.storage.syncer import Syncer
from kvtierd.storage.write_path import WritePath

_log = logging.getLogger(__name__)


class Live:
    """The parts of an open store, put together."""

    def __init__(
        self,
        opened: Opened,
        pool: IoPool,
        namespaces: dict[bytes, Namespace],
        counters: Counter[str],
        tell: Reclaimed,
        lost: Reclaimed,
    ) -> None:
        ring = self.ring = opened.ring
        self.pool = pool
        self.index = opened.index
        self._counters = counters
        self.writes = WritePath(ring, pool, namespaces, counters)
        self.writes.owe(opened.reopening.dropped)
        self.reads = ReadPath(ring, pool, counters)
        self.layer_reads = LayerReads(ring, pool, counters)
        journaling = Journaling(ring, opened.index, namespaces, opened.reopening.unjournaled)
        self._syncer = Syncer(ring, pool, self.writes, journaling, counters, lost)
        self._checkpointing: asyncio.Task[None] | None = None
        self.flusher = Flusher(self._sync)
        self._filled = False
        self.rewriter = Rewriter(
            ring, pool, self.writes.appender, self.writes, self.flusher.flush, namespaces, counters
        )
        ring.tell = tell
        ring.sealed = self._segment_filled
        ring.header_written = self._header_written
        ring.metadata_bytes = lambda: max(0, opened.index.size_bytes - INDEX_BYTES_PLANNED)
        ring.metadata_bound = lambda: max(0, opened.index.bound_bytes - INDEX_BYTES_PLANNED)
        self._emptying: asyncio.Task[None] | None = None

    def watch(self, health: Health, scrubber: Scrubber, endurance: Endurance) -> None:
        """Tell these how the disk does, and let them work."""
        self.health = health
        self.endurance = endurance
        self._scrubber = scrubber
        health.start()
        scrubber.start()

    async def _sync(self) -> None:
        try:
            await self._syncer.sync()
        except StorageError as error:
            self.health.note(error)
            raise
        if self.index.wants_checkpoint and (self._checkpointing is None or self._checkpointing.done()):
            self._checkpointing = asyncio.create_task(self._checkpoint())

    async def _checkpoint(self) -> None:
        """Nothing depends on a checkpoint but how fast the next start is: a failed one is counted and tried later."""
        generations = {segment.number: segment.life.generation for segment in self.ring if segment.life is not None}
        try:
            await self.index.checkpoint(generations, self._syncer.is_covered)
        except OSError as error:
            self._counters["failed_checkpoints"] += 1
            _log.warning("nvme checkpoint: %s; it will be tried again", error.strerror or error)

    def _header_written(self) -> None:
        self._counters["header_bytes"] += 2 * PAGE_BYTES

    def _segment_filled(self) -> None:
        """A full segment is synced in the background, so that no flush has more than a few segments to do; then the
        oldest one is emptied if there is no other room."""
        self._filled = True
        if self._emptying is None or self._emptying.done():
            self._emptying = asyncio.create_task(self._after_filling())

    async def _after_filling(self) -> None:
        while self._filled:
            self._filled = False
            await self._sync_quietly()
            await self.rewriter.make_room()

    async def room(self, size_bytes: int) -> None:
        """Wait while the oldest segment is emptied and nothing else can take so much: recycled in a hurry, it would
        lose what is hot in it."""
        while self.rewriter.heats is not None and self._emptying is not None and not self._emptying.done():
            active = self.ring.active
            if self.ring.has_room() or (active is not None and active.room_bytes >= size_bytes):
                return
            await asyncio.wait([self._emptying])

    async def _sync_quietly(self) -> None:
        # What a failed sync means has been entered and counted by the syncer; nobody waits for this round.
        with contextlib.suppress(StorageError):
            await self.flusher.flush()

    async def end(self) -> None:
        """Flush, wait for what is in flight, close the files."""
        await self.health.close()
        await self._scrubber.close()
        try:
            await self.flusher.flush()
            await self._finish_index()
        finally:
            if rest := [task for task in (self._emptying, self._checkpointing) if task is not None]:
                await asyncio.wait(rest)
            for segment in list(self.ring):
                await segment.idle()
            await asyncio.to_thread(self.pool.close)
            for segment in self.ring:
                segment.file.close()

    async def _finish_index(self) -> None:
        """Say that no record follows, so that the next start has nothing to scan, and merge what there is."""
        if self._checkpointing is not None:
            await asyncio.wait([self._checkpointing])
        active = self.ring.active
        if active is not None and active.life is not None:
            last = Facts()
            last.heads[active.number] = Head(active.life.generation, active.head, sealed=True)
            with contextlib.suppress(OSError):  # the next start then scans the rest of this segment
                await self.index.append(last)
        if self.index.wants_last_checkpoint:
            await self._checkpoint()
