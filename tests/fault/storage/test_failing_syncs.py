"""A disk whose syncs fail over and over: what it is given is in doubt, and costs no room of what is good."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvtierd.core.errors import StorageError
from kvtierd.core.units import KIB
from kvtierd.testing.faulty_io import Call, Fault, FaultyIo
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.unit.storage.blocks import ON_A_MODEL, known, opened, put, readable, run

pytestmark = ON_A_MODEL
FIELDS = {"capacity": 600 * KIB, "segment_bytes": 100 * KIB}
ROUNDS = 30
"""More than there are segments."""


class DataSyncs:
    """A plan in which every sync of records fails, and every sync of a header, or of a trial, succeeds."""

    def __init__(self) -> None:
        self.failed = 0
        self._headers: set[str] = set()

    def __call__(self, call: Call) -> Fault | None:
        if call.operation == "write" and call.offset == 0:
            self._headers.add(call.name)
        if call.operation != "sync" or call.name in self._headers:
            self._headers.discard(call.name if call.operation == "sync" else "")
            return None
        self.failed += 1
        return Fault(errno.EIO)


def test_failing_syncs_take_no_more_than_a_segment_and_recycle_nothing(folder: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        async with opened(folder, io, **FIELDS) as (store, _):
            good = [known(number) for number in range(4)]
            extents = await put(store, *good)
            await store.flush()
            io.plan = plan = DataSyncs()
            for number in range(ROUNDS):
                await put(store, known(100 + number))
                with pytest.raises(StorageError):
                    await store.flush()
            assert plan.failed >= ROUNDS
            io.plan = None
            await store.flush()
            assert store.stats()["reclaimed_segments"] == 0
            assert store.stats()["lost_in_sync"] == ROUNDS
            for block, extent in zip(good, extents, strict=True):
                assert await readable(store, block, extent)
            (last,) = await put(store, known(500))
            await store.flush()
            assert await readable(store, known(500), last)
        async with opened(folder, io.inner, **FIELDS) as (_, found):
            names = {key.tobytes() for key in found.keys}
            assert names == {block.key for block in (*good, known(500))}

    run(check)


def test_a_tombstone_in_doubt_keeps_its_word_when_its_segment_is_used_again(folder: Path) -> None:
    async def check() -> None:
        io = FaultyIo(MemoryIo(MemoryDisk()))
        doomed = known(1)
        async with opened(folder, io, **FIELDS) as (store, _):
            (extent,) = await put(store, doomed)
            await store.flush()
            await store.delete([(doomed.digest, doomed.key, extent)])
            io.plan = plan = DataSyncs()
            for number in range(ROUNDS):
                await put(store, known(100 + number))
                with pytest.raises(StorageError):
                    await store.flush()
            assert plan.failed >= ROUNDS
            io.plan = None
            assert store.stats()["reclaimed_segments"] == 0
            await store.flush()
        async with opened(folder, io.inner, **FIELDS) as (_, found):
            assert doomed.key not in {key.tobytes() for key in found.keys}

    run(check)
