"""Bits flip and files shrink while the store is closed: what is damaged is dropped and counted, and never served."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.units import KIB
from kvtierd.storage import Extent
from kvtierd.testing.faulty_io import Call, Fault, FaultyIo
from tests.unit.storage.blocks import (
    Block,
    by_key,
    engine,
    forget_index,
    known,
    namespace,
    opened,
    put,
    readable,
    run,
)

TINY = {"capacity": 600 * KIB, "segment_bytes": 100 * KIB}
RECORD = 12 * KIB
COUNT = 5
FIRST = 8 * KIB
"""Offset of the first block of a segment: the header and the namespace come before."""


async def filled(folder: Path, *, index: bool = False) -> Path:
    """A store of five blocks in one segment, without an index unless one is wanted; returns the segment's file."""
    async with opened(folder, **TINY) as (store, _):
        extents = await put(store, *map(known, range(COUNT)))
        assert [extent.offset for extent in extents] == [FIRST + RECORD * n for n in range(COUNT)]
    if not index:
        forget_index(folder)
    (path,) = folder.glob("segment-*")
    return path


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


async def served(folder: Path) -> tuple[set[int], int]:
    """Which blocks a reopened store serves, and how many records it dropped. Wrong bytes fail in `readable`."""
    async with opened(folder, **TINY) as (store, found):
        held = by_key(found)
        names = {known(n).digest + known(n).key: n for n in range(COUNT)}
        assert held.keys() <= names.keys()
        good = {names[name] for name, extent in held.items() if await readable(store, known(names[name]), extent)}
        await put(store, Block(50))  # the store goes on
        return good, found.dropped


@pytest.mark.parametrize("byte", [*range(0, 208, 3), 1000, 4095])
def test_flipped_bit_in_a_record_header_costs_that_block(folder: Path, byte: int) -> None:
    async def check() -> None:
        flip(await filled(folder), FIRST + 2 * RECORD + byte, byte % 8)
        assert await served(folder) == ({0, 1, 3, 4}, 1)

    run(check)


@pytest.mark.parametrize("byte", [4096, 4097, 8191, 8192, 12287])
def test_flipped_bit_in_a_payload_is_found_when_it_is_read(folder: Path, byte: int) -> None:
    async def check() -> None:
        flip(await filled(folder), FIRST + 2 * RECORD + byte)
        assert await served(folder) == ({0, 1, 3, 4}, 0)

    run(check)


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("byte", [*range(0, 208, 3), 1000, 4095])
def test_record_that_the_index_knows_is_verified_when_it_is_read(folder: Path, byte: int, *, index: bool) -> None:
    async def check() -> None:
        flip(await filled(folder, index=index), FIRST + 2 * RECORD + byte, byte % 8)
        assert (await served(folder))[0] == {0, 1, 3, 4}

    run(check)


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("byte", [*range(0, 64, 5), 4095])
def test_flipped_bit_in_a_segment_header_is_mended_from_its_other_copy(folder: Path, byte: int, copy: int) -> None:
    async def check() -> None:
        path = await filled(folder)
        before = path.read_bytes()
        flip(path, byte + copy * (path.stat().st_size - 4096))
        assert await served(folder) == (set(range(COUNT)), 0)
        after = path.read_bytes()
        assert (after[:4096], after[-4096:]) == (before[:4096], before[-4096:])

    run(check)


@pytest.mark.parametrize("byte", [*range(0, 64, 5), 4095])
def test_segment_whose_header_is_lost_in_both_copies_is_reused(folder: Path, byte: int) -> None:
    async def check() -> None:
        path = await filled(folder)
        for copy in (0, path.stat().st_size - 4096):
            flip(path, byte + copy)
        assert await served(folder) == (set(), 1)
        assert [file.name for file in folder.glob("segment-*")] == [path.name]

    run(check)


@pytest.mark.parametrize("byte", [0, 9, 18, 40, 70, 192, 200, 250])
def test_blocks_whose_namespace_record_is_damaged_are_dropped(folder: Path, byte: int) -> None:
    async def check() -> None:
        flip(await filled(folder), 4096 + byte)
        assert await served(folder) == (set(), 1 + COUNT)

    run(check)


def test_namespace_record_of_another_segment_serves_for_all(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, **TINY) as (store, _):
            await put(store, *map(known, range(8)))
        first, second = sorted(folder.glob("segment-*"))
        flip(first, 4096 + 192)
        forget_index(folder)
        async with opened(folder, **TINY) as (store, found):
            held = by_key(found)
            assert len(held) == 8
            for number in range(8):
                assert await readable(store, known(number), held[known(number).digest + known(number).key])
        assert second.exists()

    run(check)


@pytest.mark.parametrize("size", [0, 100, 4096, FIRST + RECORD + 4096, FIRST + 3 * RECORD, FIRST + 4 * RECORD + 1])
def test_case_03_truncated_segment_serves_what_is_whole(folder: Path, size: int) -> None:
    async def check() -> None:
        os.truncate(await filled(folder), size)
        whole = max(0, (size - FIRST) // RECORD)
        async with opened(folder, **TINY) as (_, found):
            assert len(found.extents) == whole, "a block whose end is missing is not even offered"
        good, _ = await served(folder)
        assert good == set(range(whole))

    run(check)


def test_case_03_file_truncated_under_a_running_store_is_an_error(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, **TINY) as (store, _):
            extents = await put(store, *map(known, range(COUNT)))
            (path,) = folder.glob("segment-*")
            for size in (FIRST + 2 * RECORD + 8 * KIB, 0):
                os.truncate(path, size)
                (error,) = await store.read([known(2).fetch(extents[2])])
                assert isinstance(error, StorageError)
            assert await store.read([known(n).fetch(extents[n]) for n in range(3)]) != [None] * 3
            assert store.stats()["failed_reads"] >= 3

    run(check)


def test_damage_under_a_running_store_is_never_served(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, mode="buffered", **TINY) as (store, _):
            extents = await put(store, *map(known, range(COUNT)))
            (path,) = folder.glob("segment-*")
            for place in (0, 8, 70, 100, 130, 192, 4096, 12287):
                flip(path, FIRST + RECORD + place)
                errors = await store.read([known(n).fetch(extents[n]) for n in range(3)])
                assert [type(error) for error in errors] == [type(None), CorruptionError, type(None)], place
                flip(path, FIRST + RECORD + place)
            assert await readable(store, known(1), extents[1])
            assert store.stats()["corrupt_reads"] == 8

    run(check)


def test_case_01_extent_of_another_block_is_an_error(folder: Path) -> None:
    """Extents mixed up by a caller, and a block of another namespace with the same key."""

    async def check() -> None:
        other = Block(1, namespace(model="other"))
        async with opened(folder, **TINY) as (store, _):
            extents = await put(store, known(0), known(1), other)
            mixed = [known(0).fetch(extents[1]), known(1).fetch(extents[2]), other.fetch(extents[1])]
            assert all(isinstance(error, StorageError) for error in await store.read(mixed))
            shifted = Extent(extents[0].segment, extents[0].offset + 4096, extents[0].length)
            (error,) = await store.read([known(0).fetch(shifted)])
            assert isinstance(error, StorageError)

    run(check)


def test_case_01_same_contents_under_a_like_key_are_another_block(folder: Path) -> None:
    """Only the header's whole key tells these two apart: contents, sums and the start of the keys are equal."""

    async def check() -> None:
        one, two = Block(1), Block(1)
        two.key = one.key[:16] + bytes(16)
        async with opened(folder, **TINY) as (store, _):
            extents = await put(store, one, two)
            errors = await store.read([one.fetch(extents[1]), two.fetch(extents[0])])
            assert [type(error) for error in errors] == [CorruptionError] * 2
            assert await store.read([one.fetch(extents[0]), two.fetch(extents[1])]) == [None] * 2

    run(check)


def test_sequence_numbers_go_on_above_what_could_not_be_read(folder: Path) -> None:
    async def check() -> None:
        path = await filled(folder)
        flip(path, FIRST + (COUNT - 1) * RECORD + 100)
        async with opened(folder, **TINY) as (store, found):
            assert found.dropped == 1
            (extent,) = await put(store, known(20))
        segment = path.with_name(f"segment-{extent.segment:06d}").read_bytes()
        sequence = int.from_bytes(segment[extent.offset + 32 : extent.offset + 40], "little")
        assert sequence >= 2 << 40, "the second opening has numbers of its own"

    run(check)


def test_segment_with_an_unreadable_page_is_written_no_more(folder: Path) -> None:
    """What could not be read may be a valid header, and be readable again one day."""

    async def check() -> None:
        await filled(folder)
        at = FIRST + 4 * RECORD

        def bad_sector(call: Call) -> Fault | None:
            reads_it = call.operation == "read" and call.offset <= at < call.offset + call.length
            return Fault() if reads_it else None

        io = FaultyIo(engine(), bad_sector)
        async with opened(folder, io, **TINY) as (store, found):
            assert {key.tobytes() for key in found.keys} == {known(n).key for n in range(4)}
            assert any("1 pages could not be read" in note for note in found.notes)
            (extent,) = await put(store, known(20))
            assert extent.segment != found.extents[0].segment
        forget_index(folder)
        async with opened(folder, **TINY) as (_, found):
            assert {key.tobytes() for key in found.keys} == {known(n).key for n in (0, 1, 2, 3, 4, 20)}

    run(check)


def test_case_06_ranks_with_the_same_key_do_not_meet(folder: Path) -> None:
    async def check() -> None:
        ranks = [Block(1, namespace(tp_rank=rank, tp_size=4), version=rank) for rank in range(4)]
        async with opened(folder, **TINY) as (store, _):
            await put(store, *ranks)
        async with opened(folder, **TINY) as (store, found):
            held = by_key(found)
            assert len({block.key for block in ranks}) == 1
            assert len(held) == 4
            for block in ranks:
                assert await readable(store, block, held[block.digest + block.key])

    run(check)
