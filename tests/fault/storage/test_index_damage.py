"""Damage of journal and checkpoints: seen, mended, and never at the cost of what was flushed or deleted."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvtierd.storage import superblock
from kvtierd.storage.checker import Verdict, check_store
from kvtierd.storage.facts import Facts, Head
from kvtierd.storage.index_load import load_index
from kvtierd.storage.index_log import IndexLog
from kvtierd.storage.metadata import AioMetadata
from tests.fault.storage.test_checker import COUNT, FIELDS, filled, found, problems
from tests.fault.storage.test_damage import flip
from tests.unit.storage.blocks import ON_A_MODEL, known, opened, put, run

pytestmark = ON_A_MODEL


@pytest.mark.parametrize("kind", ["checkpoint", "journal"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_any_damage_of_the_index_is_detected_and_serves_no_deleted_block(folder: Path, kind: str, share: float) -> None:
    async def check() -> None:
        await filled(folder)
        path = max(path for path in folder.glob(f"{kind}-*") if path.stat().st_size)
        flip(path, int(path.stat().st_size * share))
        report = await check_store(folder)
        assert report.findings, "damage was not seen"
        await check_store(folder, repair=True)
        assert (await check_store(folder)).verdict is Verdict.CLEAN
        assert await found(folder) == set(range(1, COUNT))

    run(check)


@pytest.mark.parametrize("byte", range(0, 600, 7))
def test_start_over_a_damaged_index_finds_everything_but_the_deleted(folder: Path, byte: int) -> None:
    async def check() -> None:
        await filled(folder)
        path = max(folder.glob("checkpoint-*"))
        flip(path, byte % path.stat().st_size, byte % 8)
        assert await found(folder) == set(range(1, COUNT))

    run(check)


async def killed(folder: Path) -> Path:
    """A store with two journals and blocks that only they name, as a killed process leaves it, and its copy."""
    copy = folder / "killed"
    async with opened(folder / "store", **FIELDS) as (store, _):
        extents = await put(store, *map(known, range(4)))
        await store.flush()
        await store.delete([(known(0).digest, known(0).key, extents[0])])
        await put(store, *map(known, range(4, 7)))
        await store.flush()
        shutil.copytree(folder / "store", folder / "first")
    async with opened(folder / "first", **FIELDS) as (store, _):
        await put(store, *map(known, range(7, COUNT)))
        await store.flush()
        shutil.copytree(folder / "first", copy)
    return copy


@pytest.mark.parametrize("step", range(12))
def test_any_flipped_bit_in_a_journal_costs_nothing_that_was_flushed(folder: Path, step: int) -> None:
    """Also where a later journal goes on: what it says to cover may be in the frames that are lost."""

    async def check() -> None:
        copy = await killed(folder)
        journals = [path for path in sorted(copy.glob("journal-*")) if path.stat().st_size]
        assert len(journals) >= 2
        for number, journal in enumerate(journals):
            for byte in range(step * 5, journal.stat().st_size, 60):
                victim = folder / f"{number}-{byte}"
                shutil.copytree(copy, victim)
                flip(victim / journal.name, byte, byte % 8)
                assert await found(victim) == set(range(1, COUNT)), (journal.name, byte)
                shutil.rmtree(victim)

    run(check)


@pytest.mark.parametrize("fails", [False, True], ids=["nothing is appended", "the append fails"])
def test_journal_without_frames_hides_no_damage_of_the_one_before(folder: Path, fails: bool) -> None:
    """What follows says how much was there, though a journal with nothing on stable storage lies between."""
    uuid = bytes(16)

    class Refusing(AioMetadata):
        refuses = False

        async def append(self, name: str, data: bytes) -> None:
            if self.refuses:
                raise OSError(5, "no")
            await super().append(name, data)

    def facts(generation: int) -> Facts:
        new = Facts()
        new.heads[0] = Head(generation, 4096, sealed=False)
        return new

    async def check() -> None:
        folder.mkdir(exist_ok=True)
        files = Refusing(folder)
        log = IndexLog(files, uuid, await load_index(files, uuid), Counter())
        await log.begin()
        await log.append(facts(1))
        await log.append(facts(2))
        files.refuses = fails
        for _ in range(2):
            if fails:
                with pytest.raises(OSError, match="no"):
                    await log.append(facts(3))
            else:  # an opening that appends nothing
                log = IndexLog(files, uuid, await load_index(files, uuid), Counter())
                await log.append(Facts())
        files.refuses = False
        if not fails:
            log = IndexLog(files, uuid, await load_index(files, uuid), Counter())
        await log.append(facts(3))
        await files.close()
        assert len(list(folder.glob("journal-*"))) >= 3
        assert (await load_index(files, uuid)).usable
        journal = folder / "journal-000001"
        flip(journal, journal.stat().st_size - 1)
        damaged = await load_index(files, uuid)
        assert not damaged.usable
        assert any("journal-000001 is damaged" in note for note in damaged.notes)

    run(check)


def test_index_with_overlapping_blocks_is_made_anew(folder: Path) -> None:
    async def check() -> None:
        await filled(folder)
        block = await superblock.load(folder)
        assert block is not None
        files = AioMetadata(folder)
        loaded = await load_index(files, block.uuid)
        wrong = Facts()
        wrong.spaces = loaded.facts.spaces
        rows = loaded.facts.blocks.copy()
        rows["segment"] = rows["segment"][rows["sequence"].argmin()]
        rows["page"] = 1 + np.arange(len(rows))
        wrong.add_blocks(rows)
        wrong.heads = loaded.facts.heads
        await IndexLog(files, block.uuid, loaded, Counter()).replace_all(wrong)
        await files.close()
        report = await check_store(folder)
        assert any("overlap" in what for what in problems(report)), problems(report)
        assert report.verdict is Verdict.BROKEN
        assert (await check_store(folder, repair=True)).verdict is Verdict.REPAIRED
        assert (await check_store(folder)).verdict is Verdict.CLEAN
        assert await found(folder) == set(range(1, COUNT))

    run(check)
