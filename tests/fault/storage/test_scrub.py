"""The scrub finds what rots while nobody reads it, at the rate it is given, and never disturbs."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.core.units import GIB, KIB
from kvtierd.storage import Extent, SegmentStore, scrub
from kvtierd.storage.endurance import DAY_S
from kvtierd.testing.faulty_io import Call, Fault, FaultyIo
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.fault.storage.test_damage import FIRST, RECORD, flip
from tests.unit.storage.blocks import by_key, forget_index, known, opened, put, readable, run, settings

FIELDS = {"capacity": 600 * KIB, "segment_bytes": 100 * KIB, "mode": "buffered"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "START_S", 0.002)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("place", [8, 100, 192, 4096, 8200], ids=["checksum", "key", "sums", "layer 0", "layer 1"])
@pytest.mark.parametrize("index", [True, False])
def test_damage_is_found_announced_and_not_served_again(folder: Path, place: int, *, index: bool) -> None:
    async def check() -> None:
        told: list[tuple[int, Extent]] = []
        async with opened(folder, scrub_rate=GIB, **FIELDS) as (store, _):
            store.on_reclaim(told.extend)
            extents = await put(store, *map(known, range(5)))
            await store.flush()
            await until(lambda: store.stats()["scrub_passes"] >= 2)
            assert told == []
            (path,) = folder.glob("segment-*")
            flip(path, FIRST + 2 * RECORD + place)
            await until(lambda: store.stats()["scrub_corrupt"] == 1)
            assert told == [(2, extents[2])]
            assert not await readable(store, known(2), extents[2])
            assert await readable(store, known(3), extents[3])
            assert store.stats()["live_extents"] == 4
        if not index:
            forget_index(folder)
        if place != 100 or not index:  # whose key a damaged header names is not known, so it cannot be struck out
            async with opened(folder, scrub_rate=0, **FIELDS) as (store, found):
                held = by_key(found)
                name = known(2).digest + known(2).key
                assert name not in held or not await readable(store, known(2), held[name])

    run(check)


def test_bad_sector_is_counted_and_the_block_kept_for_another_try(folder: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(folder, io, scrub_rate=GIB, **FIELDS) as (store, _):
            (extent,) = await put(store, known(1))

            def bad(call: Call) -> Fault | None:
                return Fault(errno.EIO) if call.operation == "read" else None

            io.plan = bad
            await until(lambda: store.stats()["scrub_unreadable"] >= 2)
            io.plan = None
            assert await readable(store, known(1), extent)
            assert store.stats()["scrub_corrupt"] == 0

    run(check)


def test_scrub_keeps_to_its_rate(folder: Path) -> None:
    """At a record a minute, the first one is read and no other."""

    async def check() -> None:
        async with opened(folder, scrub_rate=RECORD // 60, **FIELDS) as (store, _):
            await put(store, *map(known, range(5)))
            await until(lambda: store.stats()["scrubbed_bytes"] > 0)
            await asyncio.sleep(0.05)
            assert store.stats()["scrubbed_bytes"] == RECORD

    run(check)


def test_scrub_goes_on_while_segments_are_recycled(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, scrub_rate=GIB, **FIELDS) as (store, _):
            for number in range(120):
                await put(store, known(number))
            await until(lambda: store.stats()["scrub_passes"] >= 2)
            assert store.stats()["reclaimed_segments"] > 0
            assert store.stats()["scrub_corrupt"] == 0

    run(check)


def test_case_29_bytes_are_counted_by_cause_and_projected_on_the_rated_endurance(folder: Path) -> None:
    async def check() -> None:
        clock = ManualClock()
        given = settings(folder, rated_endurance=100 * GIB, **FIELDS)
        store = SegmentStore(given, clock=clock, io=MemoryIo(MemoryDisk()))
        await store.open()
        extents = await put(store, *map(known, range(20)))
        await store.delete([(known(9).digest, known(9).key, extents[9])])
        await store.flush()
        clock.advance(DAY_S)
        stats = store.stats()
        assert stats["stored_bytes"] == 20 * RECORD
        assert stats["overhead_bytes"] > 0
        assert stats["journal_bytes"] > 0
        assert stats["header_bytes"] > 0
        assert stats["written_bytes"] == stats["stored_bytes"] + stats["overhead_bytes"] + stats["rewritten_bytes"]
        total = sum(int(stats[name]) for name in ("written_bytes", "header_bytes", "journal_bytes", "checkpoint_bytes"))
        assert stats["lifetime_written_bytes"] == total
        assert stats["written_bytes_a_day"] == pytest.approx(total, rel=0.01)
        assert int(stats["projected_life_days"]) == (100 * GIB - total) // stats["written_bytes_a_day"]
        await store.close()

    run(check)


def test_case_29_bytes_of_earlier_lives_are_remembered(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, **FIELDS) as (store, _):
            await put(store, *map(known, range(30)))
            written = int(store.stats()["written_bytes"])
        async with opened(folder, **FIELDS) as (store, _):
            assert int(store.stats()["lifetime_written_bytes"]) >= written

    run(check)
