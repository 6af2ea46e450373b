"""Making things durable: one round of syncs serves everybody who asked before it began."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Flusher:
    """Coalesces concurrent flushes: whoever comes while a round runs shares the next one.

    A caller who is cancelled stops waiting; the round goes on for the others.
    """

    def __init__(self, sync: Callable[[], Awaitable[None]]) -> None:
        self._sync = sync
        self._running: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None

    async def flush(self) -> None:
        """Return when a round that began after this call is done; raises what it raised."""
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._round(self._running))
            # Everybody may have stopped waiting by the time a round fails; its error then has no reader.
            self._waiting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._waiting)

    async def _round(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._waiting = self._waiting, None
        try:
            await self._sync()
        finally:
            self._running = None
