"""A full, failing, read-only or vanished disk is a state: reported, no stall, no lost blocks, and left by itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
from pathlib import Path

import pytest

from kvtierd.core.errors import StorageError
from kvtierd.core.units import KIB, MIB
from kvtierd.storage import Extent, SegmentStore, health
from kvtierd.testing.faulty_io import Call, Fault, FaultyIo
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.unit.storage.blocks import ON_A_MODEL, Block, by_key, known, opened, put, readable, run
from tests.unit.storage.conftest import Mounter

pytestmark = ON_A_MODEL
WRITING = {
    "create", "write", "sync", "sync_directory", "punch", "create_small", "append_small", "sync_small", "replace_small",
}  # fmt: skip


@pytest.fixture
def mounted(tmp_path: Path):
    mounter = Mounter(tmp_path)
    yield mounter
    mounter.undo()


async def refused(store: SegmentStore, number: int) -> StorageError:
    block = Block(number)
    store.register(block.digest, block.space)
    (result,) = await store.write([block.item()])
    assert isinstance(result, StorageError)
    return result


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENODEV, errno.EDQUOT])
def test_case_11_disk_that_takes_no_writes_degrades_the_tier_until_it_takes_them(folder: Path, code: int) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(folder, io) as (store, _):
            extents = await put(store, known(1), known(2))
            await store.flush()
            io.plan = lambda call: Fault(code) if call.operation in WRITING else None
            await refused(store, 3)
            assert os.strerror(code) in store.stats()["state"]
            before = len([call for call in io.calls if call.name.startswith("segment")])
            error = await refused(store, 4)
            assert "degraded" in str(error)
            assert len([call for call in io.calls if call.name.startswith("segment")]) == before, (
                "it was not even tried"
            )
            assert store.stats()["refused_blocks"] == 1
            assert await readable(store, known(1), extents[0])
            with pytest.raises(StorageError):
                await store.flush()
            io.plan = None
            await put(store, known(5))
            assert store.stats()["state"] == "ok"
            assert store.stats()["degradations"] == 1
            await store.flush()
        async with opened(folder, io.inner) as (_, found):
            names = {key.tobytes() for key in found.keys}
            assert names == {known(1).key, known(2).key, known(5).key}

    run(check)


def test_degraded_tier_is_left_without_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCH_S", 0.005)

    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(folder, io) as (store, _):
            io.plan = lambda call: Fault(errno.EIO) if call.operation in WRITING else None
            await refused(store, 1)
            await asyncio.sleep(0.03)
            assert store.stats()["state"] != "ok"
            io.plan = None
            while store.stats()["state"] != "ok":
                await asyncio.sleep(0.002)

    run(check)


def test_one_bad_sector_does_not_degrade_the_tier(folder: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(folder, io) as (store, _):
            (extent,) = await put(store, known(1))
            io.plan = lambda call: Fault(errno.EIO) if call.operation == "read" else None
            (error,) = await store.read([known(1).fetch(extent)])
            assert "Input/output error" in str(error)
            await asyncio.sleep(0.02)
            assert store.stats()["state"] == "ok"

    run(check)


def test_disk_that_is_gone_when_it_is_read_degrades_the_tier(folder: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(folder, io) as (store, _):
            (extent,) = await put(store, known(1))
            io.plan = lambda _: Fault(errno.ENXIO)
            await store.read([known(1).fetch(extent)])
            while store.stats()["state"] == "ok":
                await asyncio.sleep(0.001)
            io.plan = None
            await put(store, known(2))
            assert await readable(store, known(1), extent)

    run(check)


def test_real_read_only_file_system_is_reported_and_left(mounted: Mounter) -> None:
    point = mounted("tmpfs", "size=4m")

    async def check() -> None:
        async with opened(point, capacity=2 * MIB, segment_bytes=128 * KIB) as (store, _):
            (extent,) = await put(store, known(1))
            await store.flush()
            done = subprocess.run(["mount", "-o", "remount,ro", str(point)], capture_output=True, check=False)
            if done.returncode:
                pytest.skip("a file system with files open for writing cannot be made read-only here")
            await refused(store, 2)
            assert "Read-only file system" in store.stats()["state"]
            mounted.remount(point, "rw")
            await put(store, known(3))
            assert store.stats()["state"] == "ok"
            assert await readable(store, known(1), extent)

    run(check)


def test_real_vanished_mount_is_reported_and_nothing_is_written_below_it(
    mounted: Mounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WATCH_S", 0.005)
    point = mounted("tmpfs", "size=4m")

    async def check() -> None:
        async with opened(point, capacity=2 * MIB, segment_bytes=128 * KIB) as (store, _):
            (extent,) = await put(store, known(1))
            await store.flush()
            subprocess.run(["umount", "--lazy", str(point)], check=True)
            mounted.forget(point)
            while store.stats()["state"] == "ok":
                await asyncio.sleep(0.002)
            assert "its mount is gone" in store.stats()["state"]
            await refused(store, 2)
            assert await readable(store, known(1), extent), "what is open is still read"
            assert list(point.iterdir()) == [], "nothing was written below the mount"

    run(check)


def test_case_11_real_full_disk_is_a_state_that_ends_with_the_disks(mounted: Mounter) -> None:
    """Others fill the disk before the store has a second segment to give back."""
    point = mounted("tmpfs", "size=1m")

    async def check() -> None:
        async with opened(point, capacity=64 * MIB, segment_bytes=256 * KIB) as (store, _):
            await put(store, known(1))
            with contextlib.suppress(OSError):
                (point / "ballast").write_bytes(bytes(MIB))
            results = []
            for number in range(2, 60):
                block = known(number)
                results += await store.write([block.item()])
            assert any(isinstance(result, StorageError) for result in results) or store.stats()["reclaimed_segments"]
            (point / "ballast").unlink()
            (place,) = await put(store, known(70))
            assert await readable(store, known(70), place)
            assert store.stats()["state"] == "ok"
            await store.flush()
        async with opened(point, capacity=64 * MIB, segment_bytes=256 * KIB) as (_, found):
            assert known(70).digest + known(70).key in by_key(found)

    run(check)


def test_case_22_degraded_store_answers_at_once_and_counts_what_it_refuses(folder: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(folder, io) as (store, _):
            await put(store, known(0))

            def plan(call: Call) -> Fault | None:
                return Fault(errno.EIO) if call.operation in WRITING else None

            io.plan = plan
            blocks = [known(number) for number in range(1, 50)]
            first = await store.write([block.item() for block in blocks])
            second = await store.write([block.item() for block in blocks])
            assert not [result for result in (*first, *second) if isinstance(result, Extent)]
            assert store.stats()["refused_blocks"] == len(blocks)
            io.plan = None

    run(check)
