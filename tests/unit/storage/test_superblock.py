"""Two copies of the superblock: one may be damaged, a newer one is left alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.storage import superblock
from kvtierd.storage.superblock import Superblock
from tests.unit.storage.blocks import Block, by_key, opened, put, run


def listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("byte", [0, 8, 16, 24, 40, 47, 4095])
@pytest.mark.parametrize("copy", [0, 1])
def test_store_opens_with_either_copy_damaged(tmp_path: Path, copy: int, byte: int) -> None:
    async def check() -> None:
        block = Block(1)
        async with opened(tmp_path) as (store, _):
            await put(store, block)
        path = tmp_path / "superblock"
        data = bytearray(path.read_bytes())
        data[copy * 4096 + byte] ^= 4
        path.write_bytes(data)
        async with opened(tmp_path) as (_, found):
            assert by_key(found).keys() == {block.digest + block.key}

    run(check)


def test_epoch_grows_with_every_opening_and_the_identity_stays(tmp_path: Path) -> None:
    async def check() -> None:
        seen = []
        for _ in range(3):
            async with opened(tmp_path):
                pass
            seen.append(await superblock.load(tmp_path))
        assert [block.epoch for block in seen] == [1, 2, 3]
        assert len({block.uuid for block in seen}) == 1

    run(check)


def test_torn_update_leaves_the_other_copy(tmp_path: Path) -> None:
    """Power fails while copy 0 is written: copy 1 still has the epoch before, and numbers go on above all used."""
    first, second = Superblock(bytes(16), 7), Superblock(bytes(16), 8)
    for torn in (512, 1024, 4000):
        page = superblock.encode(second, 0)[:torn] + superblock.encode(first, 0)[torn:]
        (tmp_path / "superblock").write_bytes(page + superblock.encode(first, 1))
        found = asyncio.run(superblock.load(tmp_path))
        assert found in (first, second)
    (tmp_path / "superblock").write_bytes(superblock.encode(second, 0) + superblock.encode(first, 1))
    assert asyncio.run(superblock.load(tmp_path)) == second


@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
def test_newer_format_is_refused_and_nothing_is_touched(tmp_path: Path, copies: tuple[int, ...]) -> None:
    async def check() -> None:
        async with opened(tmp_path) as (store, _):
            await put(store, Block(1))
        path = tmp_path / "superblock"
        data = bytearray(path.read_bytes())
        for copy in copies:
            data[copy * 4096 : (copy + 1) * 4096] = superblock.encode(Superblock(bytes(16), 9, version=3), copy)
        path.write_bytes(data)
        before = listing(tmp_path)
        with pytest.raises(StartupError, match="format 3, this kvtierd reads format 1 and 2") as caught:
            async with opened(tmp_path):
                pass
        assert caught.value.exit_code == ExitCode.IO
        assert listing(tmp_path) == before

    run(check)


def test_segments_without_a_superblock_are_refused_and_kept(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path) as (store, _):
            await put(store, Block(1))
        for data in (None, b"", bytes(8192)):
            (tmp_path / "superblock").unlink()
            if data is not None:
                (tmp_path / "superblock").write_bytes(data)
            before = listing(tmp_path)
            with pytest.raises(StartupError, match="no valid superblock") as caught:
                async with opened(tmp_path):
                    pass
            assert caught.value.exit_code == ExitCode.IO
            assert listing(tmp_path) == before
            (tmp_path / "superblock").touch()

    run(check)


def test_empty_superblock_without_segments_is_a_new_store(tmp_path: Path) -> None:
    async def check() -> None:
        (tmp_path / "superblock").touch()
        async with opened(tmp_path) as (store, found):
            assert len(found.extents) == 0
            await put(store, Block(1))

    run(check)
