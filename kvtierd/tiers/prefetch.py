"""Prefetch: blocks that will be asked for next are brought into host while the client works on the present ones.

Two ways lead here: a client that says what it will want, and the window: after every read of a run, the next
`prefetch_window` blocks of its sequence, as far as a request has named them behind each other before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable

import numpy as np

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol.messages import TIER_HOST
from kvtierd.protocol.service import Session
from kvtierd.tiers.blocks import VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.onboard import Onboarder

MAX_PREFETCHES = 64
"""At once; more would only compete for the same disk."""


class Prefetcher:
    """Starts onboarding in the background, and stops waiting for it when the client has gone away."""

    def __init__(self, copies: Copies, onboarder: Onboarder, window: int) -> None:
        self._copies = copies
        self._onboarder = onboarder
        self.window = window
        """Blocks of a sequence fetched ahead."""
        self._tasks: dict[asyncio.Task[None], int] = {}

    def follow(self, session: Session, entry: NamespaceEntry, run: Rows) -> None:
        """This run was read: bring the next blocks of the sequence into host."""
        last = int(run[-1])
        if not self.window or self._copies.blocks.table.next_row[last] < 0:
            return
        rows = self._following(entry, last)
        if rows.size and len(self._tasks) < MAX_PREFETCHES:
            self._copies.counters["prefetched_blocks"] += rows.size
            self.start(session, rows, functools.partial(self.to_host, entry, rows))

    def start(self, session: Session, rows: Rows, work: Callable[[], Awaitable[int]]) -> None:
        """Run a prefetch of rows in the background. RequestError `busy` when too many are under way."""
        if len(self._tasks) >= MAX_PREFETCHES:
            raise RequestError(ErrorCode.BUSY, f"{MAX_PREFETCHES} prefetches are under way", retry_after_ms=50)
        # The task begins later, and may never begin: until it ends the rows must not become other blocks'.
        self._copies.blocks.begin_move(rows)
        task = asyncio.create_task(_as_a_wish(work))
        self._tasks[task] = session.id
        task.add_done_callback(functools.partial(self._ended, rows))

    async def to_host(self, entry: NamespaceEntry, rows: Rows) -> int:
        """Bring rows into host; how many of the leading ones are there."""
        slots = await self._onboarder.hold_in_host(entry, rows)
        self._copies.host.release(self._copies.host_class(entry), slots)
        return int(slots.size)

    def session_ended(self, session: Session) -> None:
        """Nobody waits for this client's prefetches any more; reads that have begun end by themselves."""
        for task, owner in list(self._tasks.items()):
            if owner == session.id:
                task.cancel()

    async def close(self) -> None:
        """Stop all."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, rows: Rows, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._copies.blocks.end_move(rows)

    def _following(self, entry: NamespaceEntry, row: int) -> Rows:
        """Up to a window of rows behind this one that have no host copy and no move under way."""
        table, found = self._copies.blocks.table, []
        for _ in range(self.window):
            row = int(table.next_row[row])
            if row < 0 or table.namespace[row] != entry.number or not table.flags[row] & VISIBLE:
                break  # the hint is stale: that row is another block's now
            if not table.flags[row] & TIER_HOST and not self._onboarder.is_arriving(row):
                found.append(row)
        # A stale hint can lead in a circle; a block is wanted once.
        return np.array(list(dict.fromkeys(found)), np.int32)


async def _as_a_wish(work: Callable[[], Awaitable[int]]) -> None:
    """Where there is no room a prefetch ends without effect; it was counted as a busy read."""
    with contextlib.suppress(RequestError):
        await work()
