"""The tier manager: the one owner of blocks, slots, leases and moves, and the service behind the server.

Everything here runs on one asyncio loop, so there are no locks. Requests come in through `handle`, time through the
ticker, and the ends of moves as tasks of the loop; bytes move in worker threads and in the store's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvtierd.config.schema import Settings
from kvtierd.core.clock import Clock
from kvtierd.core.progress import Progress
from kvtierd.gpu import Device
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Answer, ChunkFiles, Session
from kvtierd.storage.interface import BlockStore
from kvtierd.tiers.admin import Admin, pinned_max
from kvtierd.tiers.attend import Attention
from kvtierd.tiers.blocks import Blocks
from kvtierd.tiers.compress import Compressor
from kvtierd.tiers.copies import Copies, Events
from kvtierd.tiers.demand import Demand
from kvtierd.tiers.expiry import Expiry
from kvtierd.tiers.gpu_tier import GpuTier
from kvtierd.tiers.lookups import Lookups
from kvtierd.tiers.offload import Offload
from kvtierd.tiers.on_disk import OnDisk
from kvtierd.tiers.onboard import Onboarder
from kvtierd.tiers.operator import Operator
from kvtierd.tiers.part_reads import PartReads
from kvtierd.tiers.pressure import Pressure
from kvtierd.tiers.quick import Quick
from kvtierd.tiers.quotas import Quotas
from kvtierd.tiers.reads import Reads
from kvtierd.tiers.registration import Registration
from kvtierd.tiers.reshape import Reshaper
from kvtierd.tiers.room import Room
from kvtierd.tiers.sequences import Sequences
from kvtierd.tiers.sessions import SessionState
from kvtierd.tiers.shaping import Shaping
from kvtierd.tiers.speeds import Speeds, probe_copy
from kvtierd.tiers.usage import Uses
from kvtierd.tiers.victims import model_for, policy_for
from kvtierd.tiers.warm import begin, host_tier
from kvtierd.tiers.warm_host import Kept
from kvtierd.tiers.workers import Workers
from kvtierd.tiers.write_behind import WriteBehind
from kvtierd.tiers.write_patience import Patience
from kvtierd.tiers.writes import Writes

Handler = Callable[[Session, Any, Sequence[memoryview]], Answer | Awaitable[Answer]]

_log = logging.getLogger(__name__)

TICK_S = 0.05
"""How often leases are checked for their end and tiers for their watermarks."""

ONBOARDS_INFLIGHT_MAX = 4096
"""Blocks on their way into host at once; beyond it a request gets what it can."""


class TierManager:
    """Blocks in three tiers. `store` is None without an nvme tier, `device` None without a gpu tier.

    `seed` is secret and random unless a replay gives one: with it the same requests have the same effects. With `kept`
    the host tier begins with what the life before left, and is left for the next one.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        store: BlockStore | None,
        device: Device | None,
        clock: Clock,
        events: Events | None = None,
        seed: int | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._store = store
        self._workers = Workers(settings.worker_threads)
        secret = secrets.randbits(62) if seed is None else seed
        model = model_for(settings, secret)
        host = host_tier(settings.host, policy_for(settings.host.capacity, model), kept)
        slab = min(settings.host.chunk_bytes, device.capacity_bytes if device else 0)
        gpu = GpuTier(device, slab, policy_for(device.capacity_bytes, model)) if device and slab else None
        self.copies = Copies(Blocks(settings.max_blocks), host, gpu, events, clock)
        self._warm = begin(self.copies, kept, self._workers)
        capacities = {"host": settings.host.capacity, "gpu": device.capacity_bytes if device else 0}
        self._demand = Demand(self.copies, capacities, settings.kv_cache_config.heat_half_life_s, clock, secret)
        self._room = Room(
            self.copies,
            self._workers,
            Pressure(self.copies.blocks, host, clock, self.copies.counters, secret),
            self._demand,
            host_mark=settings.host.watermark,
            gpu_mark=settings.kv_cache_config.gpu_watermark,
        )
        self._compressor = Compressor(self._room, self._workers, self._demand, settings, clock)
        self._write_behind: WriteBehind | None = None
        self._offload: Offload | None = None
        if store is not None:
            # Queued blocks are held in host: were the queue as large as the tier, a slow disk would stop all stores.
            limit = min(settings.nvme.write_queue_bytes, settings.host.capacity // 2)
            patience = Patience(settings.host.capacity // 4, clock, self.copies.counters)
            self._write_behind = WriteBehind(self.copies, store, limit, clock, patience)
            self._write_behind.compressor = self._compressor
            self._offload = Offload(self.copies, self._write_behind, settings.nvme, settings.max_blocks, clock, secret)
            self.on_disk = OnDisk(self.copies, store, self._demand, self._offload)
        self._speeds = Speeds(clock)
        self._onboarder = Onboarder(self._room, store, self._workers, self._speeds, ONBOARDS_INFLIGHT_MAX)
        self._onboarder.verifier = self._warm.verifier
        uses = Uses(self.copies, model, clock)
        self.quick = Quick(self._room, self._demand, clock)
        self._lookups = Lookups(self.copies, self.quick, self._speeds)
        self._reads = Reads(
            settings,
            self._room,
            self._onboarder,
            self._workers,
            clock,
            demand=self._demand,
            offload=self._offload,
            speeds=self._speeds,
            uses=uses,
            quick=self.quick,
        )
        self._writes = Writes(
            settings, self._room, self._workers, clock, demand=self._demand, offload=self._offload, uses=uses,
            quick=self.quick,
        )  # fmt: skip
        self._parts = PartReads(self._room, self._onboarder, self._reads, self._demand, clock)
        self._reshaper = Reshaper(self._room, self._onboarder, self._workers)
        self._shaping = Shaping(self.copies, self._reshaper)
        self._sequences = Sequences(settings, self.copies, self._demand, clock)
        self._attention = Attention(settings, self._room, self._sequences, store, self._workers, clock)
        self._admin = Admin(self.copies, self._onboarder, self._write_behind, pinned_max(settings))
        self.expiry = Expiry(self.copies, clock, self._admin.forget, settings.kv_cache_config.ttl_s)
        self.operator = Operator(self.copies, self._admin, self.expiry)
        held = self._reads.leases, self._writes.reservations, self._sequences.open
        self.quotas = Quotas(settings, self.copies, self._room, self._write_behind, self._admin.forget, held)
        self._ticker: asyncio.Task[None] | None = None
        self.reports: list[Callable[[], Mapping[str, Any]]] = []
        self._handlers = self._table()

    async def start(self, *, ticking: bool = True) -> None:
        """Recover the nvme tier, then serve. The host tier gets its memory in the background.

        Without `ticking` whoever started it calls `tick`: for tests that want to know when.
        """
        if self._store is not None:
            self.on_disk.recover(await self._store.open())
            capacity = self._store.stats().get("capacity_bytes", self.settings.nvme.capacity)
            self._demand.add_tier("nvme", int(capacity))
            self.quick.tiers_changed()
        self._warm.recover(self._store, self._clock.now_ns())
        self._speeds.host.note(*await self._workers.run(probe_copy))
        if self._write_behind is not None:
            self._write_behind.start()
        self._warm.start(self._offload, self.operator)
        self._room.grow()
        # With a first chunk there, clients that come back after a restart are served and not turned away.
        await self._room.next_chunk()
        if ticking:
            self._ticker = asyncio.create_task(self._tick(), name="tier-ticker")

    def on_chunk_gone(self, callback: Callable[[int], None]) -> None:
        """Set who is told the number of a chunk that leaves the arena."""
        self._room.chunk_gone = callback

    async def failed(self) -> BaseException:
        """Return the bug that stopped the ticker or the write-behind: without them the process must not go on."""
        vital = [self._ticker, self._write_behind.running if self._write_behind else None]
        tasks = [task for task in vital if task is not None]
        assert tasks, "start comes first"
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().exception() or AssertionError("a task that never ends has ended")

    async def memory_ready(self) -> None:
        """Wait until the host tier has its memory, or could not get it."""
        await self._room.grown()

    def apply(self, settings: Settings) -> None:
        """Take over those settings that may change while the daemon runs (`reload` in kvtierd.config.schema)."""
        self.settings = settings
        self._room.marks = {"host": settings.host.watermark, "gpu": settings.kv_cache_config.gpu_watermark}
        self._reads.apply(settings)
        self._writes.apply(settings)
        self._attention.apply(settings)
        self._admin.pinned_bytes_max = pinned_max(settings)
        self.expiry.apply(settings.kv_cache_config.ttl_s)
        self.quotas.apply(settings)

    @property
    def progress(self) -> Progress:
        """Of the threads that copy and hash."""
        return self._workers.progress

    @property
    def backlog_bytes(self) -> int:
        """Bytes of blocks that are not on disk yet."""
        return self._write_behind.backlog_bytes if self._write_behind else 0

    def take_stores(self, *, yes: bool) -> None:
        """Take stores, or answer each with `shutting_down`."""
        self._writes.take_stores(yes=yes)

    async def drain(self) -> None:
        """Take no more stores and bring the dirty backlog to disk. Raises StorageError when that fails."""
        self.take_stores(yes=False)
        if self._write_behind is not None:
            await self._write_behind.flush()

    async def close(self) -> None:
        """Stop; what is not on disk by now is lost."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._room.close()
        await self._warm.close()
        await self._shaping.close()
        await self._compressor.close()
        await self._reads.prefetcher.close()
        await self._onboarder.close()
        await self._attention.close()
        if self._write_behind is not None:
            await self._write_behind.close()
        if self._store is not None:
            await self._store.close()
        await self._room.pinning.close()
        self._workers.close()
        self.copies.close()

    def handle(
        self, session: Session, request: m.AnyRequest, frames: Sequence[memoryview]
    ) -> Answer | Awaitable[Answer]:
        """Serve one request (protocol.service.Service)."""
        return self._handlers[type(request)](session, request, frames)

    def session_opened(self, session: Session) -> None:
        """A client said Hello."""
        session.state = SessionState()
        session.quota = self.quotas.requests_of(session.tenant)

    def session_detached(self, session: Session) -> None:
        """A client's sockets are gone: its leases and pins end, its reservations are quarantined."""
        self._reads.session_ended(session)
        self._sequences.session_ended(session)
        self._room.pinning.client_gone(session)
        self._admin.session_ended(session)
        session.quarantined = self._writes.session_detached(session)
        if not session.quarantined:
            self._warm.writer_gone(session)

    def process_gone(self, session: Session) -> None:
        """A client's process has ended: everything of it is free again."""
        self.session_detached(session)
        self._writes.process_gone(session)
        self._warm.writer_gone(session)

    def chunk_files(self, session: Session, chunk: int) -> ChunkFiles | None:
        """Descriptors of a chunk of the session's tenant (protocol.service.ChunkSource)."""
        return self.copies.host.chunk_files(chunk, session.tenant)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges by name; `reports` adds those of parts that the manager does not know."""
        copies = self.copies
        gauges: dict[str, Any] = {
            "host_capacity_bytes": self.settings.host.capacity,
            "host_ready_bytes": (copies.host.slabs_max - len(copies.host.missing)) * copies.host.chunk_bytes,
            "host_used_bytes": copies.host.used_bytes(),
            "gpu_device": copies.gpu.device.name if copies.gpu else "none",
            "gpu_capacity_bytes": copies.gpu.device.capacity_bytes if copies.gpu else 0,
            "gpu_used_bytes": copies.gpu.used_bytes() if copies.gpu else 0,
            "leases": len(self._reads.leases.items),
            "reservations": len(self._writes.reservations.items),
            "quarantined_reservations": sum(r.quarantined for r in self._writes.reservations.items.values()),
            "pinned_bytes": self._admin.pinned_bytes,
            "namespaces": len(copies.namespaces),
            "write_queue_bytes": self._write_behind.waiting_bytes if self._write_behind else 0,
            "memory_error": self._room.memory_error,
            "write_budget_bytes": self._offload.level_bytes() if self._offload else 0,
            **self._room.pressure.stats(),
            **self._demand.stats(self.settings.kv_cache_config.compression.threshold),
            **self._speeds.stats(),
            **self._attention.stats(),
            **{f"index_{name}": value for name, value in copies.blocks.pages.stats().items()},
        }
        store = {f"nvme_{name}": value for name, value in self._store.stats().items()} if self._store else {}
        more = {name: value for report in self.reports for name, value in report().items()}
        gauges |= copies.shapes.stats() | copies.blocks.long.stats() | self._warm.stats() | self._compressor.stats()
        # Counters first: what parts count by themselves (hops, attention) is there as a 0 among them.
        return {**copies.counters, **gauges, **copies.tier_counts(), **store, **more}

    def _table(self) -> dict[type, Handler]:
        """Who serves what."""
        return {
            m.RegisterNamespace: Registration(
                self.copies, self.settings.host.chunk_bytes, self._store, self._write_behind
            ).register,
            m.Lookup: self._lookups.lookup,
            m.Acquire: self._reads.acquire,
            m.AcquirePart: self._parts.acquire,
            m.Release: self._reads.release,
            m.Get: self._reads.get,
            m.Prefetch: self._reads.prefetch,
            m.Reserve: self._writes.reserve,
            m.Commit: self._writes.commit,
            m.Abort: self._warm.aborts(self._writes.abort),
            m.Put: self._writes.put,
            m.Pin: self._admin.pin,
            m.Unpin: self._admin.unpin,
            m.Delete: self._admin.delete,
            m.Reshape: self._reshaper.reshape,
            m.Purge: self._admin.purge,
            m.Flush: self._admin.flush,
            m.OpenSequence: self._sequences.open_sequence,
            m.Extend: self._sequences.extend,
            m.Attend: self._attention.attend,
            m.CloseSequence: self._sequences.close_sequence,
            m.Stats: lambda session, *_: self.quotas.stats(session, self.stats),
        }

    def tick(self) -> None:
        """What time brings: the end of leases, watermarks, extents of other sizes."""
        now_ns = self._clock.now_ns()
        self._reads.expire(now_ns)
        self._writes.expire(now_ns)
        self._sequences.expire(now_ns)
        self._room.keep_watermarks()
        self._shaping.step(now_ns)
        self._compressor.step()
        self.expiry.step()
        self.quotas.step()
        self._warm.step(now_ns)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()
