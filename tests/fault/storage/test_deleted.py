"""What was deleted or recycled never comes back: from the index, from a scan, over any damage."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvtierd.core.units import KIB
from kvtierd.storage import SegmentStore
from kvtierd.testing.faulty_io import Fault, FaultyIo, fail_operation
from tests.fault.storage.test_damage import COUNT, FIRST, RECORD, TINY, filled, flip, served
from tests.unit.storage.blocks import (
    Block,
    engine,
    forget_index,
    known,
    opened,
    put,
    readable,
    run,
)


def test_recycled_segment_never_brings_back_what_it_held(folder: Path) -> None:
    """Old records stay on the disk behind the head of a recycled segment; their seed is of another life."""

    async def check() -> None:
        io = FaultyIo(engine(), fail_operation("punch", Fault(errno.EOPNOTSUPP)))
        async with opened(folder, io, **TINY) as (store, _):
            for number in range(58):
                await put(store, known(number))
            alive = {known(n).key for n in range(58)} & await keys_read(store)
        images = b"".join(path.read_bytes() for path in folder.glob("segment-*"))
        old = [n for n in range(58) if known(n).key in images and known(n).key not in alive]
        assert old, "the test wants records of an earlier life on the disk"
        async with opened(folder, **TINY) as (_, found):
            assert {key.tobytes() for key in found.keys} == alive
            assert found.dropped == 0

    async def keys_read(store: SegmentStore) -> set[bytes]:
        held = set()
        for segment in store._live.ring:
            for row in segment.rows.live():
                for number in range(58):
                    if await readable(store, known(number), segment.extent(row)):
                        held.add(known(number).key)
        return held

    run(check)


def test_records_copied_from_another_segment_or_life_are_not_taken(folder: Path) -> None:
    async def check() -> None:
        path = await filled(folder)
        data = path.read_bytes()
        record = data[FIRST : FIRST + RECORD]
        with path.open("r+b") as file:
            file.seek(FIRST + COUNT * RECORD)  # behind the last record, where the next would lie
            file.write(record)
        good, dropped = await served(folder)
        assert good == set(range(COUNT))
        assert dropped == 1

    run(check)


def test_tombstones_survive_reopening_and_outlive_what_they_kill(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, **TINY) as (store, _):
            extents = await put(store, *map(known, range(4)))
            newer = Block(1, version=9)
            (again,) = await put(store, newer)
            entries = [(known(n).digest, known(n).key, extents[n]) for n in (0, 2)]
            await store.delete([*entries, (newer.digest, newer.key, again)])
            assert not await readable(store, known(0), extents[0])
        for turn in range(3):
            async with opened(folder, **TINY) as (store, found):
                assert {key.tobytes() for key in found.keys} == {known(3).key}
                passing = Block(100 + turn)
                (extent,) = await put(store, passing)
                await store.delete([(passing.digest, passing.key, extent)])

    run(check)


def test_block_stored_again_after_its_delete_is_found(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, **TINY) as (store, _):
            (extent,) = await put(store, known(1))
            await store.delete([(known(1).digest, known(1).key, extent)])
            await put(store, known(1))
        async with opened(folder, **TINY) as (store, found):
            (place,) = found.extents
            assert await readable(store, known(1), place)

    run(check)


def test_many_deletes_share_tombstones(folder: Path) -> None:
    async def check() -> None:
        blocks = [known(number) for number in range(1000)]
        fields = {"capacity": 0, "segment_bytes": 32 << 20}
        async with opened(folder, **fields) as (store, _):
            extents = await put(store, *blocks)
            before = store.stats()["written_bytes"]
            pairs = zip(blocks, extents, strict=True)
            await store.delete([(block.digest, block.key, extent) for block, extent in pairs])
            assert store.stats()["written_bytes"] - before <= 80 * KIB
            assert store.stats()["live_extents"] == 0
        async with opened(folder, **fields) as (_, found):
            assert len(found.extents) == 0

    run(check)


async def with_a_tombstone(folder: Path) -> tuple[Path, int]:
    """Five blocks, the second deleted; the segment's file and where the tombstone lies."""
    async with opened(folder, **TINY) as (store, _):
        extents = await put(store, *map(known, range(COUNT)))
        await store.delete([(known(1).digest, known(1).key, extents[1])])
    (path,) = folder.glob("segment-*")
    return path, FIRST + COUNT * RECORD


@pytest.mark.parametrize("byte", [*range(0, 264, 8), 4095])
def test_deleted_block_stays_deleted_though_its_tombstone_is_damaged(folder: Path, byte: int) -> None:
    """The index is a second witness of every delete."""

    async def check() -> None:
        path, at = await with_a_tombstone(folder)
        flip(path, at + byte)
        assert (await served(folder))[0] == {0, 2, 3, 4}

    run(check)


@pytest.mark.parametrize("copy", [0, 1])
def test_deleted_block_stays_deleted_by_a_scan_though_a_segment_header_is_lost(folder: Path, copy: int) -> None:
    """A lost header would have taken its segment's tombstones with it; there are two."""

    async def check() -> None:
        async with opened(folder, **TINY) as (store, _):
            extents = await put(store, *map(known, range(8)))
            assert extents[-1].segment != extents[0].segment
            await store.delete([(known(1).digest, known(1).key, extents[1])])
        path = folder / f"segment-{extents[-1].segment:06d}"
        with path.open("r+b") as file:
            file.seek(copy * (path.stat().st_size - 4096))
            file.write(bytes(4096))
        forget_index(folder)
        async with opened(folder, **TINY) as (_, found):
            assert {key.tobytes() for key in found.keys} == {known(n).key for n in (0, 2, 3, 4, 5, 6, 7)}

    run(check)


def test_deletes_in_a_journal_count_though_no_checkpoint_is_whole(folder: Path) -> None:
    """And the tombstone is damaged too: then the journal alone knows."""

    async def check() -> None:
        path, at = await with_a_tombstone(folder)
        for checkpoint in folder.glob("checkpoint-*"):
            flip(checkpoint, 20)
        flip(path, at + 9)
        assert (await served(folder))[0] == {0, 2, 3, 4}

    run(check)
