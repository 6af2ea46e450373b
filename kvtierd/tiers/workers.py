"""The compute pool: the threads in which copies and checksums run, so that the loop never does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from kvtierd.core.progress import Progress

T = TypeVar("T")

THREADS_MAX = 8
"""More do not help: memory bandwidth is spent before."""


_log = logging.getLogger(__name__)


class Workers:
    """A pool of threads for work on slots. `niceness` lowers their priority, and that of threads that they make."""

    def __init__(
        self, threads: int, name: str = "kvtierd-worker", progress: Progress | None = None, niceness: int = 0
    ) -> None:
        count = threads or min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self.executor = concurrent.futures.ThreadPoolExecutor(
            count, thread_name_prefix=name, initializer=_be_nice, initargs=(niceness,)
        )
        self.progress = progress or Progress()

    async def run(self, work: Callable[[], T]) -> T:
        """Run in a thread. A caller that is cancelled, once or often, still waits: slots that a thread touches must
        stay held until it ends. (A deadline cancels a request, and the end of its session may do so again.)"""
        future = asyncio.get_running_loop().run_in_executor(self.executor, work)
        self.progress.begun += 1
        future.add_done_callback(self._ended)
        cancelled = False
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            if not future.cancelled():
                future.exception()  # it counts as seen: the cancelled caller has no use for it
            raise asyncio.CancelledError
        return future.result()

    def _ended(self, _future: object) -> None:
        self.progress.ended += 1

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self.executor.shutdown(wait=True, cancel_futures=True)


def _be_nice(by: int) -> None:
    """Lower the priority of this thread; on Linux that is a thread's own."""
    if not by:
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + by))
    except PermissionError as error:  # a sandbox may forbid it; an error here would break the pool for good
        _log.info("%s keeps its priority: %s", threading.current_thread().name, error)
