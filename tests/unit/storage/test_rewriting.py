"""A full store empties its oldest segment ahead of need: what is hot moves, the rest goes, the pages are punched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.units import KIB, MIB
from kvtierd.storage import Extent, SegmentStore
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.unit.storage.blocks import Block, by_key, forget_index, known, opened, put, readable, run

FIELDS = {"capacity": 2 * MIB, "segment_bytes": 160 * KIB}
"""Some twelve segments of twelve blocks: two of a segment's blocks may move."""


class Owner:
    """A caller that keeps what is hot, and may refuse a move."""

    def __init__(self, store: SegmentStore, hot: Callable[[int], float], *, refuses: bool = False) -> None:
        self.held: dict[int, Extent] = {}
        self.moves: list[int] = []
        self._hot = hot
        self._refuses = refuses
        self._store = store
        store.on_reclaim(self._gone)
        store.on_rewrite(lambda tags: np.array([hot(tag) for tag in tags.tolist()], np.float32), self._moved)

    def _gone(self, told: list[tuple[int, Extent]]) -> None:
        for tag, extent in told:
            assert self.held.pop(tag) == extent

    def _moved(self, told: list[tuple[int, Extent, Extent]]) -> list[bool]:
        for tag, old, new in told:
            assert self._hot(tag) > 0
            assert self.held[tag] == old
            self.moves.append(tag)
            if not self._refuses:
                self.held[tag] = new
            else:
                del self.held[tag]
        return [not self._refuses for _ in told]

    async def put(self, *numbers: int) -> None:
        for number, extent in zip(numbers, await put(self._store, *map(known, numbers)), strict=True):
            self.held[number] = extent


async def filled(store: SegmentStore, owner: Owner, count: int, first: int = 0) -> None:
    for begin in range(first, first + count, 4):
        await owner.put(*range(begin, begin + 4))
        await store.flush()


def test_hot_blocks_move_and_are_read_at_their_new_place(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, MemoryIo(MemoryDisk()), **FIELDS) as (store, _):
            owner = Owner(store, lambda tag: float(tag in {3, 5}))
            await filled(store, owner, 400)
            assert {3, 5} <= owner.held.keys()
            assert len(owner.moves) > 2, "they move as often as their segment's turn comes"
            for number in (3, 5):
                assert await readable(store, known(number), owner.held[number])
            stats = store.stats()
            assert stats["rewritten_blocks"] == len(owner.moves)
            assert stats["live_extents"] == len(owner.held)
            assert stats["used_bytes"] <= stats["capacity_bytes"]

    run(check)


def test_no_more_than_a_share_of_each_segment_is_written_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, MemoryIo(MemoryDisk()), **FIELDS) as (store, _):
            owner = Owner(store, lambda tag: 1.0 + tag)
            await filled(store, owner, 600)
            stats = store.stats()
            assert stats["rewritten_bytes"] > 0
            assert stats["written_bytes"] / stats["stored_bytes"] <= 1.3

    run(check)


@pytest.mark.parametrize("index", [True, False])
def test_moved_block_is_found_once_after_a_restart(tmp_path: Path, *, index: bool) -> None:
    async def check() -> None:
        disk = MemoryDisk()
        async with opened(tmp_path, MemoryIo(disk), **FIELDS) as (store, _):
            owner = Owner(store, lambda tag: float(tag == 3))
            await filled(store, owner, 200)
            assert owner.moves
            extent = owner.held[3]
        if not index:
            disk.metadata.now.clear()
        async with opened(tmp_path, MemoryIo(disk), **FIELDS) as (store, found):
            assert by_key(found)[known(3).digest + known(3).key] == extent
            assert len(found.extents) == len(owner.held)
            assert await readable(store, known(3), extent)

    run(check)


@pytest.mark.parametrize("index", [True, False])
def test_block_that_its_owner_gave_up_while_it_moved_does_not_come_back(tmp_path: Path, *, index: bool) -> None:
    async def check() -> None:
        disk = MemoryDisk()
        async with opened(tmp_path, MemoryIo(disk), **FIELDS) as (store, _):
            owner = Owner(store, lambda tag: float(tag == 3), refuses=True)
            store.on_reclaim(lambda told: [owner.held.pop(tag, None) for tag, _ in told] and None)
            await filled(store, owner, 200)
            assert owner.moves == [3]
        if not index:
            disk.metadata.now.clear()
        async with opened(tmp_path, MemoryIo(disk), **FIELDS) as (_, found):
            assert known(3).digest + known(3).key not in by_key(found)

    run(check)


def test_moved_block_is_no_newer_than_what_was_stored_after_it(tmp_path: Path) -> None:
    """An old copy of a key moves behind a newer copy of it: the newer one stays the one that is found."""

    async def check() -> None:
        newer = Block(3, version=9)
        newer.tag = 1003
        disk = MemoryDisk()
        async with opened(tmp_path, MemoryIo(disk), **FIELDS) as (store, _):
            owner = Owner(store, lambda tag: float(tag in {3, 1003}))
            await owner.put(3)
            (owner.held[1003],) = await put(store, newer)
            await filled(store, owner, 200, first=100)
            assert {3, 1003} <= set(owner.moves)
            extent = owner.held[1003]
        for forget in (False, True):
            if forget:
                disk.metadata.now.clear()
            async with opened(tmp_path, MemoryIo(disk), **FIELDS) as (store, found):
                assert by_key(found)[newer.digest + newer.key] == extent
                assert await readable(store, newer, extent)

    run(check)


def test_recycled_segment_has_nothing_of_its_earlier_life_on_the_disk(tmp_path: Path) -> None:
    """Pages are punched out and claimed again: stale bytes are gone, the space is still the store's."""

    async def check() -> None:
        async with opened(tmp_path, **FIELDS) as (store, _):
            owner = Owner(store, lambda _: 0.0)
            await filled(store, owner, 400)
            assert store.stats()["reclaimed_segments"] > 0
            while not (free := [segment for segment in store._live.ring if segment.life is None]):
                await asyncio.sleep(0.001)
            for segment in free:
                data = segment.path.read_bytes()
                assert not any(data[4096:-4096])
                assert segment.file.allocated_bytes() >= segment.size_bytes
            held = set(owner.held)
        forget_index(tmp_path)
        async with opened(tmp_path, **FIELDS) as (_, found):
            assert by_key(found).keys() == {known(number).digest + known(number).key for number in held}
            assert found.dropped == 0

    run(check)
