"""What opening a store asks of the process before it touches segments, and what recycling one is counted as."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvtierd.storage import opening
from kvtierd.testing.faulty_io import FaultyIo
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.unit.storage.blocks import TINY, Block, known, opened, put, run


def test_limit_of_files_is_raised_before_the_segments_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, opens = [], []

    class Recorded(MemoryIo):
        def open(self, path: Path):
            opens.append(len(limits))
            return super().open(path)

    async def check() -> None:
        disk = MemoryDisk()
        async with opened(tmp_path, MemoryIo(disk), **TINY) as (store, _):
            await put(store, known(1))
        monkeypatch.setattr(opening.resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
        monkeypatch.setattr(opening.resource, "setrlimit", lambda _, wanted: limits.append(wanted))
        async with opened(tmp_path, Recorded(disk), **TINY):
            pass

    run(check)
    assert opens
    assert min(opens) >= 1, "a segment was opened under the old limit"
    assert limits[0][0] > opening.SPARE_FILES


def test_every_byte_that_goes_to_segments_is_counted(tmp_path: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(tmp_path, io, **TINY) as (store, _):
            begin = len(io.calls)
            for number in range(60):
                await put(store, Block(number))
            stats = store.stats()
            assert int(stats["reclaimed_segments"]) > 2
            writes = [call for call in io.calls[begin:] if call.operation == "write"]
            written = sum(call.length for call in writes if call.name.startswith("segment"))
            assert written == int(stats["header_bytes"]) + int(stats["written_bytes"])

    run(check)
