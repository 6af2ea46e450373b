"""Reading as the loop sees it: extents are looked up, gathered into requests, and held until these are done."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.storage.appender import BREATH
from kvtierd.storage.interface import GoneError, ReadItem
from kvtierd.storage.pool import IoPool
from kvtierd.storage.reader import Fetch, ReadRun, fetch_of, fetch_run, verify_run
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import Segment, fingerprint


class ReadPath:
    """Reads batches; a segment with a read in flight is pinned, so that it is not recycled under it."""

    def __init__(self, ring: Ring, pool: IoPool, counters: Counter[str]) -> None:
        self._ring = ring
        self._pool = pool
        self._counters = counters

    async def read(self, items: Sequence[ReadItem]) -> list[StorageError | None]:
        """Fetch blocks; see BlockStore.read."""
        fetches: list[Fetch] = []
        tasks: list[asyncio.Task[None]] = []
        for begin in range(0, len(items), BREATH):
            part = [fetch_of(item) for item in items[begin : begin + BREATH]]
            fetches += part
            tasks += [asyncio.create_task(self._execute(run)) for run in self._gather(part)]
            await asyncio.sleep(0)
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            task.result()
        for fetch in fetches:
            self._count(fetch)
        return [fetch.error for fetch in fetches]

    def _gather(self, fetches: list[Fetch]) -> list[ReadRun]:
        """Make requests of neighbours; segments are pinned from here on, before the loop gets a turn."""
        runs: list[ReadRun] = []
        for fetch in fetches:
            segment = self._locate(fetch)
            if segment is None or segment.life is None:
                continue
            if not runs or not runs[-1].takes(segment, fetch):
                segment.pin()
                runs.append(ReadRun(segment, segment.life))
            runs[-1].add(fetch)
        return runs

    def _locate(self, fetch: Fetch) -> Segment | None:
        if fetch.error is not None:
            return None
        item = fetch.item
        segment = self._ring.get(item.extent.segment)
        row = segment.rows.find(item.extent) if segment is not None else -1
        if segment is None or row < 0 or segment.rows.prints[row] != fingerprint(item.namespace, item.key):
            place = f"segment {item.extent.segment} at {item.extent.offset}"
            fetch.error = GoneError(f"block {item.key.hex()[:16]} is no longer in {place}")
            return None
        return segment

    async def _execute(self, run: ReadRun) -> None:
        submitted = self._pool.read(lambda scratch: fetch_run(run, scratch), lambda _: verify_run(run), run.length)
        try:
            await asyncio.wait([submitted])
        finally:
            run.segment.unpin()
        submitted.result()

    def _count(self, fetch: Fetch) -> None:
        if fetch.error is None:
            self._counters["read_blocks"] += 1
            self._counters["read_bytes"] += fetch.item.extent.length
        elif isinstance(fetch.error, CorruptionError):
            self._counters["corrupt_reads"] += 1
        elif isinstance(fetch.error, GoneError):
            self._counters["gone_reads"] += 1
        else:
            self._counters["failed_reads"] += 1
