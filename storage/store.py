"""The nvme tier as the tiers see it: SegmentStore implements interface.BlockStore.

Everything the store knows is changed on the caller's loop; the I/O threads get requests and give back outcomes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Nvme
from kvtierd.core.clock import Clock
from kvtierd.core.errors import ExitCode, StartupError, StorageError
from kvtierd.core.namespace import Namespace
from kvtierd.core.progress import Progress
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage import superblock
from kvtierd.storage.directory import DirectoryLock, prepare
from kvtierd.storage.facts import Facts, Head
from kvtierd.storage.flusher import Flusher
from kvtierd.storage.interface import Extent, Extents, IoMode, ReadItem, Recovered, WriteItem
from kvtierd.storage.io import StorageIo
from kvtierd.storage.io_select import SelectedIo
from kvtierd.storage.journaling import Journaling
from kvtierd.storage.metadata import metadata_of
from kvtierd.storage.opening import Opened, open_store
from kvtierd.storage.pool import IoPool
from kvtierd.storage.read_path import ReadPath
from kvtierd.storage.rewriting import Heats, Moved, Rewriter
from kvtierd.storage.ring import Reclaimed
from kvtierd.storage.space import INDEX_BYTES_PLANNED
from kvtierd.storage.stats import collect, written_bytes
from kvtierd.storage.syncer import Syncer
from kvtierd.storage.uninterrupted import uninterrupted
from kvtierd.storage.write_path import WritePath

_log = logging.getLogger(__name__)


class SegmentStore:
    """Append-only segments in one directory; the directory is locked while the store is open.

    `io` is the engine of the settings unless a test injects another. Batches are not interrupted: a caller
    that is cancelled in `read` or `write` gets its CancelledError when the requests that use its buffers are done.
    """

    def __init__(self, settings: Nvme, *, clock: Clock, io: StorageIo | None = None) -> None:
        if not settings.directory:
            raise ValueError('nvme.directory is "", which switches the tier off; a store needs a directory')
        self._settings = settings
        self._directory = Path(settings.directory)
        self._clock = clock
        self._io: StorageIo = io if io is not None else SelectedIo(settings)
        self._files = metadata_of(self._io, self._directory)
        self._lock = DirectoryLock(self._directory)
        self._namespaces: dict[bytes, Namespace] = {}
        self._counters: Counter[str] = Counter()
        self.progress = Progress()
        """Of the I/O threads, from the start of `open`."""
        self._tell: Reclaimed = lambda _: None
        self._rewriting: tuple[Heats, Moved] | None = None
        self._live: _Live | None = None

    @property
    def mode(self) -> IoMode:
        """How bytes reach the disk; as probed once the store is open."""
        return self._io.mode

    async def open(self) -> Recovered:
        """Lock the directory, probe, recover. Raises StartupError: 74 I/O, 75 locked, 78 settings."""
        if self._live is not None:
            raise RuntimeError("the store is open already")
        if self._settings.io_threads < 1:
            raise StartupError(ExitCode.CONFIG, f"nvme.io_threads is {self._settings.io_threads}; at least 1 is wanted")
        prepare(self._directory)
        try:
            await superblock.load(self._directory)  # a newer format is refused before anything is touched
            self._lock.acquire()
            self._io.probe(self._directory)
            return await self._start()
        except (OSError, StorageError) as error:
            await self._let_go()
            cause = error.strerror if isinstance(error, OSError) else None
            raise StartupError(ExitCode.IO, f"cannot use {self._directory}: {cause or error}") from error
        except BaseException:
            await self._let_go()
            raise

    async def _let_go(self) -> None:
        await self._files.close()
        self._lock.release()

    async def _start(self) -> Recovered:
        pool = IoPool(self._settings.io_threads, self.progress)
        try:
            opened = await open_store(self._settings, self._directory, self._io, self._files, pool, self._counters)
        except BaseException:
            await asyncio.to_thread(pool.close)
            raise
        recovered = opened.recovered
        self._namespaces.update(recovered.namespaces)
        self._counters["dropped_records"] = recovered.dropped
        recovered.notes[:0] = self._io.notes
        self._live = _Live(opened, pool, self._namespaces, self._counters, self._announce)
        if self._rewriting is not None:
            self._live.rewriter.heats, self._live.rewriter.moved = self._rewriting
        return recovered

    def adopt(self, extents: Extents, tags: npt.NDArray[np.int64]) -> None:
        """Set the caller's numbers ([n] int64) of recovered extents; one that is gone meanwhile is passed over."""
        ring = self._opened().ring
        order = np.argsort(extents.segment, kind="stable")
        numbers, begins = np.unique(extents.segment[order], return_index=True)
        for number, mine in zip(numbers.tolist(), np.split(order, begins)[1:], strict=True):
            if (segment := ring.get(number)) is not None:
                segment.rows.adopt(extents.take(mine), tags[mine])

    def on_rewrite(self, heats: Heats, moved: Moved) -> None:
        """Let blocks that are hot move to another segment when theirs is recycled; see BlockStore.on_rewrite."""
        self._rewriting = heats, moved
        if self._live is not None:
            self._live.rewriter.heats, self._live.rewriter.moved = self._rewriting

    def on_reclaim(self, callback: Reclaimed) -> None:
        """Set who is told of extents that are about to be recycled, or that a failed sync put in doubt.

        Only extents that `write` has returned or `open` has found are announced. Whoever awaits `write` through a task
        of its own may be told of extents before that task's result is looked at.
        """
        self._tell = callback

    def register(self, digest: bytes, namespace: Namespace) -> None:
        """Make a namespace known. Raises ValueError when the digest is not the namespace's."""
        if namespace.digest() != digest:
            raise ValueError(f"{digest.hex()[:16]} is not the digest of namespace {namespace.model!r}")
        self._namespaces[digest] = namespace

    async def write(self, items: Sequence[WriteItem]) -> list[Extent | StorageError]:
        """Store blocks; see BlockStore.write."""
        live = self._live
        if live is None:
            return [StorageError("the store is closed") for _ in items]
        begun_ns = self._clock.now_ns()
        drafts = live.writes.drafts(items)
        await live.room(sum(draft.length for draft in drafts))
        if self._live is not live:
            return [StorageError("the store is closed") for _ in items]
        try:
            await uninterrupted(live.writes.write(drafts))
        except asyncio.CancelledError:
            live.writes.disown(drafts)
            raise
        self._counters["write_ns"] += self._clock.now_ns() - begun_ns
        return live.writes.acknowledge(drafts)

    async def read(self, items: Sequence[ReadItem]) -> list[StorageError | None]:
        """Fetch blocks; see BlockStore.read. A CorruptionError leaves the extent in place: delete it."""
        live = self._live
        if live is None:
            return [StorageError("the store is closed") for _ in items]
        begun_ns = self._clock.now_ns()
        errors = await uninterrupted(live.reads.read(items))
        self._counters["read_ns"] += self._clock.now_ns() - begun_ns
        return errors

    async def delete(self, items: Sequence[tuple[bytes, bytes, Extent]]) -> None:
        """Append tombstones; durable after the next flush. Extents that hold another block by now are passed over.

        Raises StorageError when the disk does not take them: the blocks are dead all the same, and their tombstones
        are tried again with every write, delete and flush.
        """
        await uninterrupted(self._opened().writes.delete(items))

    async def flush(self) -> None:
        """Return when everything written or deleted before the call is on stable storage. Raises StorageError.

        After a failed sync the blocks it covered are forgotten and announced: what the system kept of them is unknown.
        """
        await self._opened().flusher.flush()

    async def close(self) -> None:
        """Flush and let go of the directory, also when the flush fails; that is raised at the end."""
        live, self._live = self._live, None
        if live is None:
            return
        try:
            await uninterrupted(live.end())
        finally:
            await self._let_go()

    def stats(self) -> dict[str, int | str]:
        """Statistics by name; see kvtierd.storage.stats."""
        live = self._opened()
        return collect(self._counters, live.ring, live.writes.owed, self.mode)

    def _announce(self, told: list[tuple[int, Extent]]) -> None:
        self._tell(told)

    def _opened(self) -> _Live:
        if self._live is None:
            raise StorageError("the store is closed")
        return self._live


class _Live:
    """The parts of an open store, put together."""

    def __init__(
        self, opened: Opened, pool: IoPool, namespaces: dict[bytes, Namespace], counters: Counter[str], tell: Reclaimed
    ) -> None:
        ring = self.ring = opened.ring
        self.pool = pool
        self.index = opened.index
        self._counters = counters
        self.writes = WritePath(ring, pool, namespaces, counters)
        self.writes.owe(opened.reopening.dropped)
        self.reads = ReadPath(ring, pool, counters)
        journaling = Journaling(ring, opened.index, namespaces, opened.reopening.unjournaled)
        self._syncer = Syncer(ring, pool, self.writes, journaling, counters, tell)
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
        self._emptying: asyncio.Task[None] | None = None

    async def _sync(self) -> None:
        await self._syncer.sync()
        if self.index.wants_checkpoint and (self._checkpointing is None or self._checkpointing.done()):
            self._checkpointing = asyncio.create_task(self._checkpoint())

    async def _checkpoint(self) -> None:
        """Nothing depends on a checkpoint but how fast the next start is: a failed one is counted and tried later."""
        generations = {segment.number: segment.life.generation for segment in self.ring if segment.life is not None}
        try:
            await self.index.checkpoint(generations, written_bytes(self._counters), self._syncer.is_covered)
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
