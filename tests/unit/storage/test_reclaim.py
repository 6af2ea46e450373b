"""A full store recycles its oldest segment, tells its caller before, and never under a request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvtierd.core.errors import StorageError
from kvtierd.core.units import KIB, MIB
from kvtierd.storage import Extent, SegmentStore
from kvtierd.storage.interface import IoMode
from kvtierd.storage.io_memory import MemoryDisk, MemoryIo
from kvtierd.testing.faulty_io import Call, Fault, FaultyIo
from tests.unit.storage.blocks import Block, by_key, opened, put, readable, run

TINY = {"capacity": 360 * KIB, "segment_bytes": 80 * KIB}
"""Three or four segments of about six blocks."""


class Ledger:
    """A caller as the interface wants it: knows what it stored and forgets what it is told is going."""

    def __init__(self, store: SegmentStore) -> None:
        self.held: dict[int, tuple[Block, Extent]] = {}
        self.told: list[int] = []
        store.on_reclaim(self.forget)

    def forget(self, gone: list[tuple[int, Extent]]) -> None:
        for tag, extent in gone:
            self.told.append(tag)
            block, held = self.held.pop(tag)
            assert held == extent, f"block {block.tag} was announced at a place where it never was"

    async def put(self, store: SegmentStore, *blocks: Block) -> None:
        for block, extent in zip(blocks, await put(store, *blocks), strict=True):
            self.held[block.tag] = block, extent


def test_full_store_drops_its_oldest_blocks_and_announces_each_once(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, **TINY) as (store, _):
            ledger = Ledger(store)
            for number in range(60):
                await ledger.put(store, Block(number))
            assert ledger.told == list(range(len(ledger.told))), "oldest first, each once"
            assert sorted(ledger.held) == list(range(len(ledger.told), 60))
            assert len(ledger.held) >= 12
            for block, extent in ledger.held.values():
                assert await readable(store, block, extent)
            stats = store.stats()
            assert stats["live_extents"] == len(ledger.held)
            assert stats["used_bytes"] <= stats["capacity_bytes"] == 360 * KIB

    run(check)


def test_case_11_disk_holds_no_more_than_the_capacity_with_everything_counted(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, **TINY) as (store, _):
            for number in range(60):
                await put(store, Block(number))
            taken = sum(path.stat().st_blocks * 512 for path in (tmp_path, *tmp_path.iterdir()))
            assert taken <= 360 * KIB

    run(check)


def test_read_of_an_announced_extent_fails_at_once(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, **TINY) as (store, _):
            first = Block(0)
            (extent,) = await put(store, first)
            for number in range(1, 60):
                await put(store, Block(number))
            (error,) = await store.read([first.fetch(extent)])
            assert isinstance(error, StorageError)

    run(check)


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


def header_writes(calls: Sequence[Call], name: str) -> int:
    return sum(call.operation == "write" and call.name == name and call.offset == 0 for call in calls)


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


def test_recycled_segment_has_its_new_header_on_stable_storage_before_its_first_record(tmp_path: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(tmp_path, io, **TINY) as (store, _):
            for number in range(60):
                await put(store, Block(number))
        lives = 0
        for name in {call.name for call in io.calls if call.name.startswith("segment")}:
            header_is_stable = False
            for call in io.calls:
                if call.name == name and call.operation == "write" and call.offset == 0:
                    header_is_stable, lives = False, lives + 1
                elif call.name == name and call.operation == "sync":
                    header_is_stable = True
                elif call.name == name and call.operation == "write":
                    assert header_is_stable
        assert lives > 8

    run(check)


def test_case_05_block_of_a_segment_that_is_given_up_meanwhile_is_an_error(tmp_path: Path) -> None:
    """A batch lies half in a segment that others recycle before the batch is done; a read holds that segment back."""

    async def check() -> None:
        reads, writes, reading = threading.Event(), threading.Event(), threading.Event()

        def plan(call: Call) -> Fault | None:
            if call.operation == "read" and call.offset:
                reading.set()
                assert reads.wait(30)
            if call.operation == "write" and call.offset and call.name == "segment-000001":
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


def test_batch_larger_than_the_store_keeps_its_end_and_gives_errors_for_the_rest(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, **TINY) as (store, _):
            ledger = Ledger(store)
            blocks = [Block(number) for number in range(100)]
            store.register(blocks[0].digest, blocks[0].space)
            results = await store.write([block.item() for block in blocks])
            stored = [block for block, result in zip(blocks, results, strict=True) if isinstance(result, Extent)]
            assert stored
            assert stored[-1].tag == 99
            assert ledger.told == []
            for block, result in zip(blocks, results, strict=True):
                if isinstance(result, Extent):
                    assert await readable(store, block, result)

    run(check)


def test_case_11_lower_capacity_at_restart_is_honoured_oldest_first(tmp_path: Path) -> None:
    async def check() -> None:
        fields = {"segment_bytes": 100 * KIB}
        async with opened(tmp_path, capacity=2 * MIB, **fields) as (store, _):
            for number in range(100):
                await put(store, Block(number))
        async with opened(tmp_path, capacity=600 * KIB, **fields) as (store, found):
            assert store.stats()["used_bytes"] <= 600 * KIB
            assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= 600 * KIB
            held = by_key(found)
            alive = [n for n in range(100) if Block(n).digest + Block(n).key in held]
            assert alive == list(range(alive[0], 100)), "the newest stay, without a gap"
            assert any("capacity is lower" in note for note in found.notes)
            for number in alive:
                block = Block(number)
                assert await readable(store, block, held[block.digest + block.key])
            for number in range(100, 160):
                await put(store, Block(number))
            assert store.stats()["used_bytes"] <= 600 * KIB

    run(check)


def test_adopted_tags_are_announced_and_unknown_ones_are_not(tmp_path: Path) -> None:
    async def check() -> None:
        blocks = [Block(number) for number in range(6)]
        async with opened(tmp_path, **TINY) as (store, _):
            await put(store, *blocks)
        async with opened(tmp_path, **TINY) as (store, found):
            import numpy as np

            told: list[tuple[int, Extent]] = []
            store.on_reclaim(told.extend)
            places = [by_key(found)[block.digest + block.key] for block in blocks]
            store.adopt(places[1:], np.arange(101, 106, dtype=np.int64))
            for number in range(60, 120):
                await put(store, Block(number))
            early = [entry for entry in told if entry[0] < 1000 and entry[0] >= 101]
            assert [tag for tag, _ in early][:5] == [101, 102, 103, 104, 105]
            assert [extent for _, extent in early][:5] == places[1:]

    run(check)


def test_recycling_goes_on_when_segments_change_their_size(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, capacity=600 * KIB, segment_bytes=100 * KIB) as (store, _):
            for number in range(60):
                await put(store, Block(number))
        async with opened(tmp_path, capacity=600 * KIB, segment_bytes=200 * KIB) as (store, found):
            assert found.extents
            for number in range(100, 200):
                await put(store, Block(number))
            assert store.stats()["used_bytes"] <= 600 * KIB
            sizes = {path.stat().st_size for path in tmp_path.glob("segment-*")}
            assert sizes == {store.stats()["segment_bytes"]}

    run(check)


def test_reserve_of_free_space_is_kept_by_recycling_instead(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryDisk(capacity_bytes=MIB)
        async with opened(tmp_path, MemoryIo(disk), capacity=4 * MIB, segment_bytes=100 * KIB) as (store, _):
            assert store.mode is IoMode.BUFFERED
            for number in range(200):
                await put(store, Block(number))
            assert MIB - disk.used_bytes() >= MIB // 20
            assert store.stats()["reclaimed_segments"] > 0

    run(check)


def test_block_that_fits_no_segment_is_an_error_of_its_own(tmp_path: Path) -> None:
    from tests.unit.storage.blocks import LARGE, namespace

    async def check() -> None:
        async with opened(tmp_path) as (store, _):
            large, small = Block(1, namespace(LARGE)), Block(2)
            for block in (large, small):
                store.register(block.digest, block.space)
            refused, stored = await store.write([large.item(), small.item()])
            assert isinstance(refused, StorageError)
            assert "does not fit" in str(refused)
            assert isinstance(stored, Extent)

    run(check)


def test_case_11_real_full_disk_recycles_and_the_store_stays_up(mounted) -> None:
    point = mounted("tmpfs", "size=1m")

    async def check() -> None:
        async with opened(point, capacity=64 * MIB, segment_bytes=128 * KIB) as (store, _):
            await put(store, *map(Block, range(20)))
            with contextlib.suppress(OSError):
                (point / "ballast").write_bytes(bytes(MIB))
            assert os.statvfs(point).f_bavail == 0
            segments = store.stats()["segments"]
            for number in range(20, 100):
                (extent,) = await put(store, Block(number))
                assert await readable(store, Block(number), extent)
            assert store.stats()["segments"] == segments
            assert store.stats()["failed_writes"] == 0
            (point / "ballast").unlink()
            await put(store, *map(Block, range(100, 130)))
            assert store.stats()["segments"] > segments

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
