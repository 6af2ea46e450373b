"""Pools count what they are given and what comes back: what the watchdog goes by."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtierd.core.progress import Progress
from kvtierd.storage.pool import IoPool
from kvtierd.tiers.workers import Workers


def test_io_threads_count_what_waits_runs_and_ended() -> None:
    async def scenario() -> None:
        progress, gate = Progress(), threading.Event()
        pool = IoPool(1, progress)
        jobs = [pool.submit(lambda _scratch: gate.wait(20)) for _ in range(3)]
        assert (progress.begun, progress.ended, progress.pending) == (3, 0, 3)
        gate.set()
        await asyncio.gather(*jobs)
        assert progress.pending == 0
        failing = pool.submit(lambda _scratch: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await failing
        assert (progress.begun, progress.ended) == (4, 4)
        pool.close()

    asyncio.run(scenario())


def test_workers_count_what_waits_runs_and_ended() -> None:
    async def scenario() -> None:
        workers, gate = Workers(1), threading.Event()
        task = asyncio.create_task(workers.run(lambda: gate.wait(20)))
        await asyncio.sleep(0)
        assert workers.progress.pending == 1
        gate.set()
        assert await task
        assert (workers.progress.pending, workers.progress.ended) == (0, 1)
        workers.close()

    asyncio.run(scenario())
