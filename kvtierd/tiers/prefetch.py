"""Prefetch: blocks that will be asked for next are brought into host while the client works on the present ones.

Two ways lead here: a client that says what it will want, and the window: after every read of a run, the next
`prefetch_window` blocks of its sequence, as far as a request has named them behind each other before.

A prefetch takes free slots and those of blocks that are colder than what it brings; it goes in pieces, so that reads
that somebody waits for come between, and what has not begun ends with the request or the session that wanted it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Awaitable, Callable

import numpy as np

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.units import MIB
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.protocol.messages import TIER_HOST
from kvtierd.protocol.service import Session
from kvtierd.tiers.blocks import VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.moves import Claim
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.onboard import Onboarder

MAX_PREFETCHES = 64
"""At once; more would only compete for the same disk."""
PIECE_BYTES = 8 * MIB
PIECE_BLOCKS_MAX = 256
PIECES = 4
"""Of one prefetch, pieces that are on their way at once: half of them at the disk, and half of them next, so that it
does not wait for us between two; a read that comes meanwhile waits for no more than these."""


@dataclasses.dataclass(slots=True, eq=False)
class Wish:
    """One prefetch: of `rows` the first `begun` are on their way, or there. `before` has the row before each in its
    prefix, -1 for none."""

    session: int
    rows: Rows
    before: Rows
    begun: int = 0


class Prefetcher:
    """Starts onboarding in the background, and stops when the client has gone away."""

    def __init__(self, copies: Copies, onboarder: Onboarder, window: int) -> None:
        self._copies = copies
        self._onboarder = onboarder
        self.window = window
        """Blocks of a sequence fetched ahead."""
        self._tasks: dict[asyncio.Task[None], Wish] = {}

    def follow(self, session: Session, entry: NamespaceEntry, run: Rows) -> asyncio.Task[None] | None:
        """This run is being read: bring the next blocks of the sequence into host; what may be cancelled, if any."""
        last = int(run[-1])
        if not self.window or self._copies.blocks.table.next_row[last] < 0:
            return None
        rows, before = self._following(entry, last)
        if not rows.size or len(self._tasks) >= MAX_PREFETCHES:
            return None
        return self.start(Wish(session.id, rows, before), functools.partial(self.to_host, entry))

    def start(self, wish: Wish, work: Callable[[Wish], Awaitable[int]]) -> asyncio.Task[None]:
        """Run a prefetch in the background. RequestError `busy` when too many are under way."""
        if len(self._tasks) >= MAX_PREFETCHES:
            raise RequestError(ErrorCode.BUSY, f"{MAX_PREFETCHES} prefetches are under way", retry_after_ms=50)
        # The task begins later, and may never begin: until it ends the rows must not become other blocks'.
        self._copies.blocks.begin_move(wish.rows)
        task = asyncio.create_task(_as_a_wish(work, wish))
        self._tasks[task] = wish
        task.add_done_callback(self._ended)
        return task

    async def to_host(self, entry: NamespaceEntry, wish: Wish) -> int:
        """Bring the rows of a wish into host; how many of the leading ones are there."""
        size = min(max(1, PIECE_BYTES // entry.geometry.slot_bytes), PIECE_BLOCKS_MAX)
        claims: collections.deque[Claim] = collections.deque()
        there, short = 0, False
        try:
            while True:
                while len(claims) < PIECES and wish.begun < wish.rows.size and not short:
                    piece = wish.rows[wish.begun : wish.begun + size]
                    wish.begun += piece.size
                    claims.append(self._onboarder.claim(entry, piece, ahead=True))
                    short = claims[-1].slots.size < piece.size
                if not claims:
                    return there
                claim = claims.popleft()
                slots = await self._onboarder.landed(claim)
                self._settle(claim.cls, wish.before[there : there + slots.size], slots)
                there += slots.size
                if slots.size < claim.slots.size:
                    return there
        finally:
            for claim in claims:
                self._onboarder.drop(claim)

    def _settle(self, cls: SlotClass, before: Rows, slots: Slots) -> None:
        """Blocks of a prefetch are there: tell what they come after, and end the holds."""
        # A row before it may be another block's by now; nothing is then evicted but later than it might be.
        above = np.where(before >= 0, self._copies.blocks.table.host_slot[before], np.int32(-1))
        self._copies.host.chained(cls, slots, above)
        self._copies.host.release(cls, slots)

    async def waited_for(self, wish: Wish, work: Callable[[Wish], Awaitable[int]]) -> int:
        """Do a prefetch that a client waits for; it ends with the request."""
        self._copies.blocks.begin_move(wish.rows)
        try:
            return await work(wish)
        except asyncio.CancelledError:
            self._cancelled(wish)
            raise
        finally:
            self._copies.blocks.end_move(wish.rows)

    def session_ended(self, session: Session) -> None:
        """Nobody waits for this client's prefetches any more; reads that have begun end by themselves."""
        for task, wish in list(self._tasks.items()):
            if wish.session == session.id:
                task.cancel()

    async def close(self) -> None:
        """Stop all."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        wish = self._tasks.pop(task)
        if task.cancelled():
            self._cancelled(wish)
        self._copies.blocks.end_move(wish.rows)

    def _cancelled(self, wish: Wish) -> None:
        self._copies.counters["prefetch_cancelled_blocks"] += wish.rows.size - wish.begun

    def _following(self, entry: NamespaceEntry, row: int) -> tuple[Rows, Rows]:
        """A window of rows behind this one, of which those without host copy and move; and the row before each."""
        table = self._copies.blocks.table
        found: dict[int, int] = {}  # a stale hint can lead in a circle; a block is wanted once
        for _ in range(self.window):
            before, row = row, int(table.next_row[row])
            if row < 0 or table.namespace[row] != entry.number or not table.flags[row] & VISIBLE:
                break  # the hint is stale: that row is another block's now
            if not table.flags[row] & TIER_HOST and not self._onboarder.is_arriving(row):
                found.setdefault(row, before)
        return np.array(list(found), np.int32), np.array(list(found.values()), np.int32)


def wish_for(session: Session, prefix: Rows) -> Wish:
    """A prefetch of rows that are the head of a prefix."""
    before = np.full(prefix.size, -1, np.int32)
    before[1:] = prefix[:-1]
    return Wish(session.id, prefix, before)


async def _as_a_wish(work: Callable[[Wish], Awaitable[int]], wish: Wish) -> None:
    """A refusal is no error here: nobody waits."""
    try:
        await work(wish)
    except RequestError:
        wish.begun = wish.rows.size
