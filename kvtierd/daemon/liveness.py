"""Proof that the daemon gets on: its loop turns, and what it gave to threads comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from kvtierd.core.clock import Clock
from kvtierd.core.progress import Progress
from kvtierd.telemetry.notify import extend_timeout, notify, notify_status

log = logging.getLogger(__name__)

DEFAULT_STALL_S = 30.0
"""Where nobody set a watchdog: a disk that finishes nothing for so long is stuck."""
LONG_STEP_S = 2.0
"""How often a start or a stop says that it goes on."""
EXTENSION_S = 30.0
STATUS_EVERY_S = 10.0


class Liveness:
    """Whether work in threads moves. `watched` names each kind of work by what an operator calls it."""

    def __init__(self, watched: Mapping[str, Progress], stall_s: float, clock: Clock) -> None:
        self.stall_s = stall_s
        self._watched = watched
        self._clock = clock
        self._last = dict.fromkeys(watched, (-1, clock.now_ns()))

    def stuck(self) -> str:
        """What has work and finished none of it for `stall_s`; "" while all moves. Call it often."""
        now_ns = self._clock.now_ns()
        found = ""
        for name, progress in self._watched.items():
            ended, since_ns = self._last[name]
            if not progress.pending or progress.ended != ended:
                self._last[name] = (progress.ended, now_ns)
            elif now_ns - since_ns >= self.stall_s * 1e9:
                found = f"{name}: {progress.pending} jobs, none finished for {(now_ns - since_ns) / 1e9:.0f} s"
        return found


class Watchdog:
    """Feeds the service manager's watchdog while the loop turns and no work is stuck.

    A loop that hangs cannot feed, so the manager ends the process; a disk that hangs is seen here, and not fed either.
    """

    def __init__(self, liveness: Liveness, period_s: float, status: Callable[[], str]) -> None:
        self._liveness = liveness
        self._every_s = min(period_s / 4, 5.0) if period_s else 5.0
        self._status = status
        self.stuck = ""
        """What is stuck; for /healthz."""

    async def run(self) -> None:
        """Feed until cancelled."""
        turns_per_status = max(1, round(STATUS_EVERY_S / self._every_s))
        turn = 0
        while True:
            stuck = self._liveness.stuck()
            if stuck and not self.stuck:
                log.error("the watchdog is not fed: %s", stuck)
            elif self.stuck and not stuck:
                log.warning("work moves again; it had stopped: %s", self.stuck)
            self.stuck = stuck
            if not stuck:
                notify("WATCHDOG=1")
            if turn % turns_per_status == 0 and (text := self._status()):
                notify_status(text)
            turn += 1
            await asyncio.sleep(self._every_s)


@contextlib.asynccontextmanager
async def long_step(status: Callable[[], str], liveness: Liveness) -> AsyncIterator[None]:
    """During a start or a stop: tell what is being done, and ask for more time as long as work moves."""

    async def tell() -> None:
        while True:
            notify_status(status())
            if not liveness.stuck():
                extend_timeout(EXTENSION_S)
            await asyncio.sleep(LONG_STEP_S)

    task = asyncio.create_task(tell(), name="long-step")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
