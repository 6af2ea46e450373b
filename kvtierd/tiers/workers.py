"""The compute pool: the threads in which copies and checksums run, so that the loop never does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

THREADS_MAX = 8
"""More do not help: memory bandwidth is spent before."""


class Workers:
    """A pool of threads for work on slots."""

    def __init__(self, threads: int) -> None:
        count = threads or min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self.executor = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="kvtierd-worker")

    async def run(self, work: Callable[[], T]) -> T:
        """Run in a thread. A cancelled caller still waits: slots that a thread touches must stay held until it ends."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                await asyncio.wait([future])
            raise

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self.executor.shutdown(wait=True, cancel_futures=True)
