"""Every call to the disk fails in turn, in every way, under a whole tier manager: wrong bytes never, a miss at worst.

A scenario stores prefixes, flushes, drops host, reads back, attends, deletes, fills the store until segments are
recycled, and ends. It runs once for each call that it makes and each kind of fault; afterwards power is lost on a model
of a disk that keeps just what was synced, and another life is asked for everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtierd.config.schema import Nvme
from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import RequestError, StartupError, StorageError
from kvtierd.core.units import KIB, MIB
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Session
from kvtierd.storage import SegmentStore
from kvtierd.testing.faulty_io import FAULTS, Call, Fault, FaultyIo, fail_call
from kvtierd.testing.memory_disk import MemoryDisk, MemoryIo
from kvtierd.testing.rig import SHAPE, Rig, make_keys, pattern, small_settings
from tests.torture.parts import Part, Unit

PROMPTS, LENGTH = 8, 4
STORE: dict[str, Any] = {
    "capacity": 600 * KIB,
    "segment_bytes": 100 * KIB,
    "io_threads": 1,
    "write_queue_bytes": MIB,
    "scrub_rate": 0,
}


@dataclasses.dataclass
class Told:
    """What the manager has said: blocks that are durable, and those that are deleted for good, by prompt."""

    durable: set[int] = dataclasses.field(default_factory=set)
    deleted: set[int] = dataclasses.field(default_factory=set)
    findings: list[str] = dataclasses.field(default_factory=list)
    lost: MemoryDisk = dataclasses.field(default_factory=MemoryDisk)
    """What the disk holds after power was lost."""


class Life:
    """One life of a manager over a disk, with a client."""

    def __init__(self, rig: Rig, session: Session, namespace: int, disk: MemoryDisk, told: Told) -> None:
        self.rig, self.session, self.namespace, self.disk, self.told = rig, session, namespace, disk, told

    async def ask(self, request: m.AnyRequest, *frames: bytes) -> bool:
        """Whether a request was done; a typed refusal is an answer."""
        try:
            await self.rig.call(self.session, request, *frames)
        except RequestError:
            return False
        return True

    async def flushed(self) -> bool:
        """Whether a flush held; what was lost before it is counted, and no promise."""
        return await self.ask(m.Flush(id=1))

    def present(self) -> set[int]:
        """Prompts that are whole on disk, as the manager sees it."""
        copies = self.rig.manager.copies
        found = set()
        for prompt in range(PROMPTS):
            rows = copies.blocks.find(make_keys(LENGTH, start=prompt), 0)
            if rows.size == LENGTH and (copies.blocks.table.flags[rows] & m.TIER_NVME).all():
                found.add(prompt)
        return found

    async def read(self, where: str) -> set[int]:
        """Read every prompt; bytes that are served must be right. Which prompts were served whole."""
        whole = set()
        for prompt in range(PROMPTS):
            keys = make_keys(LENGTH, start=prompt)
            try:
                reply, slots = await self.rig.acquire(self.session, self.namespace, keys)
            except RequestError:
                continue
            for number in range(reply.count):
                if not np.array_equal(self.rig.read(slots[number]), pattern(keys[number], SHAPE)):
                    self.told.findings.append(f"{where}: prompt {prompt} block {number} was served with other bytes")
            if reply.count == LENGTH:
                whole.add(prompt)
            if reply.lease:
                await self.rig.release(self.session, reply)
        return whole

    async def drop_host(self) -> None:
        """Let host keep only what is nowhere else."""
        await self.ask(m.Purge(id=1, namespace=self.namespace, tiers=["host", "gpu"]))

    async def story(self, luck: random.Random) -> None:
        """What the scenario does."""
        for prompt in range(4):
            await self.rig.store(self.session, self.namespace, make_keys(LENGTH, start=prompt))
        await self.flushed()
        await self.drop_host()
        await self.read("after a flush")
        keys = make_keys(LENGTH, start=1).tobytes()
        if await self.ask(m.Delete(id=1, namespace=self.namespace), keys) and await self.flushed():
            self.told.deleted.add(1)
        for prompt in range(4, PROMPTS):
            await self.rig.store(self.session, self.namespace, make_keys(LENGTH, start=prompt))
        await self.flushed()
        await self.drop_host()
        await self.read("of a full store")
        held = await self.flushed()
        # Power is lost here: to end in good order would write what reading has queued, and recycle for it.
        self.told.lost = self.disk.after_power_loss(luck)
        self.told.durable = self.present() if held else set()


async def one_life(folder: Path, disk: MemoryDisk, io: FaultyIo, told: Told, luck: random.Random | None) -> None:
    """A life that goes through the scenario, with the luck of its power loss, or one that only reads.

    A start that is refused is tried once more, without faults.
    """
    settings = small_settings()
    settings = msgspec.structs.replace(settings, nvme=Nvme(**STORE, directory=str(folder)))
    rig = Rig(settings, SegmentStore(settings.nvme, clock=ManualClock(), io=io), seed=1)
    try:
        await rig.manager.start()
    except StartupError:
        io.plan = None
        rig = Rig(settings, SegmentStore(settings.nvme, clock=ManualClock(), io=MemoryIo(disk)), seed=1)
        await rig.manager.start()
    await rig.settled()
    session = rig.session()
    life = Life(rig, session, await rig.register(session), disk, told)
    try:
        if luck is not None:
            await life.story(luck)
        else:
            found = await life.read("after power was lost")
            if lost := told.durable - found:
                told.findings.append(f"flushed prompts are not whole after power was lost: {sorted(lost)}")
            for prompt in told.deleted:
                if await rig.lookup(session, life.namespace, make_keys(LENGTH, start=prompt)):
                    told.findings.append(f"deleted prompt {prompt} came back after power was lost")
        rig.check_accounts()
        if rig.manager.copies.host.pool.holds.any():
            told.findings.append("a slot is held for ever")
    finally:
        with contextlib.suppress(StorageError):  # a close that fails takes back no promise
            await rig.manager.close()


def one_fault(folder: Path, number: int, fault: Fault, seed: int) -> list[str]:
    """Findings of one call that goes wrong in one way."""
    disk, told = MemoryDisk(), Told()
    io = FaultyIo(MemoryIo(disk), fail_call(number, fault))

    async def both() -> None:
        async with asyncio.timeout(60):
            await one_life(folder, disk, io, told, random.Random(seed + number))
            await one_life(folder, told.lost, FaultyIo(MemoryIo(told.lost)), told, None)

    try:
        asyncio.run(both())
    except Exception as error:  # noqa: BLE001 - it belongs to this call, and the others are still to come
        told.findings.append(f"{type(error).__name__}: {error}")
    call = io.calls[number] if number < len(io.calls) else None
    return [f"call {number} ({_named(call)}): {finding}" for finding in told.findings]


def _named(call: Call | None) -> str:
    return f"{call.operation} {call.name}" if call else "not reached"


def count_calls(folder: Path) -> int:
    """How many calls the scenario makes when nothing goes wrong, which nothing then may."""
    disk, told = MemoryDisk(), Told()
    io = FaultyIo(MemoryIo(disk))
    asyncio.run(one_life(folder, disk, io, told, random.Random(0)))
    if told.findings or not told.durable or not told.deleted:
        raise AssertionError(f"the scenario fails by itself: {told}")
    return len(io.calls)


def run(unit: Unit) -> Iterator[str]:
    """Fail calls: unit i of kind i, as many calls as it is given, spread over the scenario (0 or all: every one)."""
    name, fault = list(FAULTS.items())[unit.number % len(FAULTS)]
    calls = count_calls(unit.folder)
    chosen: Any = range(calls)
    if unit.amount < calls:
        chosen = sorted(random.Random(unit.seed).sample(chosen, unit.amount))
    for number in chosen:
        yield from (f"{name}: {finding}" for finding in one_fault(unit.folder, number, fault, unit.seed))


EVERY = 1000
"""Calls of one kind of fault that a unit may make fail: more than the scenario has."""
PART = Part("faults", "failing calls at most", len(FAULTS) * EVERY, 7, EVERY, run)
