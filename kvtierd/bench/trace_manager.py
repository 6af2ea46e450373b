"""A trace through the real tier manager, without sockets and without bytes: what the decisions cost all told.

Each request is what a client does: look up the prefix, acquire and release what is there, reserve the whole of it and
commit what was not. Blocks are of one page, nothing is written into them, and there is neither gpu nor nvme, so that
what is left is the daemon's own work on its loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

import numpy as np

from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.trace_file import Blocks, Trace
from kvtierd.bench.trace_replay import SEED
from kvtierd.bench.trace_table import MANAGER, MANAGER_LRU, OURS, Column, against_the_best
from kvtierd.bench.workload import SMALL, namespace, random_keys
from kvtierd.config.schema import Gpu, Host, KvCache, Leases, Settings
from kvtierd.core.checksum import block_sum
from kvtierd.core.clock import ManualClock
from kvtierd.core.units import MIB
from kvtierd.protocol import messages as m
from kvtierd.protocol.messages import MAX_BATCH
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.manager import TierManager

R = TypeVar("R")

CHUNK_BLOCKS_MAX = 256 * MIB // SMALL.slot_bytes
ACCESSES_MIN = 200_000
APART_MAX = 0.005
"""One request's blocks are up to some hundredths of a small tier."""
_STEPS = ("lookup", "acquire", "release", "reserve", "commit")


def chunk_blocks(blocks: int) -> int:
    """Blocks of a chunk of which a whole number makes up the tier exactly."""
    chunks = next(count for count in itertools.count(1) if blocks % count == 0 and blocks // count <= CHUNK_BLOCKS_MAX)
    return blocks // chunks


class ManagerReplay:
    """One client of one manager with a host tier of `blocks` and an eviction policy by its name in the settings."""

    def __init__(self, trace: Trace, blocks: int, eviction: Literal["returns", "lru"]) -> None:
        settings = Settings(
            kv_cache_config=KvCache(eviction=eviction),
            host=Host(
                capacity=blocks * SMALL.slot_bytes,
                chunk_bytes=chunk_blocks(blocks) * SMALL.slot_bytes,
                watermark=1.0,
            ),
            gpu=Gpu(capacity=0),
            leases=Leases(max_leases=1024),
            worker_threads=1,
            max_blocks=2 * (blocks + MAX_BATCH),
        )
        self._clock = ManualClock(1_000_000_000)
        self._manager = TierManager(settings, store=None, device=None, clock=self._clock, seed=SEED)
        self._session = Session(id=1, tenant="default", client="bench", token=bytes(16), pid=1, pidfd=0)
        self._trace = trace
        self._unique_keys = random_keys(trace.unique, 1)
        self._keys = self._unique_keys[trace.blocks]
        self._sum = block_sum(np.zeros(SMALL.layers, np.uint64))
        self._namespace = 0
        self.blocks = blocks
        self.seconds = dict.fromkeys(_STEPS, 0.0)
        """Time in each step."""
        self.total_s = 0.0
        self.hits = self.accesses = 0

    def run_to_end(self, requests: int) -> None:
        """Replay the first requests."""
        self.total_s = asyncio.run(self.run(requests))

    def kept(self) -> Blocks:
        """Which of the trace's blocks are in the tier, [n], in rising order."""
        found = self._manager.copies.blocks.pages.lookup(self._unique_keys, 0)
        return np.flatnonzero(found >= 0).astype(np.int32)

    async def run(self, requests: int) -> float:
        """Replay the first requests; seconds on the loop."""
        await self._manager.start()
        try:
            await self._manager.memory_ready()
            self._manager.session_opened(self._session)
            register = m.RegisterNamespace(id=1, namespace=namespace(SMALL))
            self._namespace = _expect(await self._call(register), m.NamespaceReply).namespace
            begin = time.perf_counter()
            for number in range(requests):
                await self._request(number)
            return time.perf_counter() - begin
        finally:
            await self._manager.close()

    async def _request(self, number: int) -> None:
        trace = self._trace
        self._clock.advance(max(0.0, (trace.time_ns[number] + 1_000_000_000 - self._clock.now_ns()) / 1e9))
        keys = self._keys[trace.starts[number] : trace.starts[number + 1]]
        self.accesses += len(keys)
        frame = keys.data.cast("B")
        looked = await self._timed("lookup", m.Lookup(id=1, namespaces=[self._namespace]), frame)
        hit = _expect(looked, m.LookupReply).hit
        self.hits += hit
        if hit:
            acquired = await self._timed("acquire", m.Acquire(id=1, namespace=self._namespace), frame)
            await self._timed("release", m.Release(id=1, leases=[_expect(acquired, m.AcquireReply).lease]))
        reserved = await self._timed("reserve", m.Reserve(id=1, namespace=self._namespace), frame)
        reply = _expect(reserved, m.ReserveReply)
        if reply.granted:
            sums = np.zeros((reply.granted, SMALL.layers), np.uint64).data.cast("B")
            totals = np.full(reply.granted, self._sum, np.uint64).data.cast("B")
            await self._timed("commit", m.Commit(id=1, reservation=reply.reservation), sums, totals)

    async def _timed(self, step: str, request: m.AnyRequest, *frames: memoryview) -> Answer:
        begin = time.perf_counter()
        answer = await self._call(request, *frames)
        self.seconds[step] += time.perf_counter() - begin
        return answer

    async def _call(self, request: m.AnyRequest, *frames: memoryview) -> Answer:
        answer = self._manager.handle(self._session, request, frames)
        return answer if isinstance(answer, Answer) else await answer


def _expect(answer: Answer, kind: type[R]) -> R:
    if not isinstance(answer.reply, kind):
        raise BenchError(f"the manager answered {answer.reply} where {kind.__name__} was due")
    return answer.reply


def through_the_manager(trace: Trace, columns: Sequence[Column]) -> list[ManagerReplay]:
    """Replay with LRU and with our default at each capacity, and add both to the columns; the latter are returned."""
    replays = []
    for column in columns:
        lru, ours = ManagerReplay(trace, column.capacity, "lru"), ManagerReplay(trace, column.capacity, "returns")
        for name, replay in ((MANAGER_LRU, lru), (MANAGER, ours)):
            replay.run_to_end(trace.requests)
            column.ratios[name] = replay.hits / trace.accesses
        replays.append(ours)
    return replays


def manager_rows(trace: Trace, columns: Sequence[Column], replays: Sequence[ManagerReplay]) -> Iterator[Row]:
    """What ours hits in the tiers, against the references and against the simulator; speed, and where the time goes.

    The simulator lets blocks of the request that just came go at once; tiers have to make room for them first.
    """
    name = f"{trace.name}: through the manager"
    yield from against_the_best(name, columns, MANAGER)
    apart = max(abs(column.ratios[MANAGER] - column.ratios[OURS]) for column in columns)
    yield make_row("trace", f"{name}, most apart from the simulator", apart, "", goal=f"<= {APART_MAX}")
    middle = replays[len(replays) // 2]
    yield make_row(
        "trace", f"{name}, {middle.blocks:,} blocks: block accesses", middle.accesses / middle.total_s, "/s",
        goal=f">= {ACCESSES_MIN}",
    )  # fmt: skip
    for step, spent in middle.seconds.items():
        yield make_row("trace", f"{name}, time in {step}", spent / middle.accesses * 1e9, "ns a block")
