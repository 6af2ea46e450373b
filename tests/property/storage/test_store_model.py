"""Any sequence of operations, restarts and losses of power, against a dict.

The disk is a model that keeps what was synced, and of the rest whatever it likes (kvtierd.testing.memory_disk).
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import CorruptionError
from kvtierd.core.units import KIB
from kvtierd.storage import Extent, SegmentStore
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from kvtierd.testing.memory_metadata import SmallFiles
from tests.unit.storage.blocks import ODD, SMALL, Block, namespace, settings

T = TypeVar("T")

SPACES = [namespace(SMALL), namespace(SMALL, tp_rank=1, tp_size=2), namespace(ODD)]
KEYS = 6
Name = tuple[int, int]
"""Which namespace, which key."""


class StoreMachine(RuleBasedStateMachine):
    """One I/O thread, so that a failure replays.

    `held` is what can be read now; `possible` what a loss of power may bring back, by name: versions, or None.
    `doubtful` are versions that a loss of power may have torn: reading one is right or an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtierd-model-"))
        self.disk = MemoryDisk(64 << 20)
        self.held: dict[Name, tuple[Block, Extent, int]] = {}
        self.gone: list[tuple[Block, Extent]] = []
        self.possible: dict[Name, set[int | None]] = {}
        self.made: dict[tuple[Name, int], Block] = {}
        self.places: dict[Extent, tuple[Name, int]] = {}
        self.doubtful: set[tuple[Name, int]] = set()
        self.versions = 0
        self.power_was_lost = False
        self.writing: set[Name] = set()
        self.open()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, background work included, so that a failure replays."""
        return self.loop.run_until_complete(self.to_the_end(work))

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        result = await work
        while rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest)
        return result

    def open(self) -> None:
        self.store = SegmentStore(
            settings(self.directory, capacity=800 * KIB, segment_bytes=80 * KIB, io_threads=1),
            clock=ManualClock(),
            io=MemoryIo(self.disk),
        )
        self.found = self.do(self.store.open())
        self.store.on_reclaim(self.reclaimed)
        self.store.on_rewrite(lambda tags: (tags % 3).astype(np.float32), self.moved)
        self.held.clear()
        tags = []
        for space, key, extent, total in zip(
            self.found.space, self.found.keys, self.found.extents, self.found.block_sums.tolist(), strict=True
        ):
            name, version = self.version_of(self.found.digests[space], key.tobytes(), total)
            self.held[name] = self.made[name, version], extent, version
            self.places[extent] = name, version
            tags.append(version)
        self.store.adopt(self.found.extents, np.array(tags, np.int64))
        for space in SPACES:
            self.store.register(space.digest(), space)

    def version_of(self, digest: bytes, key: bytes, total: int) -> tuple[Name, int]:
        for (name, version), block in self.made.items():
            if (block.digest, block.key, block.block_sum) == (digest, key, total):
                return name, version
        raise AssertionError("a block was recovered that was never stored")

    def reclaimed(self, told: list[tuple[int, Extent]]) -> None:
        for tag, extent in told:
            name, version = self.places[extent]
            assert tag == version
            self.may_be(name, None)
            if name in self.held and self.held[name][1] == extent:
                self.gone.append((self.held.pop(name)[0], extent))

    def moved(self, told: list[tuple[int, Extent, Extent]]) -> list[bool]:
        """Hot blocks were written again; those that are still held go along, and others must be gone for good."""
        kept = []
        for tag, old, new in told:
            name, version = self.places[old]
            assert tag == version
            assert tag % 3, "a cold block was written again"
            kept.append(name in self.held and self.held[name][1] == old and name not in self.writing)
            self.places[new] = name, version
            if kept[-1]:
                self.held[name] = self.held[name][0], new, version
        return kept

    def may_be(self, name: Name, version: int | None) -> None:
        self.possible.setdefault(name, {None}).add(version)

    @rule(names=st.lists(st.tuples(st.integers(0, 2), st.integers(0, KEYS - 1)), min_size=1, max_size=8, unique=True))
    def write(self, names: list[Name]) -> None:
        blocks = []
        for name in names:
            self.versions += 1
            block = Block(name[1], SPACES[name[0]], version=self.versions, aligned=self.versions % 2 == 0)
            block.tag = self.versions
            self.made[name, self.versions] = block
            blocks.append(block)
        self.writing = set(names)
        results = self.do(self.store.write([block.item() for block in blocks]))
        self.writing = set()
        for name, block, extent in zip(names, blocks, results, strict=True):
            assert isinstance(extent, Extent), extent
            self.held[name] = block, extent, block.tag
            self.places[extent] = name, block.tag
            self.may_be(name, block.tag)

    @rule()
    def read_all(self) -> None:
        entries = list(self.held.values())
        items = [block.fetch(extent) for block, extent, _ in entries]
        for (name, (block, _, version)), item, error in zip(
            list(self.held.items()), items, self.do(self.store.read(items)), strict=True
        ):
            if isinstance(error, CorruptionError) and (name, version) in self.doubtful:
                self.drop(name)  # it was lost with the power before any flush; nothing but an error came out
                continue
            assert error is None, error
            assert block.same(item.out)
            assert np.array_equal(item.sums, block.sums)

    def drop(self, name: Name) -> None:
        block, extent, _ = self.held.pop(name)
        self.do(self.store.delete([(block.digest, block.key, extent)]))
        self.may_be(name, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, max_size=4, unique=True))
        entries = [self.held.pop(name) for name in names]
        self.gone += [(block, extent) for block, extent, _ in entries]
        self.do(self.store.delete([(block.digest, block.key, extent) for block, extent, _ in entries]))
        for name in names:
            self.may_be(name, None)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def read_what_is_gone(self, data: st.DataObject) -> None:
        block, extent = data.draw(st.sampled_from(self.gone[-6:]))
        (error,) = self.do(self.store.read([block.fetch(extent)]))
        assert error is not None

    @rule()
    def flush(self) -> None:
        self.do(self.store.flush())
        self.settle()

    def settle(self) -> None:
        """What is held now is what a loss of power would leave."""
        self.possible = {name: {version} for name, (_, _, version) in self.held.items()}

    @rule()
    def restart(self) -> None:
        before = dict(self.held)
        self.do(self.store.close())
        self.open()
        assert self.held == before, "a clean restart changed what is stored"
        assert self.found.dropped == 0 or self.power_was_lost
        self.settle()

    @rule()
    def lose_index(self) -> None:
        """Segments alone say what is stored: nothing deleted or recycled comes back from a scan."""
        before = dict(self.held)
        self.do(self.store.close())
        self.disk.metadata = SmallFiles()
        self.open()
        assert self.held == before, "a scan found another store than the index"
        self.settle()

    @rule(seed=st.none() | st.integers(0, 1 << 30))
    def lose_power(self, seed: int | None) -> None:
        luck = random.Random(seed) if seed is not None else None
        disk = self.disk.after_power_loss(luck)
        self.do(self.store.close())  # what the old life still does goes to a disk that is thrown away
        self.disk = disk
        self.power_was_lost = True
        self.gone.clear()  # a delete that was not flushed may be undone
        self.open()
        for name in {*self.held, *self.possible}:
            version = self.held[name][2] if name in self.held else None
            assert version in self.possible.get(name, {None}), f"{name} came back as {version}"
        self.doubtful |= {
            (name, version) for name, (_, _, version) in self.held.items() if self.possible.get(name) != {version}
        }
        self.settle()

    @invariant()
    def books_are_right(self) -> None:
        stats = self.store.stats()
        assert stats["used_bytes"] <= stats["capacity_bytes"]
        assert stats["live_extents"] >= len(self.held)

    def teardown(self) -> None:
        self.do(self.store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.directory)


TestStore = StoreMachine.TestCase
TestStore.settings = hypothesis_settings(max_examples=25, stateful_step_count=30, deadline=None)
