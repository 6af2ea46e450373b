"""The nvme tier as the tiers see it: SegmentStore implements interface.BlockStore.

Everything the store knows is changed on the caller's loop; the I/O threads get requests and give back outcomes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Nvme
from kvtierd.core.clock import Clock
from kvtierd.core.errors import ExitCode, StartupError, StorageError
from kvtierd.core.namespace import Namespace
from kvtierd.core.progress import Progress
from kvtierd.storage import superblock
from kvtierd.storage.directory import DirectoryLock, prepare, what_failed
from kvtierd.storage.endurance import Endurance
from kvtierd.storage.health import Health
from kvtierd.storage.interface import (
    DegradedError,
    DiskError,
    Extent,
    Extents,
    IoMode,
    LayerParts,
    ReadItem,
    Recovered,
    WriteItem,
)
from kvtierd.storage.io import StorageIo
from kvtierd.storage.io_select import SelectedIo
from kvtierd.storage.live import Live
from kvtierd.storage.metadata import metadata_of
from kvtierd.storage.opening import open_store
from kvtierd.storage.pool import IoPool
from kvtierd.storage.rewriting import Heats, Moved
from kvtierd.storage.ring import Reclaimed
from kvtierd.storage.scrub import Scrubber
from kvtierd.storage.stats import collect
from kvtierd.storage.uninterrupted import uninterrupted

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
        self._lost: Reclaimed = lambda _: None
        self._rewriting: tuple[Heats, Moved] | None = None
        self._live: Live | None = None

    @property
    def mode(self) -> IoMode:
        """How bytes reach the disk; as probed once the store is open."""
        return self._io.mode

    @property
    def cause(self) -> str:
        """Why the disk takes no stores now; "" while it does."""
        return self._live.health.cause if self._live is not None else "the store is closed"

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
            raise StartupError(ExitCode.IO, f"cannot use {self._directory}: {what_failed(error)}") from error
        except BaseException:
            await self._let_go()
            raise

    async def _let_go(self) -> None:
        await self._files.close()
        self._lock.release()

    async def _start(self) -> Recovered:
        begun_ns = self._clock.now_ns()
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
        self._live = Live(opened, pool, self._namespaces, self._counters, self._announce, self._doubt)
        health = Health(self._directory, self._files, opened.ring.try_disk, self._clock, self._counters)
        scrubber = Scrubber(opened.ring, pool, self._live.writes, self._counters, self._settings.scrub_rate)
        before = opened.index.lifetime_bytes
        wear = Endurance(self._counters, self._settings.rated_endurance, before, self._clock.now_ns())
        self._live.watch(health, scrubber, wear)
        if self._rewriting is not None:
            self._live.rewriter.heats, self._live.rewriter.moved = self._rewriting
        self._tell_recovery(recovered, self._clock.now_ns() - begun_ns)
        return recovered

    def _tell_recovery(self, recovered: Recovered, taken_ns: int) -> None:
        self._counters["recovery_ns"] = taken_ns
        for note in recovered.notes:
            _log.warning("nvme recovery: %s", note)
        count, source = len(recovered.extents), recovered.source
        _log.info("nvme recovery: %d blocks in %.3f s (%s)", count, taken_ns / 1e9, source)

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

    def on_reclaim(self, callback: Reclaimed, lost: Reclaimed | None = None) -> None:
        """Set who is told of extents that are about to be recycled, and of those that a failed sync put in doubt.

        Only extents that `write` has returned or `open` has found are announced. Whoever awaits `write` through a task
        of its own may be told of extents before that task's result is looked at.
        """
        self._tell, self._lost = callback, lost or callback

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
        if not await live.health.works():
            self._counters["refused_blocks"] += len(items)
            return [DegradedError(f"the nvme tier is degraded: {live.health.cause}") for _ in items]
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
        results = live.writes.acknowledge(drafts)
        for draft in drafts:
            live.health.note(draft.error)
        return results

    async def read(self, items: Sequence[ReadItem]) -> list[StorageError | None]:
        """Fetch blocks; see BlockStore.read. A CorruptionError leaves the extent in place: delete it."""
        live = self._live
        if live is None:
            return [StorageError("the store is closed") for _ in items]
        begun_ns = self._clock.now_ns()
        errors = await uninterrupted(live.reads.read(items))
        self._note_read(live, begun_ns, errors)
        return errors

    async def read_layers(self, parts: LayerParts) -> dict[int, StorageError]:
        """Fetch layer parts; see BlockStore.read_layers."""
        live = self._live
        if live is None:
            return {i: StorageError("the store is closed") for i in range(len(parts))}
        begun_ns = self._clock.now_ns()
        errors = await live.layer_reads.read(parts)
        self._note_read(live, begun_ns, errors.values())
        return errors

    def _note_read(self, live: Live, begun_ns: int, errors: Iterable[StorageError | None]) -> None:
        self._counters["read_ns"] += self._clock.now_ns() - begun_ns
        if any(isinstance(error, DiskError) for error in errors):
            live.health.suspect()

    async def delete(self, items: Sequence[tuple[bytes, bytes, Extent]]) -> None:
        """Append tombstones; durable after the next flush. Extents that hold another block by now are passed over.

        Raises StorageError when the disk does not take them: the blocks are dead all the same, and their tombstones
        are tried again with every write, delete and flush.
        """
        live = self._opened()
        try:
            await uninterrupted(live.writes.delete(items))
        except StorageError as error:
            live.health.note(error)
            raise

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
        wear = live.endurance.stats(self._clock.now_ns())
        return collect(self._counters, live.ring, live.writes.owed, self.mode, live.health.cause, wear)

    def _announce(self, told: list[tuple[int, Extent]]) -> None:
        self._tell(told)

    def _doubt(self, told: list[tuple[int, Extent]]) -> None:
        self._lost(told)

    def _opened(self) -> Live:
        if self._live is None:
            raise StorageError("the store is closed")
        return self._live
