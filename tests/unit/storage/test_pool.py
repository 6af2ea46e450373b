"""The I/O threads: several at once, reads first, errors handed back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtierd.storage.pool import IoPool


def test_as_many_jobs_run_at_once_as_there_are_threads() -> None:
    async def check() -> None:
        pool = IoPool(3)
        together = threading.Barrier(3, timeout=30)
        await asyncio.gather(*(pool.submit(lambda _: together.wait(), urgent=True) for _ in range(3)))
        await asyncio.to_thread(pool.close)

    asyncio.run(check())


def test_urgent_jobs_overtake_and_patient_ones_are_not_starved() -> None:
    async def check() -> None:
        pool = IoPool(1)
        gate, order = threading.Event(), []
        jobs = [pool.submit(lambda _: gate.wait(30), urgent=True)]
        jobs += [pool.submit(lambda _, n=n: order.append(("patient", n)), urgent=False) for n in range(3)]
        jobs += [pool.submit(lambda _, n=n: order.append(("urgent", n)), urgent=True) for n in range(20)]
        gate.set()
        await asyncio.gather(*jobs)
        await asyncio.to_thread(pool.close)
        kinds = [kind for kind, _ in order]
        assert kinds[0] == "urgent"
        assert [n for kind, n in order if kind == "urgent"] == list(range(20))
        assert [n for kind, n in order if kind == "patient"] == list(range(3))
        assert max(i for i, kind in enumerate(kinds) if kind == "patient") < 16, "a patient job waited for all reads"

    asyncio.run(check())


def test_error_of_a_job_is_raised_where_it_is_awaited_and_the_thread_lives_on() -> None:
    async def check() -> None:
        pool = IoPool(1)
        with pytest.raises(ZeroDivisionError):
            await pool.submit(lambda _: 1 // 0, urgent=True)
        assert await pool.submit(lambda scratch: scratch.headers.size, urgent=False) > 0
        await asyncio.to_thread(pool.close)
        with pytest.raises(RuntimeError, match="ended"):
            pool.submit(lambda _: None, urgent=True)

    asyncio.run(check())


def test_close_leaves_no_thread() -> None:
    async def check() -> None:
        before = threading.active_count()
        pool = IoPool(4)
        assert threading.active_count() == before + 4
        pool.close()
        assert threading.active_count() == before

    asyncio.run(check())
