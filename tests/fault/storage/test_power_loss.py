"""Power fails at every call, writes tear at every sector, calls come late: nothing flushed is lost, none torn served.

The disk is a model that keeps what was synced, and of the rest whatever a seed says: any sectors of any write, in no
order. KVTIERD_SEED chooses the seed; a failure names the call and the seed that replay it.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import KIB
from kvtierd.storage import Extent, SegmentStore
from kvtierd.testing.faulty_io import Call, Fault, FaultyIo
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from kvtierd.testing.memory_metadata import SmallFiles
from tests.unit.storage.blocks import ON_A_MODEL, Block, by_key, namespace, opened, put, readable, run, settings

pytestmark = ON_A_MODEL
SEED = int(os.environ.get("KVTIERD_SEED", "1"))
SPACE = namespace(Geometry(block_size=32, layers=2, kv_heads=2, k_dim=32, v_dim=32))
"""Blocks of 16 KiB; a record takes 20 KiB."""
RECORD = 20 * KIB
SECTOR = 512
FIELDS = {"capacity": 700 * KIB, "segment_bytes": 160 * KIB}


def block(number: int) -> Block:
    return Block(number, SPACE)


@dataclasses.dataclass
class Promise:
    """What holds at a moment: these are durable, these deleted for good, and this is the disk that a start finds."""

    call: Call
    durable: frozenset[int]
    buried: frozenset[int]
    disk: MemoryDisk


class Witness:
    """Runs a scenario and takes down, before each call to the disk, what is promised and what power loss leaves."""

    def __init__(self, seed: int, *, every: int = 1) -> None:
        self.disk = MemoryDisk()
        self.seed = seed
        self.every = every
        self.durable: set[int] = set()
        self.buried: set[int] = set()
        self.held: dict[int, Extent] = {}
        self.promises: list[Promise] = []
        self.io = FaultyIo(MemoryIo(self.disk), self.look)

    def look(self, call: Call) -> None:
        if call.number % self.every == 0:
            disk = self.disk.after_power_loss(random.Random(self.seed + call.number))
            self.promises.append(Promise(call, frozenset(self.durable), frozenset(self.buried), disk))

    def gone(self, told: list[tuple[int, Extent]]) -> None:
        for tag, _ in told:
            self.durable.discard(tag)
            self.held.pop(tag, None)

    def moved(self, told: list[tuple[int, Extent, Extent]]) -> list[bool]:
        self.held.update({tag: new for tag, _, new in told})
        return [True] * len(told)

    async def scenario(self, directory: Path) -> None:
        """Store, delete, flush, restart, until segments are recycled and what is hot has moved."""
        for life in range(3):
            async with opened(directory, self.io, io_threads=1, **FIELDS) as (store, found):
                held = by_key(found)
                assert {n for n in self.held if block(n).digest + block(n).key in held} == set(self.held)
                store.adopt(found.extents, np.array([_number(key, self.held) for key in found.keys], np.int64))
                store.on_reclaim(self.gone)
                store.on_rewrite(lambda tags: (tags % 4 == 1).astype(np.float32), self.moved)
                for begin in range(life * 24, life * 24 + 24, 3):
                    await self.step(store, begin)

    async def step(self, store: SegmentStore, begin: int) -> None:
        numbers = range(begin, begin + 3)
        for number, extent in zip(numbers, await put(store, *map(block, numbers)), strict=True):
            self.held[number] = extent
        if begin % 2 == 0 and self.held:
            victim = max(self.held)
            self.durable.discard(victim)
            await store.delete([(block(victim).digest, block(victim).key, self.held.pop(victim))])
            await store.flush()
            self.buried.add(victim)
            self.durable |= self.held.keys()
        elif begin % 3 == 0:
            await store.flush()
            self.durable |= self.held.keys()


def _number(key: np.ndarray, held: dict[int, Extent]) -> int:
    return next(number for number in held if block(number).key == key.tobytes())


async def start_after(directory: Path, promise: Promise, where: str) -> None:
    """A start finds what was promised, serves it byte for byte, and nothing that was deleted."""
    store = SegmentStore(settings(directory, io_threads=1, **FIELDS), clock=ManualClock(), io=MemoryIo(promise.disk))
    held = by_key(await store.open())
    try:
        names = {number: block(number).digest + block(number).key for number in range(72)}
        assert held.keys() <= set(names.values()), where
        missing = {number for number in promise.durable if names[number] not in held}
        assert not missing, f"{where}: flushed and gone: {missing}"
        back = {number for number in promise.buried if names[number] in held}
        assert not back, f"{where}: deleted and back: {back}"
        for number, name in names.items():
            if name in held:
                good = await readable(store, block(number), held[name])
                assert good or number not in promise.durable, f"{where}: block {number} was flushed and is damaged"
    finally:
        await store.close()


@pytest.mark.parametrize("index", [True, False], ids=["index", "scan"])
def test_case_10_power_lost_at_any_call_keeps_what_was_flushed(folder: Path, *, index: bool) -> None:
    """With the index, and with segments alone: a start after either finds every promise kept."""

    async def check() -> None:
        witness = Witness(SEED, every=2 if index else 5)
        await witness.scenario(folder / "first")
        assert len(witness.promises) > 60
        assert {call.operation for call in witness.io.calls} >= {"punch", "append_small", "replace_small"}
        assert any(promise.durable and promise.buried for promise in witness.promises)
        for promise in witness.promises:
            if not index:
                promise.disk.metadata = SmallFiles()
            where = f"call {promise.call.number} ({promise.call.operation} {promise.call.name}), seed {SEED}"
            await start_after(folder / "first", promise, where)

    run(check)


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_case_10_power_lost_at_any_call_under_many_seeds(folder: Path, seed: int) -> None:
    async def check() -> None:
        witness = Witness(seed)
        await witness.scenario(folder)
        for promise in witness.promises:
            await start_after(folder, promise, f"call {promise.call.number}, seed {seed}")

    run(check)


async def with_two_flushed(directory: Path, io: FaultyIo) -> SegmentStore:
    store = SegmentStore(settings(directory, **FIELDS), clock=ManualClock(), io=io)
    await store.open()
    await put(store, block(1), block(2))
    await store.flush()
    return store


@pytest.mark.parametrize("torn_at", range(0, RECORD + 1, SECTOR))
def test_case_03_write_torn_at_any_sector_is_a_miss_now_and_after_a_start(folder: Path, torn_at: int) -> None:
    async def check() -> None:
        disk = MemoryDisk()
        io = FaultyIo(MemoryIo(disk))
        store = await with_two_flushed(folder, io)
        io.plan = lambda call: Fault(errno.EIO, torn_at) if call.length >= RECORD else None
        (error,) = await store.write([block(3).item()])
        assert not isinstance(error, Extent)
        killed = disk.as_it_is()
        io.plan = None
        (extent,) = await put(store, block(4))
        assert await readable(store, block(4), extent)
        await store.flush()
        lost = disk.after_power_loss(random.Random(SEED))
        await store.close()
        for later, wanted in ((killed, {1, 2}), (lost, {1, 2, 4})):
            for index in (True, False):
                found = await served(folder, later, index=index)
                whole = torn_at == RECORD and later is killed
                assert found == (wanted | {3} if whole else wanted), f"torn at {torn_at}"

    run(check)


async def served(directory: Path, disk: MemoryDisk, *, index: bool) -> set[int]:
    """Blocks that a start on a copy of this disk offers and can read."""
    copy = disk.as_it_is()
    if not index:
        copy.metadata = SmallFiles()
    async with opened(directory, MemoryIo(copy), **FIELDS) as (store, found):
        held = by_key(found)
        names = {number: block(number).digest + block(number).key for number in range(6)}
        return {n for n, name in names.items() if name in held and await readable(store, block(n), held[name])}


@pytest.mark.parametrize("torn_at", [0, 1, 8, 63, 64, 65, 100, 200, 300, 400, 500, 511])
@pytest.mark.parametrize("fails", ["append", "sync"])
def test_journal_torn_at_any_byte_loses_nothing_that_was_flushed(folder: Path, torn_at: int, fails: str) -> None:
    async def check() -> None:
        disk = MemoryDisk()
        io = FaultyIo(MemoryIo(disk))
        store = await with_two_flushed(folder, io)
        await put(store, block(3))
        failures = []

        def once(call: Call) -> Fault | None:
            if call.operation == f"{fails}_small" and not failures:
                failures.append(call)
                return Fault(errno.EIO, torn_at)
            return None

        io.plan = once
        await store.flush()
        assert len(failures) == 1, "the journal goes on in another file"
        later = disk.after_power_loss()
        await store.close()
        for index in (True, False):
            assert await served(folder, later, index=index) == {1, 2, 3}

    run(check)


@pytest.mark.parametrize("torn_at", range(0, 4096 + 1, SECTOR))
@pytest.mark.parametrize("copy", [0, 1])
def test_header_torn_while_a_segment_is_recycled_leaves_the_old_life_or_none(
    folder: Path, torn_at: int, copy: int
) -> None:
    async def check() -> None:
        disk = MemoryDisk()
        io = FaultyIo(MemoryIo(disk))
        store = SegmentStore(settings(folder, io_threads=1, **FIELDS), clock=ManualClock(), io=io)
        await store.open()
        await put(store, *map(block, range(6)))
        await store.flush()
        headers: list[Call] = []

        def second_life(call: Call) -> Fault | None:
            if call.operation == "write" and call.name == "segment-000000" and call.length == 4096:
                headers.append(call)
                return Fault(errno.EIO, torn_at) if len(headers) == 3 + copy else None
            return None

        io.plan = second_life
        for number in range(6, 60):
            await store.write([block(number).item()])
        assert len(headers) > 3
        later = disk.after_power_loss(random.Random(SEED))
        await store.close()
        await served(folder, later, index=True)  # every byte is compared in there
        await served(folder, later, index=False)

    run(check)


@pytest.mark.parametrize("seed", [SEED, SEED + 1, SEED + 2])
def test_case_05_calls_that_come_late_change_nothing(folder: Path, seed: int) -> None:
    async def check() -> None:
        witness = Witness(seed, every=1 << 30)
        rng = random.Random(seed)
        witness.io.plan = lambda _: time.sleep(rng.choice((0, 0, 0.001, 0.004)))
        await witness.scenario(folder)
        async with opened(folder, MemoryIo(witness.disk), **FIELDS) as (store, found):
            held = by_key(found)
            assert len(held) == len(witness.held)
            for number, extent in witness.held.items():
                assert held[block(number).digest + block(number).key] == extent
                assert await readable(store, block(number), extent)

    run(check)
