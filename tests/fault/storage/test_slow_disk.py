"""A disk that takes writes slowly, or not at all for a while: what is read is not held up, and nothing piles up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kvtierd.storage import Extent
from kvtierd.testing.faulty_io import Call, FaultyIo
from tests.unit.storage.blocks import Block, engine, known, opened, put, readable, run

THREADS = 3


class Gate:
    """A plan under which writes wait until it opens; counts how many wait at once."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = 0
        self.most = 0
        self._guard = threading.Lock()

    def __call__(self, call: Call) -> None:
        if call.operation != "write":
            return
        with self._guard:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        if not self.open.wait(60):
            raise AssertionError("the gate was never opened")
        with self._guard:
            self.waiting -= 1


def test_case_22_reads_go_on_while_writes_hang(folder: Path) -> None:
    async def check() -> None:
        io, gate = FaultyIo(engine()), Gate()
        async with opened(folder, io, io_threads=THREADS) as (store, _):
            before = [known(n) for n in range(8)]
            extents = await put(store, *before)
            io.plan = gate
            large = [Block(100 + n) for n in range(THREADS * 4)]
            batches = [asyncio.create_task(store.write([block.item()])) for block in large]
            while gate.waiting < THREADS - 1:
                await asyncio.sleep(0.001)
            for _ in range(20):
                for block, extent in zip(before, extents, strict=True):
                    assert await readable(store, block, extent)
            assert gate.most == THREADS - 1, (
                "writes took the last thread, or more went to the disk than it has room for"
            )
            assert not any(batch.done() for batch in batches)
            gate.open.set()
            for block, batch in zip(large, batches, strict=True):
                (extent,) = await batch
                assert isinstance(extent, Extent)
                assert await readable(store, block, extent)

    run(check)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_case_22_requests_at_the_disk_never_exceed_the_threads(folder: Path, threads: int) -> None:
    async def check() -> None:
        lock, now, most = threading.Lock(), 0, 0

        class Counting(FaultyIo):
            def fault_of(self, *arguments: object) -> None:  # type: ignore[override]
                nonlocal now, most
                with lock:
                    now += 1
                    most = max(most, now)
                super().fault_of(*arguments)  # type: ignore[arg-type]
                with lock:
                    now -= 1

        async with opened(folder, Counting(engine()), io_threads=threads) as (store, _):
            blocks = [known(n) for n in range(60)]
            extents = await put(store, *blocks)
            await asyncio.gather(*(readable(store, b, e) for b, e in zip(blocks, extents, strict=True)))
            assert most <= threads

    run(check)
