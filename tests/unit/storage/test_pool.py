"""The I/O threads: several at once, reads first, errors handed back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from kvtierd.storage.buffers import Scratch
from kvtierd.storage.pool import IoPool


def test_as_many_jobs_run_at_once_as_there_are_threads() -> None:
    async def check() -> None:
        pool = IoPool(3)
        together = threading.Barrier(3, timeout=30)
        await asyncio.gather(*(pool.submit(lambda _: together.wait()) for _ in range(3)))
        await asyncio.to_thread(pool.close)

    asyncio.run(check())


def test_reads_overtake_writes_and_urgent_jobs_overtake_both() -> None:
    async def check() -> None:
        pool = IoPool(1)
        gate, order = threading.Event(), []

        def log(kind: str, number: int) -> Callable[[Scratch], None]:
            return lambda _: order.append((kind, number))

        jobs = [pool.submit(lambda _: gate.wait(30))]
        jobs += [pool.write(log("check", n), log("write", n), 4096) for n in range(3)]
        jobs += [pool.read_patiently(log("patient", n), log("verified", n)) for n in range(3)]
        jobs += [pool.read(log("read", n), log("verify", n), 4096) for n in range(20)]
        jobs += [pool.submit(log("urgent", n)) for n in range(2)]
        gate.set()
        await asyncio.gather(*jobs)
        await asyncio.to_thread(pool.close)
        kinds = [kind for kind, _ in order]
        assert kinds[:2] == ["urgent"] * 2
        assert kinds[2:42] == ["read", "verify"] * 20
        assert kinds[42:48] == ["patient", "verified"] * 3
        assert sorted(kinds[48:]) == ["check"] * 3 + ["write"] * 3
        for kind in ("read", "write", "patient"):
            numbers = [number for its, number in order if its == kind]
            assert numbers == sorted(numbers), "a kind keeps its order"

    asyncio.run(check())


def test_writes_get_their_turn_while_reads_never_end() -> None:
    async def check() -> None:
        pool = IoPool(1)
        written = pool.write(lambda _: None, lambda _: "written", 4096)
        reads = 0
        while not written.done():
            await pool.read(lambda _: time.sleep(0.001), lambda _: None, 4096)
            reads += 1
            assert reads < 1000, "the write waited for all reads"
        assert await written == "written"
        await asyncio.to_thread(pool.close)

    asyncio.run(check())


def test_verifying_does_not_keep_the_device_waiting() -> None:
    async def check() -> None:
        pool = IoPool(2)
        second_is_read = threading.Event()
        first = pool.read(lambda _: None, lambda _: second_is_read.wait(30), 4096)
        await pool.read(lambda _: second_is_read.set(), lambda _: None, 4096)
        await first
        await asyncio.to_thread(pool.close)

    asyncio.run(check())


def test_failed_check_of_a_write_is_raised_and_nothing_is_transferred() -> None:
    async def check() -> None:
        pool = IoPool(1)
        transferred = []
        with pytest.raises(ZeroDivisionError):
            await pool.write(lambda _: 1 // 0, transferred.append, 4096)
        with pytest.raises(ZeroDivisionError):
            await pool.read(lambda _: 1 // 0, transferred.append, 4096)
        assert not transferred
        assert await pool.read(lambda _: 5, lambda _: None, 4096) == 5
        await asyncio.to_thread(pool.close)

    asyncio.run(check())


def test_closing_runs_what_was_submitted() -> None:
    async def check() -> None:
        pool = IoPool(3)
        done = []
        jobs = [pool.write(lambda _: time.sleep(0.001), lambda _, n=n: done.append(n), 4096) for n in range(20)]
        await asyncio.to_thread(pool.close)
        await asyncio.gather(*jobs)
        assert sorted(done) == list(range(20))

    asyncio.run(check())


def test_error_of_a_job_is_raised_where_it_is_awaited_and_the_thread_lives_on() -> None:
    async def check() -> None:
        pool = IoPool(1)
        with pytest.raises(ZeroDivisionError):
            await pool.submit(lambda _: 1 // 0)
        assert await pool.read_patiently(lambda scratch: scratch.headers.size) > 0
        await asyncio.to_thread(pool.close)
        with pytest.raises(RuntimeError, match="ended"):
            pool.submit(lambda _: None)

    asyncio.run(check())


def test_close_leaves_no_thread() -> None:
    async def check() -> None:
        before = set(threading.enumerate())  # threads of earlier tests may end meanwhile
        pool = IoPool(4)
        ours = set(threading.enumerate()) - before
        assert len(ours) == 4
        pool.close()
        assert not any(thread.is_alive() for thread in ours)

    asyncio.run(check())
