"""O_DIRECT where the file system takes it, buffered I/O where it does not, and the mode is told."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import MIB
from kvtierd.storage import IoMode
from kvtierd.storage.buffers import Scratch, page_buffer
from kvtierd.storage.io import StorageIo, read_exact, write_exact
from kvtierd.storage.io_posix import PosixIo
from tests.unit.storage.blocks import ODD, Block, by_key, engine, memory, namespace, opened, put, readable, run


def no_direct(path: Path, flags: int, mode: int) -> int:
    """A file system without O_DIRECT."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.open(path, flags, mode)


async def stores_blocks_of_odd_sizes(directory: Path, io: StorageIo) -> None:
    """Odd sizes, unaligned memory, and all of it again after reopening."""
    blocks = [Block(n, namespace(ODD), aligned=n % 2 == 0) for n in range(8)]
    fields = {"capacity": 2 * MIB, "segment_bytes": MIB}
    async with opened(directory, io, **fields) as (store, _):
        extents = await put(store, *blocks)
        for block, extent in zip(blocks, extents, strict=True):
            item = block.fetch(extent, aligned=block.tag % 3 == 0)
            assert await store.read([item]) == [None]
            assert block.same(item.out)
        assert store.stats()["mode"] == str(io.mode) == str(store.mode)
    async with opened(directory, io, **fields) as (store, found):
        places = by_key(found)
        for block in blocks:
            assert await readable(store, block, places[block.digest + block.key])


def test_case_13_o_direct_on_tmpfs(shm: Path) -> None:
    run(lambda: stores_blocks_of_odd_sizes(shm, engine()))


def test_case_13_o_direct_on_the_file_system_of_the_tests(tmp_path: Path) -> None:
    run(lambda: stores_blocks_of_odd_sizes(tmp_path, engine()))


def test_case_13_o_direct_on_overlay(mounted) -> None:
    base = mounted("tmpfs", "size=16m")
    for name in ("lower", "upper", "work"):
        (base / name).mkdir()
    point = mounted("overlay", f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work")
    run(lambda: stores_blocks_of_odd_sizes(point, engine()))


def test_case_13_o_direct_on_ext4(mounted, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    point = mounted.image(image)
    io = engine("direct")
    run(lambda: stores_blocks_of_odd_sizes(point, io))
    assert io.direct


def test_case_13_refused_o_direct_falls_back_and_says_so(tmp_path: Path) -> None:
    async def check() -> None:
        io = PosixIo("auto", open_file=no_direct)
        async with opened(tmp_path, io) as (store, found):
            assert store.mode is IoMode.BUFFERED
            assert any("refuses O_DIRECT" in note for note in found.notes)
        await stores_blocks_of_odd_sizes(tmp_path / "other", PosixIo("auto", open_file=no_direct))

    run(check)


def test_case_13_required_o_direct_fails_loudly_where_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="refuses O_DIRECT") as caught:
        PosixIo("direct", open_file=no_direct).probe(tmp_path)
    assert caught.value.exit_code == ExitCode.IO
    assert list(tmp_path.iterdir()) == []


def test_buffered_mode_is_taken_without_asking_for_more(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path, PosixIo("buffered")) as (store, found):
            assert store.mode is IoMode.BUFFERED
            assert found.notes == []

    run(check)


def test_probe_that_reads_back_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(_fd: int, buffers: list[memoryview], _offset: int) -> int:
        return sum(len(buffer) for buffer in buffers)

    monkeypatch.setattr(os, "preadv", lie)
    with pytest.raises(StartupError, match="something else"):
        PosixIo().probe(tmp_path)


class Stuttering:
    """A file that moves at most `most` bytes a call."""

    alignment = 4096

    def __init__(self, image: np.ndarray, most: int) -> None:
        self.image = image
        self.most = most
        self.offsets: list[int] = []

    def write(self, buffers: list[np.ndarray], offset: int) -> int:
        self.offsets.append(offset)
        data = np.concatenate(buffers)[: self.most]
        self.image[offset : offset + data.size] = data
        return data.size

    def read(self, buffers: list[np.ndarray], offset: int) -> int:
        self.offsets.append(offset)
        left = self.image[offset : offset + self.most]
        moved = 0
        for buffer in buffers:
            part = left[moved : moved + buffer.size]
            buffer[: part.size] = part
            moved += part.size
        return moved


@pytest.mark.parametrize("most", [4096, 5000, 8192, 12_289])
def test_case_03_short_transfers_are_gone_on_with_from_a_page_boundary(most: int) -> None:
    file = Stuttering(np.zeros(65536, np.uint8), most)
    scratch = Scratch()
    sizes = (4096, 16384, 4096)
    rng = np.random.default_rng(1)
    source, target = [page_buffer(size) for size in sizes], [page_buffer(size) for size in sizes]
    for buffer in source:
        buffer[:] = rng.integers(0, 256, buffer.size, np.uint8)
    write_exact(file, source, 8192, scratch)
    read_exact(file, target, 8192, scratch)
    assert all(np.array_equal(a, b) for a, b in zip(source, target, strict=True))
    assert all(offset % 4096 == 0 for offset in file.offsets)
    assert len(file.offsets) >= 2 * (24576 // most)


@pytest.mark.parametrize("most", [0, 100, 4095])
def test_case_03_transfer_that_makes_no_progress_is_an_error(most: int) -> None:
    file = Stuttering(np.zeros(65536, np.uint8), most)
    with pytest.raises(OSError, match="short read"):
        read_exact(file, [page_buffer(8192)], 0, Scratch())
    with pytest.raises(OSError, match="short write"):
        write_exact(file, [page_buffer(8192)], 0, Scratch())


def test_unaligned_memory_larger_than_the_scratch_arrives_whole(tmp_path: Path) -> None:
    io = engine()
    io.probe(tmp_path)
    size = 5 * Scratch.BOUNCE_BYTES // 2
    file = io.create(tmp_path / "file", 2 * size)
    source, target = memory(size, aligned=False), memory(size, aligned=False)
    source[:] = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    write_exact(file, [page_buffer(4096), source], 4096, Scratch())
    read_exact(file, [page_buffer(4096), target], 4096, Scratch())
    file.close()
    file.close()
    assert np.array_equal(source, target)


def test_file_that_cannot_be_allocated_leaves_nothing_behind(mounted) -> None:
    point = mounted("tmpfs", "size=1m")
    io = engine()
    io.probe(point)
    with pytest.raises(OSError, match="No space"):
        io.create(point / "file", 4 * MIB)
    assert list(point.iterdir()) == []
