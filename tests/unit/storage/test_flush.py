"""Flush: what it covers, how many share one, and what is synced."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import StorageError
from kvtierd.storage import SegmentStore
from kvtierd.storage.flusher import Flusher
from kvtierd.storage.stats import COUNTERS, GAUGES
from kvtierd.testing.faulty_io import FaultyIo
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.unit.storage.blocks import Block, by_key, known, opened, put, run, settings


def syncs(io: FaultyIo) -> int:
    return sum(call.operation == "sync" for call in io.calls)


def test_flush_syncs_only_what_was_written_since_the_last(tmp_path: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(tmp_path, io) as (store, _):
            await put(store, known(1))
            before = syncs(io)
            await store.flush()
            assert syncs(io) == before + 1
            await store.flush()
            assert syncs(io) == before + 1

    run(check)


def test_what_was_flushed_survives_a_loss_of_power_and_the_rest_is_a_miss(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryDisk()
        store = SegmentStore(settings(tmp_path), clock=ManualClock(), io=MemoryIo(disk))
        await store.open()
        extents = await put(store, known(1), known(2), known(3))
        await store.delete([(known(3).digest, known(3).key, extents[2])])
        await store.flush()
        await put(store, known(4))
        later = disk.after_power_loss()
        await store.close()
        async with opened(tmp_path, MemoryIo(later)) as (_, found):
            assert {key.tobytes() for key in found.keys} == {known(1).key, known(2).key}

    run(check)


def test_flush_covers_a_write_that_is_still_on_its_way(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryDisk()
        async with opened(tmp_path, MemoryIo(disk)) as (store, _):
            block = known(1)
            store.register(block.digest, block.space)
            writing = asyncio.create_task(store.write([block.item()]))
            await asyncio.sleep(0)
            await store.flush()
            later = disk.after_power_loss()
            await writing
        async with opened(tmp_path, MemoryIo(later)) as (_, found):
            assert {key.tobytes() for key in found.keys} == {block.key}

    run(check)


def test_concurrent_flushes_share_rounds() -> None:
    async def check() -> None:
        rounds, running = [], []

        async def sync() -> None:
            assert not running, "a round must not return while what it covers is still synced by another"
            running.append(1)
            rounds.append(1)
            await asyncio.sleep(0.01)
            running.clear()

        flusher = Flusher(sync)
        first = asyncio.create_task(flusher.flush())
        await asyncio.sleep(0.001)
        await asyncio.gather(first, *(flusher.flush() for _ in range(50)))
        assert len(rounds) == 2, "those who came during the first round share one more"

    run(check)


def test_flush_that_comes_during_a_round_waits_for_the_next() -> None:
    async def check() -> None:
        written, durable = 0, 0

        async def sync() -> None:
            nonlocal durable
            covered = written
            await asyncio.sleep(0.005)
            durable = covered

        flusher = Flusher(sync)

        async def client() -> None:
            nonlocal written
            for _ in range(20):
                written += 1
                mine = written
                await flusher.flush()
                assert durable >= mine

        await asyncio.gather(*(client() for _ in range(5)))

    run(check)


def test_failed_round_is_told_to_all_who_wait_and_the_next_is_tried() -> None:
    async def check() -> None:
        outcomes = [StorageError("no"), None]

        async def sync() -> None:
            await asyncio.sleep(0)
            if error := outcomes.pop(0):
                raise error

        flusher = Flusher(sync)
        told = await asyncio.gather(*(flusher.flush() for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in told] == ["no"] * 3
        await flusher.flush()

    run(check)


def test_cancelled_flush_leaves_the_round_to_the_others() -> None:
    async def check() -> None:
        done = []

        async def sync() -> None:
            await asyncio.sleep(0.01)
            done.append(1)

        flusher = Flusher(sync)
        leaving, staying = asyncio.create_task(flusher.flush()), asyncio.create_task(flusher.flush())
        await asyncio.sleep(0.001)
        leaving.cancel()
        await staying
        assert leaving.cancelled()
        assert done == [1]

    run(check)


def test_full_segment_is_synced_without_being_asked(tmp_path: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(tmp_path, io, capacity=600 << 10, segment_bytes=100 << 10) as (store, _):
            await put(store, *map(known, range(20)))
            while store.stats()["syncs"] == 0:
                await asyncio.sleep(0.001)

    run(check)


def test_closed_store_answers_with_errors(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path) as (store, _):
            (extent,) = await put(store, known(1))
        (write_error,) = await store.write([known(1).item()])
        (read_error,) = await store.read([known(1).fetch(extent)])
        assert isinstance(write_error, StorageError)
        assert isinstance(read_error, StorageError)
        for call in (store.flush, lambda: store.delete([])):
            with pytest.raises(StorageError, match="closed"):
                await call()
        await store.close()

    run(check)


def test_every_statistic_is_described(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path) as (store, _):
            extents = await put(store, known(1), known(2))
            await store.read([known(1).fetch(extents[0])])
            await store.delete([(known(2).digest, known(2).key, extents[1])])
            stats = store.stats()
            assert stats.keys() == COUNTERS.keys() | GAUGES.keys()
            expected = {"written_blocks": 2, "read_blocks": 1, "deleted_blocks": 1, "live_extents": 1}
            assert {name: stats[name] for name in expected} == expected
            assert stats["live_bytes"] == extents[0].length

    run(check)


def test_case_01_many_readers_and_writers_each_get_their_own_bytes(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, capacity=3 << 20, segment_bytes=512 << 10) as (store, _):
            held: dict[int, tuple[Block, object]] = {}
            store.on_reclaim(lambda told: [held.pop(tag) for tag, _ in told])
            store.register(known(0).digest, known(0).space)

            async def writer(begin: int) -> None:
                for number in range(begin, begin + 60, 4):
                    blocks = [known(n) for n in range(number, number + 4)]
                    for block, extent in zip(blocks, await store.write([b.item() for b in blocks]), strict=True):
                        held[block.tag] = block, extent

            async def reader(seed: int) -> int:
                good = 0
                for turn in itertools.count():
                    if writers.done():
                        return good
                    chosen = list(held.values())[(seed + turn) % 7 :: 5]
                    items = [block.fetch(extent, aligned=turn % 2 == 0) for block, extent in chosen]
                    for (block, _), item, error in zip(chosen, items, await store.read(items), strict=True):
                        if error is None:
                            assert block.same(item.out)
                            good += 1
                        else:
                            assert block.tag not in held, error
                    await asyncio.sleep(0)
                raise AssertionError

            writers = asyncio.gather(*(writer(begin) for begin in range(0, 480, 60)))
            readers = asyncio.gather(*(reader(seed) for seed in range(6)))
            await writers
            assert sum(await readers) > 100
            assert store.stats()["reclaimed_segments"] > 0
            survivors = set(held)
        async with opened(tmp_path, capacity=3 << 20, segment_bytes=512 << 10) as (_, found):
            assert len(by_key(found)) == len(survivors)

    run(check)
