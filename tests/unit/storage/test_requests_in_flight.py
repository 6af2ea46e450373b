"""Requests in flight: what a segment that is recycled, or a caller that is cancelled, must wait for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from kvtierd.storage import Extent, SegmentStore
from kvtierd.testing.faulty_io import Call, Fault, FaultyIo
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.unit.storage.blocks import TINY, Block, Ledger, by_key, opened, put, run


class GatedIo(FaultyIo):
    """Reads wait at a gate; `reading` says that one has come to it."""

    def __init__(self, inner: MemoryIo) -> None:
        super().__init__(inner, self.wait)
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()

    def wait(self, call: Call) -> Fault | None:
        if call.operation == "read" and call.offset:
            self.reading.set()
            assert self.gate.wait(30)
        return None


def test_case_05_segment_is_not_recycled_under_a_read_in_flight(tmp_path: Path) -> None:
    async def check() -> None:
        io = GatedIo(MemoryIo(MemoryDisk()))
        async with opened(tmp_path, io, **TINY) as (store, _):
            ledger = Ledger(store)
            await ledger.put(store, Block(0))
            block, extent = ledger.held[0]
            io.gate.clear()
            item = block.fetch(extent)
            reading = asyncio.create_task(store.read([item]))
            await asyncio.to_thread(io.reading.wait, 30)

            writing = asyncio.create_task(fill(ledger, store))
            while 0 in ledger.held:  # its segment is announced, so it is the next to be recycled
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert not writing.done()
            assert not reading.done()
            io.gate.set()
            assert await reading == [None]
            assert block.same(item.out), "the segment was written over while it was read"
            await writing

    async def fill(ledger: Ledger, store: SegmentStore) -> None:
        for number in range(1, 60):
            await ledger.put(store, Block(number))

    run(check)


def test_case_05_block_of_a_segment_that_is_given_up_meanwhile_is_an_error(tmp_path: Path) -> None:
    """A batch lies half in a segment that others recycle before the batch is done; a read holds that segment back."""

    async def check() -> None:
        reads, writes, reading = threading.Event(), threading.Event(), threading.Event()

        def plan(call: Call) -> Fault | None:
            if call.operation == "read" and call.offset:
                reading.set()
                assert reads.wait(30)
            if call.operation == "write" and call.length > 4096 and call.name == "segment-000001":
                assert writes.wait(30)
            return None

        io = FaultyIo(MemoryIo(MemoryDisk()), plan)
        async with opened(tmp_path, io, io_threads=3, **TINY) as (store, _):
            ledger = Ledger(store)
            await ledger.put(store, Block(0))
            block, extent = ledger.held[0]
            holding = asyncio.create_task(store.read([block.fetch(extent)]))
            await asyncio.to_thread(reading.wait, 30)
            batch = asyncio.create_task(store.write([Block(number).item() for number in range(1, 8)]))
            await asyncio.sleep(0)
            filling = asyncio.create_task(fill(ledger, store))
            while 0 in ledger.held:
                await asyncio.sleep(0.001)
            writes.set()
            results = await batch
            assert [isinstance(result, Extent) for result in results] == [False] * 3 + [True] * 4
            reads.set()
            assert await holding == [None]
            filling.cancel()
            await asyncio.wait([filling])

    async def fill(ledger: Ledger, store: SegmentStore) -> None:
        for number in range(100, 200):
            await ledger.put(store, Block(number))

    run(check)


def test_case_05_cancelled_read_returns_only_when_its_buffer_is_free(tmp_path: Path) -> None:
    async def check() -> None:
        io = GatedIo(MemoryIo(MemoryDisk()))
        async with opened(tmp_path, io, **TINY) as (store, _):
            block = Block(0)
            (extent,) = await put(store, block)
            io.gate.clear()
            item = block.fetch(extent)
            reading = asyncio.create_task(store.read([item]))
            await asyncio.to_thread(io.reading.wait, 30)
            for _ in range(3):
                reading.cancel()
                await asyncio.sleep(0.01)
            assert not reading.done(), "the buffer was given back while a thread writes into it"
            io.gate.set()
            await asyncio.wait([reading])
            assert reading.cancelled()
            assert block.same(item.out)

    run(check)


def test_cancelled_write_is_found_neither_now_nor_later(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryDisk()
        async with opened(tmp_path, MemoryIo(disk), **TINY) as (store, _):
            await put(store, Block(1))
            writing = asyncio.create_task(store.write([Block(2).item()]))
            await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
            assert writing.cancelled()
            assert store.stats()["live_extents"] == 1
        async with opened(tmp_path, MemoryIo(disk), **TINY) as (_, found):
            assert by_key(found).keys() == {Block(1).digest + Block(1).key}

    run(check)
