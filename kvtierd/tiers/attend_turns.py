"""Whose turn it is to compute: pieces of requests one after the other, and small ones of similar length side by side.

A large piece is shared out on all processors by its kernel. A small one uses one of them, and while it is computed the
others would be idle: so as many small ones as there are processors, of several requests, run as one batch. They must be
of similar length, for the batch ends with its longest, and nobody shall wait for a piece that is much longer than his.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeVar

from kvtierd.core.progress import Progress
from kvtierd.tiers.workers import THREADS_MAX, Workers

T = TypeVar("T")

NICENESS = 5
"""By how much threads that compute have less priority than the loop and those that read. Where they have all
processors, the scheduler would let a read that has arrived, and the next one that could be begun, wait for milliseconds
until a slice of theirs ends."""

SIMILAR = 2.0
"""Most that the longest piece of a batch takes of the shortest."""


@dataclasses.dataclass(slots=True, eq=False)
class _Turn:
    """A piece that waits; `work` is 0 where it uses several processors."""

    piece: Callable[[], Any]
    work: int
    future: asyncio.Future[Any]
    begun: bool = False


class Turns:
    """The threads in which attention is computed. All methods run on the loop; `counters` are told of batches."""

    def __init__(self, threads: int, progress: Progress, counters: collections.Counter[str]) -> None:
        self._side_by_side = threads or min(THREADS_MAX, len(os.sched_getaffinity(0)))
        # Each thread that calls a parallel kernel gets a team of threads for it: large pieces all go to the same one.
        self._main = Workers(1, "kvtierd-attend", progress, NICENESS)
        self._side = Workers(max(1, self._side_by_side - 1), "kvtierd-attend-side", progress, NICENESS)
        self._counters = counters
        self._waiting: collections.deque[_Turn] = collections.deque()
        self._busy = False
        self._driver: asyncio.Task[None] | None = None

    async def run(self, piece: Callable[[], T], work: int = 0) -> T:
        """Run a piece when it is its turn, in the order of asking.

        `work`, in any unit that is the same for all, says that it uses one processor. A caller that is cancelled waits
        for what has begun, because memory that a kernel reads must not be given back before it ends.
        """
        if not self._busy:
            self._busy = True
            try:
                return await self._main.run(piece)
            finally:
                self._next()
        turn = _Turn(piece, work, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        cancelled = False
        while not turn.future.done():
            try:
                await asyncio.wait([turn.future])
            except asyncio.CancelledError:
                if not turn.begun:
                    self._waiting.remove(turn)
                    raise
                cancelled = True
        if cancelled:
            turn.future.exception()  # it counts as seen: the cancelled caller has no use for it
            raise asyncio.CancelledError
        result: T = turn.future.result()
        return result

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._main.close()
        self._side.close()

    def _next(self) -> None:
        if self._waiting:
            self._driver = asyncio.create_task(self._drive(), name="attend-turns")
        else:
            self._busy = False

    async def _drive(self) -> None:
        while batch := self._take():
            if len(batch) > 1:
                self._counters["attend_batches"] += 1
                self._counters["attend_batched_pieces"] += len(batch)
            pools = [self._main, *[self._side] * (len(batch) - 1)]
            await asyncio.gather(*(self._one(turn, pool) for turn, pool in zip(batch, pools, strict=True)))
        self._busy = False

    def _take(self) -> list[_Turn]:
        """The first that waits, and those that may run beside it."""
        if not self._waiting:
            return []
        first = self._waiting.popleft()
        batch, least, most = [first], first.work, first.work
        if first.work:
            for turn in list(self._waiting):
                if len(batch) == self._side_by_side:
                    break
                if turn.work and max(most, turn.work) <= SIMILAR * min(least, turn.work):
                    self._waiting.remove(turn)
                    batch.append(turn)
                    least, most = min(least, turn.work), max(most, turn.work)
        for turn in batch:
            turn.begun = True
        return batch

    async def _one(self, turn: _Turn, pool: Workers) -> None:
        try:
            turn.future.set_result(await pool.run(turn.piece))
        except Exception as error:  # noqa: BLE001 - raised where the piece was asked for
            turn.future.set_exception(error)
