"""The offline checker: what it calls clean, what it finds and where, and what it can mend."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from kvtierd.cli.main import main
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import KIB
from kvtierd.storage import headers, superblock
from kvtierd.storage.checker import Report, Verdict, check_store
from kvtierd.storage.record import Life
from kvtierd.storage.superblock import Superblock
from tests.fault.storage.test_damage import FIRST, RECORD, flip
from tests.unit.storage.blocks import ON_A_MODEL, by_key, forget_index, known, opened, put, readable, run

pytestmark = ON_A_MODEL
FIELDS = {"capacity": 600 * KIB, "segment_bytes": 100 * KIB}
COUNT = 12


async def filled(folder: Path) -> list[Path]:
    """A store of twelve blocks, one of them deleted, closed cleanly; its segments, oldest first."""
    async with opened(folder, **FIELDS) as (store, _):
        extents = await put(store, *map(known, range(COUNT)))
        await store.delete([(known(0).digest, known(0).key, extents[0])])
    return sorted(folder.glob("segment-*"))


async def found(folder: Path) -> set[int]:
    """Which blocks a start offers and serves."""
    async with opened(folder, **FIELDS) as (store, recovered):
        held = by_key(recovered)
        good = set()
        for number in range(COUNT):
            name = known(number).digest + known(number).key
            if name in held:
                assert await readable(store, known(number), held[name])
                good.add(number)
        return good


def problems(report: Report) -> list[str]:
    return [f"{finding.place}: {finding.what}" for finding in report.findings if not finding.is_note]


def test_closed_store_is_clean_and_nothing_is_changed(folder: Path) -> None:
    async def check() -> None:
        await filled(folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        report = await check_store(folder, verify_data=True)
        assert report.findings == []
        assert report.verdict is Verdict.CLEAN
        assert (report.live_blocks, report.verified_bytes) == (COUNT - 1, (COUNT - 1) * RECORD)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    run(check)


def test_case_06_store_in_use_is_not_checked(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, **FIELDS):
            with pytest.raises(StartupError) as caught:
                await check_store(folder)
            assert caught.value.exit_code == ExitCode.LOCKED

    run(check)


def test_folder_that_is_no_store_gets_no_file(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "mine").write_text("")
    with pytest.raises(StartupError, match="there is no store in") as caught:
        asyncio.run(check_store(folder, repair=True))
    assert caught.value.exit_code == ExitCode.IO
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_folder_in_place_of_a_segment_is_named(folder: Path) -> None:
    asyncio.run(filled(folder))
    (folder / "segment-000050").mkdir()
    with pytest.raises(StartupError, match=r"segment-000050: Is a directory"):
        asyncio.run(check_store(folder))
    with pytest.raises(StartupError, match=r"segment-000050: Is a directory"):
        asyncio.run(found(folder))


def test_newer_format_is_left_alone(folder: Path) -> None:
    async def check() -> None:
        await filled(folder)
        path = folder / "superblock"
        newer = b"".join(superblock.encode(Superblock(bytes(16), 9, version=3), copy) for copy in range(2))
        path.write_bytes(newer)
        with pytest.raises(StartupError, match="format 3"):
            await check_store(folder, repair=True)
        assert path.read_bytes() == newer

    run(check)


@pytest.mark.parametrize("copy", [0, 1])
def test_damaged_superblock_copy_is_named_and_mended(folder: Path, copy: int) -> None:
    async def check() -> None:
        await filled(folder)
        before = (folder / "superblock").read_bytes()
        flip(folder / "superblock", copy * 4096 + 30)
        report = await check_store(folder)
        assert problems(report) == [f"superblock at {copy * 4096}: copy {copy} is not valid"]
        assert report.verdict is Verdict.BROKEN
        assert (await check_store(folder, repair=True)).verdict is Verdict.REPAIRED
        assert (folder / "superblock").read_bytes() == before
        assert (await check_store(folder)).verdict is Verdict.CLEAN

    run(check)


def test_superblock_without_a_valid_copy_cannot_be_mended(folder: Path) -> None:
    async def check() -> None:
        await filled(folder)
        for copy in range(2):
            flip(folder / "superblock", copy * 4096 + 30)
        assert (await check_store(folder, repair=True)).verdict is Verdict.BROKEN

    run(check)


@pytest.mark.parametrize("at", [30, -4096 + 30])
def test_damaged_copy_of_a_segment_header_is_named_and_mended(folder: Path, at: int) -> None:
    async def check() -> None:
        first, *_ = await filled(folder)
        before = first.read_bytes()
        flip(first, at % len(before))
        report = await check_store(folder)
        assert report.verdict is Verdict.BROKEN
        assert "segment 0" in problems(report)[0]
        assert (await check_store(folder, repair=True)).verdict is Verdict.REPAIRED
        assert first.read_bytes() == before

    run(check)


@pytest.mark.parametrize("byte", [0, 9, 18, 40, 70, 130, 192, 200])
def test_damaged_record_is_found_by_its_place_and_left_out_after_repair(folder: Path, byte: int) -> None:
    async def check() -> None:
        first, *_ = await filled(folder)
        place = FIRST + 2 * RECORD
        flip(first, place + byte)
        report = await check_store(folder)
        assert report.verdict is Verdict.BROKEN
        assert any(f"segment 0 at {place}" in problem for problem in problems(report))
        assert (await check_store(folder, repair=True)).verdict is Verdict.REPAIRED
        again = await check_store(folder, verify_data=True)
        assert again.verdict is Verdict.CLEAN
        assert await found(folder) == set(range(COUNT)) - {0, 2}

    run(check)


def test_damaged_payload_is_found_with_verify_data_and_left_out_after_repair(folder: Path) -> None:
    async def check() -> None:
        first, *_ = await filled(folder)
        flip(first, FIRST + 2 * RECORD + 4096 + 5)
        assert (await check_store(folder)).verdict is Verdict.CLEAN, "payloads are read only when that is asked for"
        report = await check_store(folder, verify_data=True)
        assert problems(report) == [f"segment 0 at {FIRST + 2 * RECORD}: the bytes of layer 0 are damaged"]
        assert (await check_store(folder, verify_data=True, repair=True)).verdict is Verdict.REPAIRED
        assert (await check_store(folder, verify_data=True)).verdict is Verdict.CLEAN
        assert await found(folder) == set(range(COUNT)) - {0, 2}

    run(check)


def test_store_without_an_index_is_repaired_by_a_scan(folder: Path) -> None:
    async def check() -> None:
        await filled(folder)
        forget_index(folder)
        report = await check_store(folder, repair=True)
        assert report.verdict is Verdict.CLEAN
        async with opened(folder, **FIELDS) as (_, recovered):
            assert recovered.source == "index, 0 segments scanned"
            assert len(recovered.extents) == COUNT - 1

    run(check)


def test_block_that_the_index_lacks_is_found(folder: Path) -> None:
    """An old index put back beside newer segments."""

    async def check() -> None:
        async with opened(folder, **FIELDS) as (store, _):
            await put(store, known(0))
        old = {path: path.read_bytes() for kind in ("checkpoint", "journal") for path in folder.glob(f"{kind}-*")}
        async with opened(folder, **FIELDS) as (store, _):
            await put(store, known(1))
        forget_index(folder)
        for path, data in old.items():
            path.write_bytes(data)
        report = await check_store(folder)
        assert any("is not in the index" in problem for problem in problems(report))
        assert (await check_store(folder, repair=True)).verdict is Verdict.REPAIRED
        async with opened(folder, **FIELDS) as (_, recovered):
            assert len(recovered.extents) == 2

    run(check)


def test_truncated_segment_is_a_problem(folder: Path) -> None:
    async def check() -> None:
        first, *_ = await filled(folder)
        os.truncate(first, FIRST + 2 * RECORD)
        report = await check_store(folder)
        assert any("the file has" in problem for problem in problems(report))
        assert report.verdict is Verdict.BROKEN

    run(check)


def test_leftovers_are_notes_and_removed_by_repair(folder: Path) -> None:
    async def check() -> None:
        await filled(folder)
        (folder / "checkpoint-000009.new").write_bytes(b"half")
        (folder / "mine.txt").write_text("mine")
        (folder / "notes.new").mkdir()
        report = await check_store(folder)
        assert report.verdict is Verdict.CLEAN
        assert [finding.place for finding in report.findings] == ["checkpoint-000009.new"]
        await check_store(folder, repair=True)
        assert not (folder / "checkpoint-000009.new").exists()
        assert (folder / "mine.txt").exists()
        assert (folder / "notes.new").exists(), "whatever we do not name is not ours"

    run(check)


@pytest.mark.parametrize("old_is_there", [False, True])
def test_damaged_checkpoint_that_is_called_repaired_is_repaired(folder: Path, *, old_is_there: bool) -> None:
    async def check() -> None:
        await filled(folder)
        newest = max(folder.glob("checkpoint-*"))
        if old_is_there:  # the same index once more, under the number before
            (folder / f"checkpoint-{int(newest.name[-6:]) - 1:06}").write_bytes(newest.read_bytes())
            for journal in folder.glob("journal-*"):
                journal.with_name(f"journal-{int(journal.name[-6:]) - 1:06}").write_bytes(journal.read_bytes())
        flip(newest, 60)
        assert problems(await check_store(folder))
        assert (await check_store(folder, repair=True)).verdict is Verdict.REPAIRED
        after = await check_store(folder)
        assert (problems(after), after.verdict) == ([], Verdict.CLEAN)
        assert await found(folder) == set(range(1, 12))

    run(check)


def test_command_exits_as_fsck_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = asyncio.run(filled(folder))
    assert main(["check", str(folder)]) == 0
    assert "clean: 2 segments, 11 live blocks" in capsys.readouterr().out
    flip(first, FIRST + 2 * RECORD + 9)
    assert main(["check", str(folder)]) == 4
    assert f"problem   segment 0 at {FIRST + 2 * RECORD}: " in capsys.readouterr().out
    assert main(["check", str(folder), "--repair"]) == 1
    assert main(["check", str(folder), "--verify-data", "--json"]) == 0
    assert '"verdict": "clean"' in capsys.readouterr().out
    assert main(["check", str(folder / "nothing")]) == ExitCode.IO


def test_dump_shows_each_record_of_a_segment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = asyncio.run(filled(folder))
    flip(first, FIRST + 2 * RECORD + 4096)
    assert main(["dump", str(first), "--verify-data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("segment    0, format 2")
    kinds = [line.split()[0] for line in lines]
    assert kinds[1] == "namespace"
    assert kinds.count("block") == 6
    blocks = [line for line in lines if line.startswith("block")]
    assert known(2).key.hex()[:16] in blocks[2]
    assert "DAMAGED (the bytes of layer 0 are damaged)" in blocks[2]
    assert all(line.endswith("whole") for line in blocks[:2] + blocks[3:])
    assert kinds[-1] == "end"
    assert main(["dump", str(folder / "superblock")]) == ExitCode.USAGE


@pytest.mark.parametrize("has_first_copy", [False, True])
def test_segment_that_was_being_made_when_the_process_was_killed_is_no_problem(
    folder: Path, *, has_first_copy: bool
) -> None:
    """Its file is there, and of its header nothing, or the first copy."""

    async def check() -> None:
        first, *_ = await filled(folder)
        page, size = np.zeros(4096, np.uint8), first.stat().st_size
        if has_first_copy:
            uuid = (await superblock.load(folder)).uuid
            headers.encode_header(Life(7, 9 << 40, 7, size), uuid, page)
        (folder / "segment-000007").write_bytes(page.tobytes() + bytes(size - 4096))
        report = await check_store(folder)
        assert (report.verdict, problems(report)) == (Verdict.CLEAN, [])
        assert [finding.place for finding in report.findings] == ["segment 7 at 0"]
        async with opened(folder, **FIELDS) as (_, recovered):
            assert recovered.dropped == 0
            assert len(recovered.extents) == COUNT - 1

    run(check)


def test_recycling_that_a_kill_cut_off_between_the_two_copies_is_no_problem(folder: Path) -> None:
    async def check() -> None:
        async with opened(folder, **FIELDS) as (store, _):
            for number in range(COUNT):
                await put(store, known(number))
        first, *_ = sorted(folder.glob("segment-*"))
        data = bytearray(first.read_bytes())
        uuid = (await superblock.load(folder)).uuid
        page = np.zeros(4096, np.uint8)
        headers.encode_header(Life(0, 9 << 40, 7, len(data)), uuid, page)
        first.write_bytes(page.tobytes() + bytes(data[4096:]))
        report = await check_store(folder)
        assert [finding.what for finding in report.findings if finding.is_note][:1] == [
            "the copies of its header are of two lives; the later one counts"
        ]
        async with opened(folder, **FIELDS) as (_, recovered):
            assert all(extent.segment != 0 for extent in recovered.extents), "the later life has no records"
        assert first.read_bytes()[-4096:] == first.read_bytes()[:4096], "a start makes the copies equal"

    run(check)
