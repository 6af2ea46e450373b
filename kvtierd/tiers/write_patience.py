"""The write-behind's patience: it leaves clients that copy some time, and none to them when somebody waits for it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterator

from kvtierd.core.clock import Clock
from kvtierd.policy.stepping_aside import PAUSE_MAX_NS, SteppingAside


class Patience:
    """Pauses before batches. Everything runs on the loop."""

    def __init__(self, limit_bytes: int, clock: Clock, counters: collections.Counter[str]) -> None:
        """`limit_bytes`: with a larger backlog nothing waits, since what waits is held in host and lost in a crash."""
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._counters = counters
        self._aside = SteppingAside()
        self._wrote_ns = 0
        self._waiting = 0
        self._hurry = asyncio.Event()

    def clients_copy(self, copy_ns: float) -> None:
        """A client was given blocks in host that one thread takes `copy_ns` to copy."""
        self._aside.given(copy_ns, self._clock.now_ns())

    @contextlib.contextmanager
    def somebody_waits(self) -> Iterator[None]:
        """Meanwhile there is no pause, and one that has begun ends."""
        self._waiting += 1
        self._hurry.set()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._hurry.clear()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A batch is being written."""
        began_ns = self._clock.now_ns()
        try:
            yield
        finally:
            self._wrote_ns = self._clock.now_ns() - began_ns

    async def leave_time(self, backlog_bytes: Callable[[], int], inflight: set[asyncio.Task[None]]) -> None:
        """While clients copy, let what is being written end, and leave them some time."""
        copying = self._aside.copying(self._clock.now_ns())
        if self._waiting or not copying or backlog_bytes() > self._limit_bytes:
            return
        if inflight:
            await asyncio.wait(inflight, timeout=PAUSE_MAX_NS / 1e9)
        pause_ns = self._aside.pause_ns(self._wrote_ns, self._clock.now_ns())
        if not pause_ns or self._waiting:
            return
        self._counters["offload_pauses"] += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_ns / 1e9):
                await self._hurry.wait()
