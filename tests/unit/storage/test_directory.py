"""The directory: missing, read-only, full, or somebody else's."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvtierd.config.schema import Nvme
from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import MIB
from kvtierd.storage import SegmentStore
from tests.unit.storage.blocks import Block, by_key, opened, put, run


async def refused(directory: Path, **fields: object) -> StartupError:
    with pytest.raises(StartupError) as caught:
        async with opened(directory, **fields):
            pass
    assert "\n" not in str(caught.value)
    return caught.value


def test_directory_is_made_when_its_parent_exists(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path / "new"):
            assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700

    run(check)


def test_store_without_a_directory_is_no_store_in_the_current_one() -> None:
    with pytest.raises(ValueError, match="switches the tier off"):
        SegmentStore(Nvme(directory=""), clock=ManualClock())


def test_directory_without_parent_is_refused_by_name(tmp_path: Path) -> None:
    async def check() -> None:
        error = await refused(tmp_path / "a" / "b")
        assert error.exit_code == ExitCode.IO
        assert str(tmp_path / "a" / "b") in str(error)
        assert not (tmp_path / "a").exists()

    run(check)


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        (tmp_path / "file").write_text("mine")
        error = await refused(tmp_path / "file")
        assert error.exit_code == ExitCode.IO
        assert "not a directory" in str(error)

    run(check)


def test_case_06_second_opener_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    async def check() -> None:
        block = Block(1)
        async with opened(tmp_path) as (store, _):
            await put(store, block)
            error = await refused(tmp_path)
            assert error.exit_code == ExitCode.LOCKED
            assert f"process {os.getpid()}" in str(error)
        async with opened(tmp_path) as (_, found):
            assert len(by_key(found)) == 1

    run(check)


def test_case_06_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = """
        import asyncio, os, signal, sys
        from pathlib import Path
        from tests.unit.storage.blocks import opened
        async def main():
            async with opened(Path(sys.argv[1])):
                print("open", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert child.stdout == "open\n", child.stderr

    async def check() -> None:
        async with opened(tmp_path):
            pass

    run(check)


def test_read_only_file_system_is_one_clear_line(mounted) -> None:
    point = mounted("tmpfs", "size=4m")
    mounted.remount(point, "ro")

    async def check() -> None:
        error = await refused(point)
        assert error.exit_code == ExitCode.IO
        assert "Read-only file system" in str(error)
        assert str(point) in str(error)

    run(check)


def test_directory_of_another_user_is_one_clear_line(shm: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    shm.chmod(0o555)
    code = """
        import asyncio, concurrent.futures.thread, os, sys
        from pathlib import Path
        from kvtierd.core.errors import StartupError
        from tests.unit.storage.blocks import opened
        async def main():
            try:
                async with opened(Path(sys.argv[1])):
                    print("opened")
            except StartupError as error:
                print(int(error.exit_code), error)
        os.setegid(65534)
        os.seteuid(65534)
        asyncio.run(main())
    """
    command = [sys.executable, "-B", "-c", textwrap.dedent(code), str(shm)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.stdout.startswith(f"74 cannot write in nvme.directory {shm}: Permission denied"), child.stderr


def test_full_disk_at_start_is_one_clear_line(mounted) -> None:
    point = mounted("tmpfs", "size=1m")

    async def check() -> None:
        (point / "ballast").write_bytes(bytes(900 << 10))
        error = await refused(point, capacity=4 * MIB, segment_bytes=MIB)
        assert error.exit_code == ExitCode.IO
        assert "full" in str(error)

    run(check)


def test_disk_without_a_single_free_byte_is_one_clear_line(mounted) -> None:
    point = mounted("tmpfs", "size=64k")

    async def check() -> None:
        with pytest.raises(OSError, match="No space"):
            (point / "ballast").write_bytes(bytes(128 << 10))
        error = await refused(point, capacity=4 * MIB, segment_bytes=MIB)
        assert error.exit_code == ExitCode.IO
        assert "No space left" in str(error)

    run(check)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    async def check() -> None:
        (tmp_path / "lost+found").mkdir()
        (tmp_path / "segment-notes").write_text("mine")
        async with opened(tmp_path) as (store, _):
            await put(store, Block(1))
        async with opened(tmp_path) as (_, found):
            assert len(found.extents) == 1
        assert (tmp_path / "segment-notes").read_text() == "mine"

    run(check)


@pytest.mark.parametrize(("fields", "names"), [({"io_threads": 0}, "io_threads"), ({"capacity": 5}, "capacity is 5")])
def test_settings_that_cannot_work_are_refused_and_let_go_of_the_lock(
    tmp_path: Path, fields: dict[str, int], names: str
) -> None:
    async def check() -> None:
        error = await refused(tmp_path, **fields)
        assert error.exit_code == ExitCode.CONFIG
        assert names in str(error)
        async with opened(tmp_path):
            pass

    run(check)


def test_more_segments_than_open_files_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))

    async def check() -> None:
        error = await refused(tmp_path, capacity=100 << 20, segment_bytes=100 << 10)
        assert error.exit_code == ExitCode.CONFIG
        assert "LimitNOFILE or nvme.segment_bytes" in str(error)

    run(check)


def test_soft_limit_of_open_files_is_raised_for_the_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 100_000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))

    async def check() -> None:
        async with opened(tmp_path, capacity=100 << 20, segment_bytes=100 << 10) as (store, _):
            count = (100 << 20) // store.stats()["segment_bytes"]
            ((soft, hard),) = limits
            assert soft > count
            assert hard == 100_000

    run(check)
