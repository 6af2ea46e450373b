"""A full store recycles its oldest segment, tells its caller before, and never under a request."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from kvtierd.core.errors import StorageError
from kvtierd.core.units import KIB, MIB
from kvtierd.storage import Extent
from kvtierd.storage.interface import Extents, GoneError, IoMode
from kvtierd.testing.faulty_io import FaultyIo
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.unit.storage.blocks import LARGE, TINY, Block, Ledger, by_key, namespace, opened, put, readable, run


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
            assert stats["used_bytes"] <= stats["capacity_bytes"] == 380 * KIB

    run(check)


def test_case_11_disk_holds_no_more_than_the_capacity_with_everything_counted(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, **TINY) as (store, _):
            for number in range(60):
                await put(store, Block(number))
            taken = sum(path.stat().st_blocks * 512 for path in (tmp_path, *tmp_path.iterdir()))
            assert taken <= 380 * KIB

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


def test_recycled_segment_has_its_new_header_on_stable_storage_before_its_first_record(tmp_path: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(tmp_path, io, **TINY) as (store, _):
            for number in range(60):
                await put(store, Block(number))
            copy_at = store.stats()["segment_bytes"] - 4096
        lives = 0
        for name in {call.name for call in io.calls if call.name.startswith("segment")}:
            header_is_stable = False
            for call in io.calls:
                if call.name == name and call.operation == "write" and call.offset in {0, copy_at}:
                    header_is_stable, lives = False, lives + (call.offset == 0)
                elif call.name == name and call.operation == "sync":
                    header_is_stable = True
                elif call.name == name and call.operation == "write":
                    assert header_is_stable
        assert lives > 8

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
            told: list[tuple[int, Extent]] = []
            store.on_reclaim(told.extend)
            places = [by_key(found)[block.digest + block.key] for block in blocks]
            store.adopt(Extents.of(places[1:]), np.arange(101, 106, dtype=np.int64))
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
            await store.flush()
            left = store.stats()["segments"]
            assert 1 <= left <= segments, "a segment or two made room for the journal"
            assert store.stats()["failed_writes"] == store.stats()["refused_blocks"] == 0
            assert store.stats()["state"] == "ok"
            (point / "ballast").unlink()
            await put(store, *map(Block, range(100, 130)))
            assert store.stats()["segments"] > left

    run(check)


def test_a_read_that_lost_to_recycling_is_gone_and_no_failure_of_the_disk(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, **TINY) as (store, _):
            first = Block(0)
            (extent,) = await put(store, first)
            for number in range(1, 200):
                await put(store, Block(number))
            assert store.stats()["reclaimed_segments"] > 0
            (error,) = await store.read([first.fetch(extent)])
            assert isinstance(error, GoneError)
            assert (store.stats()["gone_reads"], store.stats()["failed_reads"]) == (1, 0)

    run(check)
