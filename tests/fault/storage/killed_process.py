"""A process that stores, reads, deletes and flushes until somebody kills it, and says what it was promised.

Each line on standard output is one fact, written before anything else happens: `flushed N…` these blocks are durable,
`deleted N…` these deletes are, `begun N…` these may be found from now on, `doomed N…` these may be gone from now on. On
standard input it is given the numbers that it may find.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import numpy as np

from kvtierd.core.clock import SystemClock
from kvtierd.core.units import KIB
from kvtierd.storage import Extent, Recovered, SegmentStore
from kvtierd.storage.interface import Extents
from tests.unit.storage.blocks import Block, by_key, settings

FIELDS = {"capacity": 3 << 20, "segment_bytes": 256 * KIB, "io_threads": 3}


def say(what: str, numbers: list[int]) -> None:
    """One write: a line is whole or not there."""
    os.write(1, f"{what} {' '.join(map(str, numbers))}\n".encode())


class Load:
    """Mixed load from a seed. `held` is what is stored, `flushed` what a flush has covered."""

    def __init__(self, store: SegmentStore, seed: int, first: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.next = first
        self.held: dict[int, Extent] = {}
        store.on_reclaim(self.gone)
        store.on_rewrite(lambda tags: (tags % 5 == 0).astype(np.float32), self.moved)

    def gone(self, told: list[tuple[int, Extent]]) -> None:
        say("doomed", [tag for tag, _ in told])
        for tag, extent in told:
            if self.held.get(tag) == extent:
                del self.held[tag]

    def moved(self, told: list[tuple[int, Extent, Extent]]) -> list[bool]:
        kept = [self.held.get(tag) == old for tag, old, _ in told]
        self.held.update({tag: new for (tag, _, new), same in zip(told, kept, strict=True) if same})
        return kept

    def take_over(self, found: Recovered, numbers: list[int]) -> None:
        """Adopt what was recovered; `numbers` are all that may be there."""
        held = by_key(found)
        for number in numbers:
            block = Block(number)
            if (extent := held.get(block.digest + block.key)) is not None:
                self.held[number] = extent
        assert len(self.held) == len(found.extents), "something was recovered that was never stored"
        extents = Extents.of(list(self.held.values()))
        self.store.adopt(extents, np.array(list(self.held), np.int64))

    async def write(self) -> None:
        numbers = list(range(self.next, self.next + self.rng.randrange(1, 9)))
        self.next = numbers[-1] + 1
        say("begun", numbers)
        for number, place in zip(numbers, await self.store.write([Block(n).item() for n in numbers]), strict=True):
            if isinstance(place, Extent):
                self.held[number] = place

    async def read(self) -> None:
        if self.held:
            number = self.rng.choice(list(self.held))
            block, extent = Block(number), self.held[number]
            item = block.fetch(extent)
            (error,) = await self.store.read([item])
            assert error is not None or block.same(item.out), "wrong bytes"

    async def delete(self) -> None:
        numbers = self.rng.sample(list(self.held), min(2, len(self.held)))
        say("doomed", numbers)
        entries = [(Block(n).digest, Block(n).key, self.held.pop(n)) for n in numbers]
        await self.store.delete(entries)
        await self.store.flush()
        say("deleted", numbers)

    async def flush(self) -> None:
        covered = list(self.held)
        await self.store.flush()
        say("flushed", [number for number in covered if number in self.held])

    async def run(self) -> None:
        while True:
            work = self.rng.choices((self.write, self.read, self.delete, self.flush), (6, 3, 1, 2))[0]
            await work()


async def main() -> None:
    directory, seed, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = SegmentStore(settings(directory, **FIELDS), clock=SystemClock())
    found = await store.open()
    space = Block(0).space
    store.register(space.digest(), space)
    load = Load(store, seed, first)
    load.take_over(found, [int(number) for number in sys.stdin.read().split()])
    say("open", [len(found.extents)])
    await load.run()


if __name__ == "__main__":
    asyncio.run(main())
