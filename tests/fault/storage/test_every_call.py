"""Fail every call to the disk in turn, in every way: what failed is a miss, now and later; the rest is fine."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import ExitCode, StartupError, StorageError
from kvtierd.core.units import KIB
from kvtierd.storage import Extent, SegmentStore
from kvtierd.testing.faulty_io import FAULTS, Call, Fault, FaultyIo, fail_call
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from tests.unit.storage.blocks import ON_A_MODEL, Block, by_key, known, readable, run, settings

pytestmark = ON_A_MODEL
TINY = {"capacity": 380 * KIB, "segment_bytes": 80 * KIB, "io_threads": 1}


@dataclasses.dataclass
class Story:
    """What a caller knows when the scenario is over."""

    stored: dict[int, tuple[Block, Extent]] = dataclasses.field(default_factory=dict)
    failed: dict[int, Block] = dataclasses.field(default_factory=dict)
    deleted: dict[int, Block] = dataclasses.field(default_factory=dict)
    announced: set[int] = dataclasses.field(default_factory=set)
    flush_failed: bool = False

    def reclaimed(self, told: list[tuple[int, Extent]]) -> None:
        for tag, extent in told:
            assert self.stored.pop(tag)[1] == extent
            self.announced.add(tag)


async def scenario(directory: Path, io: FaultyIo, story: Story) -> None:
    """Store, read, delete, flush, restart, fill up until segments are recycled, close."""
    store = SegmentStore(settings(directory, **TINY), clock=ManualClock(), io=io)
    if await recovered_or_refused(store) is None:
        io.plan = None
        await store.open()
    store.on_reclaim(story.reclaimed)
    await write(store, story, range(8))
    await check_reads(store, story)
    victims = [story.stored.pop(number) for number in (1, 6) if number in story.stored]
    story.deleted.update({block.tag: block for block, _ in victims})
    await owed(story, store.delete([(block.digest, block.key, extent) for block, extent in victims]))
    await owed(story, store.flush())
    for number in range(8, 30, 4):
        await write(store, story, range(number, number + 4))
    await check_reads(store, story)
    await owed(story, store.flush())
    await owed(story, store.close())


async def owed(story: Story, work: object) -> None:
    """Await what may fail; while the last flush or close has failed, durability is not promised."""
    try:
        await work
    except StorageError:
        story.flush_failed = True
    else:
        story.flush_failed = False


async def write(store: SegmentStore, story: Story, numbers: range) -> None:
    blocks = [known(number) for number in numbers]
    store.register(blocks[0].digest, blocks[0].space)
    for block, result in zip(blocks, await store.write([block.item() for block in blocks]), strict=True):
        if isinstance(result, Extent):
            story.stored[block.tag] = block, result
        else:
            assert isinstance(result, StorageError)
            story.failed[block.tag] = block


async def check_reads(store: SegmentStore, story: Story) -> None:
    """Wrong bytes fail in `readable`; an error is a miss, and a second try of what is stored succeeds."""
    for block, extent in list(story.stored.values()):
        good = await readable(store, block, extent) or await readable(store, block, extent)
        assert good or block.tag not in story.stored


def fault_free_calls(directory: Path) -> list[Call]:
    """The calls of the scenario when nothing goes wrong."""
    calls: list[Call] = []

    async def check() -> None:
        story = Story()
        io = FaultyIo(MemoryIo(MemoryDisk()))
        await scenario(directory, io, story)
        calls.extend(io.calls)
        assert not story.failed
        assert not story.flush_failed

    run(check)
    return calls


@pytest.mark.parametrize("name", FAULTS)
def test_case_02_any_failing_call_costs_only_its_own_blocks(folder: Path, name: str) -> None:
    calls = fault_free_calls(folder / "dry")
    assert {call.operation for call in calls} >= {"create", "read", "write", "sync", "sync_directory"}
    assert {call.operation for call in calls} >= {"append_small", "sync_small", "create_small", "replace_small"}
    for call in calls:
        run(lambda number=call.number: one_failing_call(folder / f"{number}", number, FAULTS[name]))


async def one_failing_call(directory: Path, number: int, fault: Fault) -> None:
    disk, story = MemoryDisk(), Story()
    await scenario(directory, FaultyIo(MemoryIo(disk), fail_call(number, fault)), story)
    survivors = await reopened(directory, MemoryIo(disk.after_power_loss() if not story.flush_failed else disk), story)
    if not story.flush_failed:
        # A segment that was announced and could then not be given a new header may come back with its old one.
        assert set(story.stored) <= survivors <= {*story.stored, *story.announced}, f"call {number}"


async def reopened(directory: Path, io: MemoryIo, story: Story) -> set[int]:
    """Which blocks a later life finds; each of them whole."""
    store = SegmentStore(settings(directory, **TINY), clock=ManualClock(), io=io)
    held = by_key(await store.open())
    survivors = set()
    for number in range(32):
        block = known(number)
        if (extent := held.get(block.digest + block.key)) is not None:
            assert await readable(store, block, extent)
            survivors.add(number)
    await store.close()
    if not story.flush_failed:
        assert not survivors & story.failed.keys(), "a store that failed was found after a restart"
        assert not survivors & story.deleted.keys(), "a deleted block came back"
    return survivors


async def recovered_or_refused(store: SegmentStore) -> dict[bytes, Extent] | None:
    """What a start found; None when it was refused, in one line."""
    try:
        return by_key(await store.open())
    except StartupError as error:
        refusal = error
    assert refusal.exit_code == ExitCode.IO
    assert "\n" not in str(refusal)
    return None


@pytest.mark.parametrize("name", ["fails", "disk full", "no progress"])
def test_any_failing_call_at_start_is_one_clear_line_or_costs_only_what_it_read(folder: Path, name: str) -> None:
    async def check() -> None:
        disk, story = MemoryDisk(), Story()
        await scenario(folder, FaultyIo(MemoryIo(disk)), story)
        dry = FaultyIo(MemoryIo(disk))
        store = SegmentStore(settings(folder, **TINY), clock=ManualClock(), io=dry)
        whole = by_key(await store.open())
        count = len(dry.calls)
        await store.close()
        assert len(whole) == len(story.stored)
        for number in range(count):
            io = FaultyIo(MemoryIo(disk), fail_call(number, FAULTS[name]))
            store = SegmentStore(settings(folder, **TINY), clock=ManualClock(), io=io)
            held = await recovered_or_refused(store)
            if held is None:
                continue
            assert held.items() <= whole.items()
            for block, extent in story.stored.values():
                if block.digest + block.key in held:
                    assert await readable(store, block, extent)
            io.plan = None
            await store.close()

    run(check)


def test_disk_that_fails_every_write_keeps_what_can_be_read_and_recovers_by_itself(folder: Path) -> None:
    async def check() -> None:
        io, story = FaultyIo(MemoryIo(MemoryDisk())), Story()
        store = SegmentStore(settings(folder, **TINY), clock=ManualClock(), io=io)
        await store.open()
        store.on_reclaim(story.reclaimed)
        await write(store, story, range(20))
        held = set(story.stored)
        io.plan = lambda call: Fault(errno.EROFS) if call.operation in {"write", "create"} else None
        for begin in range(100, 200, 4):
            await write(store, story, range(begin, begin + 4))
        assert set(story.stored) == held, "failing writes cost blocks that could be read"
        await check_reads(store, story)
        io.plan = None
        await write(store, story, range(200, 204))
        assert story.stored.keys() >= set(range(200, 204))
        await store.flush()
        assert store.stats()["owed_tombstones"] == 0
        await store.close()
        assert await reopened(folder, io.inner, story) == {number for number in story.stored if number < 32}

    run(check)


def test_failed_sync_forgets_the_blocks_it_covered_and_announces_them(folder: Path) -> None:
    async def check() -> None:
        disk, story = MemoryDisk(), Story()
        io = FaultyIo(MemoryIo(disk))
        store = SegmentStore(settings(folder, **TINY), clock=ManualClock(), io=io)
        await store.open()
        recycled: list[tuple[int, Extent]] = []
        store.on_reclaim(recycled.extend, story.reclaimed)
        await write(store, story, range(2))
        await store.flush()
        await write(store, story, range(2, 4))
        io.plan = lambda call: Fault(errno.EIO) if call.operation == "sync" else None
        with pytest.raises(StorageError, match="cannot sync"):
            await store.flush()
        assert set(story.stored) == {0, 1}
        io.plan = None
        await write(store, story, range(4, 6))
        await store.flush()
        assert store.stats()["lost_in_sync"] == 2
        assert recycled == [], "what a failed sync put in doubt was not recycled"
        assert await reopened_after_power_loss(folder, disk, store) == {0, 1, 4, 5}

    async def reopened_after_power_loss(directory: Path, disk: MemoryDisk, store: SegmentStore) -> set[int]:
        found = disk.after_power_loss()
        await store.close()
        return await reopened(directory, MemoryIo(found), Story())

    run(check)


def test_case_02_source_that_changed_is_refused_alone(folder: Path) -> None:
    async def check() -> None:
        store = SegmentStore(settings(folder, **TINY), clock=ManualClock(), io=MemoryIo(MemoryDisk()))
        await store.open()
        story = Story()
        blocks = [Block(number) for number in range(3)]
        blocks[1].data[5000] ^= 1
        store.register(blocks[0].digest, blocks[0].space)
        first, second, third = await store.write([block.item() for block in blocks])
        assert "the sum of layer 1 differs" in str(second)
        assert await readable(store, blocks[0], first)
        assert await readable(store, blocks[2], third)
        await store.close()
        assert await reopened(folder, store._io, story) == {0, 2}

    run(check)
