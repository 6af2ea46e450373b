"""Several devices as one tier: spread, found again, and one failing without the others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtierd.config.schema import Nvme
from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import ExitCode, StartupError, StorageError
from kvtierd.core.units import KIB, MIB
from kvtierd.storage import Extent, Recovered, SegmentStore, WriteItem
from kvtierd.storage import striped as module
from kvtierd.storage.interface import Extents
from kvtierd.storage.io import StorageIo
from kvtierd.storage.striped import StripedStore, make_store
from kvtierd.testing.faulty_io import Fault, FaultyIo, fail_operation
from tests.unit.storage.blocks import Block, by_key, engine, known, run, settings

TINY = {"capacity": 600 * KIB, "segment_bytes": 96 * KIB}


@pytest.fixture(autouse=True)
def short_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small blocks a stripe, so that little data goes to all devices."""
    monkeypatch.setattr(module, "STRIPE_BYTES", 16 * KIB)


def store_of(directories: Sequence[Path], ios: dict[Path, StorageIo] | None = None, **fields: Any) -> StripedStore:
    def one(directory: Path) -> SegmentStore:
        io = (ios or {}).get(directory) or engine()
        return SegmentStore(settings(directory, **{**TINY, **fields}), clock=ManualClock(), io=io)

    return StripedStore([(str(directory), one(directory)) for directory in directories])


@contextlib.asynccontextmanager
async def opened(
    directories: Sequence[Path], ios: dict[Path, StorageIo] | None = None, **fields: Any
) -> AsyncIterator[tuple[StripedStore, Recovered]]:
    store = store_of(directories, ios, **fields)
    found = await store.open()
    try:
        yield store, found
    finally:
        with contextlib.suppress(StorageError):
            await store.close()


async def write(store: StripedStore, blocks: Sequence[Block]) -> list[Extent | StorageError]:
    for block in blocks:
        store.register(block.digest, block.space)
    return await store.write([block.item() for block in blocks])


async def put(store: StripedStore, blocks: Sequence[Block]) -> list[Extent]:
    results = await write(store, blocks)
    assert all(isinstance(result, Extent) for result in results), results
    return [result for result in results if isinstance(result, Extent)]


async def served(store: StripedStore, blocks: Sequence[Block], extents: Sequence[Extent]) -> list[bool]:
    """Which blocks come back, in one batch; wrong bytes fail the test."""
    items = [block.fetch(extent) for block, extent in zip(blocks, extents, strict=True)]
    errors = await store.read(items)
    for block, item, error in zip(blocks, items, errors, strict=True):
        assert error is not None or block.same(item.out)
    return [error is None for error in errors]


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("a", "b", "c")]


def test_blocks_are_spread_and_found_again_in_any_order_of_the_directories(three: list[Path]) -> None:
    async def check() -> None:
        blocks = [known(n) for n in range(18)]
        async with opened(three) as (store, _):
            extents = await put(store, blocks)
            assert len(set(extents)) == 18
            assert {extent.segment % 3 for extent in extents} == {0, 1, 2}
            assert await served(store, blocks, extents) == [True] * 18
            await store.flush()
            stats = store.stats()
            assert (stats["live_extents"], stats["devices"], stats["failed_devices"]) == (18, 3, 0)
            assert stats["state"] == "ok"
            assert 0 < int(stats["segment_bytes"]) <= TINY["segment_bytes"]
        async with opened([three[2], three[0], three[1]]) as (store, found):
            places = by_key(found)
            assert await served(store, blocks, [places[b.digest + b.key] for b in blocks]) == [True] * 18
            store.adopt(found.extents, np.arange(len(found.extents)))
            dead = places[blocks[0].digest + blocks[0].key]
            await store.delete([(blocks[0].digest, blocks[0].key, dead)])
            assert await served(store, blocks[:1], [dead]) == [False]
        async with opened(three) as (store, found):
            assert len(by_key(found)) == 17
            assert store.progress.pending == 0
            assert store.progress.begun > 0

    run(check)


def test_device_that_cannot_be_opened_costs_its_own_blocks_only(three: list[Path]) -> None:
    async def check() -> None:
        blocks = [known(n) for n in range(12)]
        async with opened(three) as (store, _):
            extents = await put(store, blocks)
        there = [extent.segment % 3 != 1 for extent in extents]
        broken: dict[Path, StorageIo] = {three[1]: FaultyIo(engine(), fail_operation("open", Fault(errno.EIO)))}
        async with opened(three, broken) as (store, found):
            places = by_key(found)
            assert [b.digest + b.key in places for b in blocks] == there
            stats = store.stats()
            assert (stats["devices"], stats["failed_devices"]) == (3, 1)
            assert str(stats["state"]).startswith(f"degraded: {three[1]}: ")
            assert any(str(three[1]) in note for note in found.notes)
            assert all(extent.segment % 3 != 1 for extent in await put(store, [known(n) for n in range(20, 26)]))
            await store.flush()
        async with opened(three) as (_, found):
            assert len(by_key(found)) == 18, "the blocks of the device are back with it"

    run(check)


def test_no_device_at_all_is_an_error_with_every_cause(tmp_path: Path) -> None:
    async def check() -> None:
        paths = [tmp_path / "x", tmp_path / "y"]
        async with opened(paths) as (store, _):
            await put(store, [known(n) for n in range(8)])
        broken = {path: FaultyIo(engine(), fail_operation("open", Fault(errno.EIO))) for path in paths}
        with pytest.raises(StartupError) as caught:
            await store_of(paths, broken).open()
        assert all(str(path) in str(caught.value) for path in paths)
        async with opened(paths) as (_, found):
            assert len(found.extents) == 8, "nothing was left locked, and nothing was lost"

    run(check)


def test_wrong_setting_is_refused_also_where_other_devices_work(three: list[Path]) -> None:
    async def check() -> None:
        three[1].write_text("a file")
        with pytest.raises(StartupError, match="not a directory"):
            await store_of(three).open()
        three[1].unlink()
        async with opened(three) as (store, _):
            assert store.stats()["failed_devices"] == 0

    run(check)


def test_second_daemon_on_one_of_the_directories_is_refused(three: list[Path]) -> None:
    async def check() -> None:
        async with opened([three[2]]):
            with pytest.raises(StartupError) as caught:
                await store_of(three).open()
            assert caught.value.exit_code == ExitCode.LOCKED
        async with opened(three) as (store, _):
            assert store.stats()["failed_devices"] == 0, "nothing was left locked"

    run(check)


def test_what_a_failing_device_refuses_is_stored_on_another(three: list[Path]) -> None:
    async def check() -> None:
        bad = FaultyIo(engine())
        async with opened(three, {three[0]: bad}) as (store, _):
            before = [known(n) for n in range(12)]
            extents = await put(store, before)
            bad.plan = fail_operation("write", Fault(errno.EIO))
            after = [known(n) for n in range(20, 32)]
            moved = await put(store, after)
            assert all(extent.segment % 3 for extent in moved), "a block was lost with the device that refused it"
            assert await served(store, after, moved) == [True] * 12
            assert await served(store, before, extents) == [True] * 12, "what can be read still is"
            assert store.stats()["failed_devices"] == 1
            assert str(three[0]) in str(store.stats()["state"])
            bad.plan = fail_operation("read", Fault(errno.EIO))
            assert await served(store, before, extents) == [extent.segment % 3 != 0 for extent in extents]
            bad.plan = None

    run(check)


def test_flush_that_fails_on_one_device_is_told_and_done_on_the_others(three: list[Path]) -> None:
    async def check() -> None:
        bad = FaultyIo(engine())
        gone: list[int] = []
        async with opened(three, {three[1]: bad}) as (store, _):
            store.on_reclaim(lambda told: gone.extend(tag for tag, _ in told))
            blocks = [known(n) for n in range(12)]
            extents = await put(store, blocks)
            bad.plan = fail_operation("sync", Fault(errno.EIO))
            with pytest.raises(StorageError):
                await store.flush()
            bad.plan = None
            lost = [block.tag for block, extent in zip(blocks, extents, strict=True) if extent.segment % 3 == 1]
            assert sorted(gone) == lost
            assert store.stats()["failed_syncs"] == 1

    run(check)


def test_block_that_came_back_with_a_device_is_kept_once(three: list[Path]) -> None:
    async def check() -> None:
        block = known(1)
        for directory in three[:2]:
            async with opened([directory]) as (store, _):
                await put(store, [block, known(2 if directory == three[0] else 3)])
        async with opened(three[:2]) as (store, found):
            places = by_key(found)
            assert len(places) == len(found.extents) == 3
            assert await served(store, [block], [places[block.digest + block.key]]) == [True]
            assert any("two devices" in note for note in found.notes)
        async with opened(three[:2]) as (_, found):
            assert len(found.extents) == 3
            assert not any("two devices" in note for note in found.notes)

    run(check)


def test_reclaimed_extents_are_announced_by_the_numbers_that_the_caller_has(three: list[Path]) -> None:
    async def check() -> None:
        async with opened(three[:2], capacity=400 * KIB) as (store, _):
            held: dict[int, Extent] = {}

            def gone(told: list[tuple[int, Extent]]) -> None:
                for tag, extent in told:
                    assert held.pop(tag) == extent

            store.on_reclaim(gone)
            for begin in range(0, 240, 12):
                blocks = [known(n) for n in range(begin, begin + 12)]
                for block, extent in zip(blocks, await put(store, blocks), strict=True):
                    held[block.tag] = extent
            assert 0 < len(held) < 120
            assert int(store.stats()["reclaimed_segments"]) > 0
            blocks, extents = [known(tag) for tag in held], list(held.values())
            assert all(await served(store, blocks, extents))

    run(check)


class Slow:
    """Stands in for a device's write, to choose when it is done."""

    def __init__(self, device: SegmentStore) -> None:
        self.write = device.write
        self.go = asyncio.Event()

    async def __call__(self, items: Sequence[WriteItem]) -> list[Extent | StorageError]:
        await self.go.wait()
        return await self.write(items)


def test_extent_that_goes_before_its_batch_is_done_is_an_error_and_not_announced(three: list[Path]) -> None:
    async def check() -> None:
        store = store_of(three[:2])
        await store.open()
        told: list[Any] = []
        store.on_reclaim(told.extend)
        slow = Slow(store._devices[1].store)
        store._devices[1].store.write = slow
        blocks = [known(n) for n in range(4)]
        batch = asyncio.create_task(write(store, blocks))
        while not store._unreturned:
            await asyncio.sleep(0.001)
        early = next(iter(store._unreturned))
        store._announce(0, [(0, Extent(early.segment // 2, early.offset, early.length))])
        slow.go.set()
        results = await batch
        assert told == []
        assert isinstance(results[0], StorageError)
        assert [isinstance(result, Extent) for result in results[1:]] == [True] * 3
        assert not store._unreturned
        await store.close()

    run(check)


def test_batch_of_a_cancelled_caller_leaves_nothing(three: list[Path]) -> None:
    async def check() -> None:
        async with opened(three[:2]) as (store, _):
            slow = Slow(store._devices[1].store)
            store._devices[1].store.write = slow
            batch = asyncio.create_task(write(store, [known(n) for n in range(4)]))
            while not store._unreturned:
                await asyncio.sleep(0.001)
            batch.cancel()
            await asyncio.sleep(0)
            slow.go.set()
            with pytest.raises(asyncio.CancelledError):
                await batch
            assert store.stats()["live_extents"] == 0
            assert not store._unreturned
        async with opened(three[:2]) as (_, found):
            assert len(found.extents) == 0

    run(check)


def test_rewritten_blocks_are_told_by_the_numbers_that_the_caller_has(three: list[Path]) -> None:
    store = store_of(three)
    seen: list[Any] = []

    def moved(moves: list[tuple[int, Extent, Extent]]) -> list[bool]:
        seen.extend(moves)
        return [True] * len(moves)

    store.on_rewrite(lambda tags: np.zeros(tags.size, np.float32), moved)
    _, inner = store._devices[2].store._rewriting
    assert inner([(7, Extent(1, 4096, 8192), Extent(4, 8192, 8192))]) == [True]
    assert seen == [(7, Extent(5, 4096, 8192), Extent(14, 8192, 8192))]


def test_settings_make_one_store_for_each_directory_with_its_share(three: list[Path]) -> None:
    one = settings(three[0], capacity=12 * MIB)
    assert isinstance(make_store(one, clock=ManualClock()), SegmentStore)
    many = Nvme(directory=":".join(map(str, three)), capacity=12 * MIB)
    store = make_store(many, clock=ManualClock())
    assert isinstance(store, StripedStore)
    shares = [(device.store._settings.directory, device.store._settings.capacity) for device in store._devices]
    assert shares == [(str(path), 4 * MIB) for path in three]
    with pytest.raises(StorageError, match="closed"):
        store.stats()


def test_nothing_on_any_device_is_an_empty_tier(three: list[Path]) -> None:
    async def check() -> None:
        async with opened(three) as (store, found):
            assert len(found.extents) == 0
            assert found.keys.shape == (0, 32)
            store.adopt(Extents.of([]), np.empty(0, np.int64))
            assert await store.read([]) == []
            assert await store.write([]) == []
            await store.delete([])

    run(check)
