"""Writing and deleting as the loop sees it: drafts are placed, sent as requests, and their outcomes entered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.namespace import Namespace
from kvtierd.storage.appender import Appender, tombstone_drafts
from kvtierd.storage.buffers import HeaderMemory
from kvtierd.storage.interface import Extent, WriteItem
from kvtierd.storage.pool import IoPool
from kvtierd.storage.record import Kill, Kind
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import Segment, Unsynced, fingerprint
from kvtierd.storage.writer import Draft, Run, block_draft, prepare_run, write_run

MAX_PENDING_KILLS = 65_536
"""When so many blocks wait to be struck out, the disk takes nothing at all: no more writes are tried before it does."""


class WritePath:
    """Owns what is being written, and what still has to be put on disk because a write failed.

    A failed write may have landed in part or whole. Its block is a miss now, and a kill is kept until a tombstone of
    it is on disk, so that a later recovery does not find it either.
    """

    def __init__(self, ring: Ring, pool: IoPool, namespaces: dict[bytes, Namespace], counters: Counter[str]) -> None:
        self._ring = ring
        self._pool = pool
        self._namespaces = namespaces
        self._counters = counters
        self._appender = Appender(ring, namespaces)
        self._batches: set[asyncio.Future[None]] = set()
        self._pending_kills: list[Kill] = []
        self._lost_namespaces: set[bytes] = set()
        self._headers = HeaderMemory()

    def drafts(self, items: Sequence[WriteItem]) -> list[Draft]:
        """Items as records to write; `error` is set in what cannot be one."""
        return [self._draft(item) for item in items]

    async def write(self, drafts: list[Draft]) -> None:
        """Write blocks; `acknowledge` them at once when it returns, or `disown` them."""
        if len(self._pending_kills) >= MAX_PENDING_KILLS:
            try:
                await self.strike_out()
            except StorageError as error:
                for draft in drafts:
                    draft.error = draft.error or error
        await self._append([*self._take_pending(), *drafts])

    def acknowledge(self, drafts: list[Draft]) -> list[Extent | StorageError]:
        """Make what was written readable, at the moment when the caller gets to know of it and not before: an extent
        that he does not have yet must not be announced to him."""
        return [self._acknowledge(draft) for draft in drafts]

    def disown(self, drafts: list[Draft]) -> None:
        """The caller was cancelled and will never know these extents: they are dead, on disk too."""
        for draft in drafts:
            segment = self._ring.get(draft.segment)
            if draft.error is None and segment is not None and segment.life is draft.life:
                segment.set_dead(draft.row)
                self._pending_kills.append(_kill_of(draft))

    async def delete(self, items: Sequence[tuple[bytes, bytes, Extent]]) -> None:
        """Forget blocks at once and append their tombstones; see BlockStore.delete."""
        self._pending_kills += [kill for item in items if (kill := self._forget(*item)) is not None]
        await self.strike_out()

    async def strike_out(self) -> None:
        """Append what is owed: tombstones and namespaces that did not get to the disk. Raises StorageError."""
        drafts = self._take_pending()
        if not drafts:
            return
        await self._append(drafts)
        if error := next((draft.error for draft in drafts if draft.error is not None), None):
            raise error

    def owe(self, kills: Sequence[Kill]) -> None:
        """Put these on disk with whatever is written next."""
        self._pending_kills += kills

    @property
    def appender(self) -> Appender:
        """Who places records."""
        return self._appender

    @property
    def owed(self) -> int:
        """Number of kills that wait to be put on disk."""
        return len(self._pending_kills)

    async def settle(self) -> None:
        """Return when the batches that have begun are written."""
        if begun := list(self._batches):
            await asyncio.wait(begun)

    def distrust(self, segment: Segment, unsynced: Unsynced) -> list[tuple[int, Extent]]:
        """A sync failed, and after that the system may call clean what it lost: forget the blocks that it covered.

        Returns (tag, extent) of these, to be announced. Their kills, and those of tombstones, are owed again.
        """
        gone = [row for row, _ in unsynced.blocks if segment.is_live(row)]
        for row, _ in unsynced.blocks:
            segment.set_dead(row)
        self._pending_kills += [*(kill for _, kill in unsynced.blocks), *unsynced.kills]
        if segment is self._ring.active:
            self._ring.seal()
        self._counters["lost_in_sync"] += len(gone)
        return [(segment.rows.tags[row], segment.extent(row)) for row in gone]

    def _draft(self, item: WriteItem) -> Draft:
        draft = block_draft(item)
        if draft.error is None and item.namespace not in self._namespaces:
            draft.error = StorageError(f"namespace {item.namespace.hex()[:16]} is not registered with the store")
        return draft

    def _take_pending(self) -> list[Draft]:
        kills, self._pending_kills = self._pending_kills, []
        lost, self._lost_namespaces = self._lost_namespaces, set()
        return [*(self._appender.namespace_draft(digest) for digest in lost), *tombstone_drafts(kills)]

    async def _append(self, drafts: list[Draft]) -> None:
        """Place and write; returns when every draft has its outcome."""
        mine: list[asyncio.Task[None]] = []
        done = asyncio.get_running_loop().create_future()
        self._batches.add(done)
        try:
            await self._appender.append(drafts, lambda run: mine.append(asyncio.create_task(self._execute(run))))
        finally:
            # The caller's buffers are in use until every request is done, whatever happened in between.
            if mine:
                await asyncio.wait(mine)
            self._batches.discard(done)
            done.set_result(None)
        for task in mine:
            task.result()
        for draft in drafts:
            if draft.segment < 0:
                self._enter_unplaced(draft)

    async def _execute(self, run: Run) -> None:
        submitted = self._pool.write(
            lambda _: prepare_run(run, self._headers.take()), lambda scratch: write_run(run, scratch), run.length
        )
        try:
            await submitted
        finally:
            if crash := submitted.exception():
                for draft in run.drafts:
                    draft.error = StorageError(f"the write request failed: {crash!r}")
            if run.memory.size:
                self._headers.give(run.memory)
            run.segment.unsynced.dirty = True
            for draft in run.drafts:
                self._enter(run.segment, draft)
            run.segment.end_run(run.drafts[0].offset)

    def _enter(self, segment: Segment, draft: Draft) -> None:
        """Enter one record's outcome in the books."""
        if draft.error is not None:
            self._enter_failure(segment, draft, draft.error)
            return
        self._counters["written_bytes"] += draft.length
        if draft.item is None:
            self._counters["overhead_bytes"] += draft.length
            segment.unsynced.kills.extend(draft.kills)
            return
        self._counters["rewritten_bytes" if draft.rewrite else "stored_bytes"] += draft.length
        segment.unsynced.blocks.append((draft.row, _kill_of(draft)))
        segment.unsynced.placed.append((draft.sequence, draft.block_sum, draft.item.codec))

    def _acknowledge(self, draft: Draft) -> Extent | StorageError:
        """One block; its segment may have been recycled meanwhile, or put in doubt by a sync that failed."""
        if draft.error is not None:
            return draft.error
        segment = self._ring.get(draft.segment)
        if segment is None or segment.life is not draft.life or segment.retiring or not segment.is_pending(draft.row):
            self._counters["failed_writes"] += 1
            return StorageError(f"segment {draft.segment} was given up before the batch of this block was done")
        segment.set_live(draft.row)
        self._counters["written_blocks"] += not draft.rewrite
        return segment.extent(draft.row)

    def _enter_failure(self, segment: Segment, draft: Draft, error: StorageError) -> None:
        """What a failed record leaves to do; nothing where its segment is being recycled, which ends it for good."""
        if draft.item is not None:
            segment.set_dead(draft.row)
            self._counters["failed_writes"] += 1
            # A copy that may have landed though its writing failed is the same block as its original: it may come back.
            if not segment.retiring and not draft.rewrite and not isinstance(error, CorruptionError):
                self._pending_kills.append(_kill_of(draft))
        elif draft.kind is Kind.TOMBSTONE:
            self._pending_kills += draft.kills
        elif not segment.retiring:
            segment.namespaces.discard(draft.namespace)
            self._lost_namespaces.add(draft.namespace)

    def _enter_unplaced(self, draft: Draft) -> None:
        """Enter a draft that got no place on disk."""
        if draft.item is not None:
            self._counters["failed_writes"] += 1
        elif draft.kind is Kind.TOMBSTONE:
            self._pending_kills += draft.kills
        else:
            self._lost_namespaces.add(draft.namespace)

    def _forget(self, digest: bytes, key: bytes, extent: Extent) -> Kill | None:
        """Mark a block dead; None when it is no longer there."""
        segment = self._ring.get(extent.segment)
        row = segment.rows.find(extent) if segment is not None else -1
        if segment is None or row < 0 or segment.rows.prints[row] != fingerprint(digest, key):
            return None
        segment.set_dead(row)
        self._counters["deleted_blocks"] += 1
        return digest, key, segment.rows.sequences[row]


def _kill_of(draft: Draft) -> Kill:
    """What would strike out a block."""
    assert draft.item is not None
    return draft.item.namespace, draft.item.key, draft.origin
