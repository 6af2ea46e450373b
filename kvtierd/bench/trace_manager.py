"""A trace through the real tier manager, without sockets and without bytes: what the decisions cost all told.

Each request is what a client does: look up the prefix, acquire and release what is there, reserve the whole of it and
commit what was not. Blocks are of one page, nothing is written into them, and there is neither gpu nor nvme, so that
what is left is the daemon's own work on its loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Literal, TypeVar

import numpy as np

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.trace_file import Trace
from kvtierd.bench.trace_queues import lru_hits
from kvtierd.bench.trace_replay import SEED
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

HOST_BLOCKS = 10_000
CHUNK_BLOCKS_MAX = 256 * MIB // SMALL.slot_bytes
ACCESSES_MIN = 200_000
QUICK_REQUESTS = 2_000
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
        self._keys = random_keys(trace.unique, 1)[trace.blocks]
        self._sum = block_sum(np.zeros(SMALL.layers, np.uint64))
        self._namespace = 0
        self.seconds = dict.fromkeys(_STEPS, 0.0)
        """Time in each step."""
        self.hits = 0

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


def manager_rows(options: Options, trace: Trace) -> Iterator[Row]:
    """Speed, where the time goes, and what it hit against LRU of the same size."""
    requests = min(trace.requests, options.rounds(trace.requests, QUICK_REQUESTS))
    replay = ManagerReplay(trace, HOST_BLOCKS, "lru")
    seconds = asyncio.run(replay.run(requests))
    accesses = int(trace.starts[requests])
    name = f"{trace.name}: through the manager"
    yield make_row("trace", f"{name}, block accesses", accesses / seconds, "/s", goal=f">= {ACCESSES_MIN}")
    for step, spent in replay.seconds.items():
        yield make_row("trace", f"{name}, time in {step}", spent / accesses * 1e9, "ns a block")
    expected = lru_hits(trace.blocks[:accesses], trace.starts[: requests + 1], trace.unique, HOST_BLOCKS) / accesses
    yield make_row(
        "trace", f"{name}, prefix-hit ratio", replay.hits / accesses, "",
        reference=expected or None, reference_name=f"LRU of {HOST_BLOCKS:,} blocks",
    )  # fmt: skip
