"""Lookup, Acquire, Release, Get and Prefetch."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Leases, Settings
from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.keys import Keys
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.protocol.messages import (
    MAX_BATCH,
    Acquire,
    AcquireReply,
    CountReply,
    Get,
    GetReply,
    OkReply,
    Prefetch,
    Release,
)
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.demand import Demand
from kvtierd.tiers.host_tier import empty_descriptors
from kvtierd.tiers.leases import Lease, Register
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.offload import Offload
from kvtierd.tiers.onboard import Onboarder
from kvtierd.tiers.prefetch import Prefetcher, Wish, wish_for
from kvtierd.tiers.quick import Held, Quick, Want
from kvtierd.tiers.room import Room
from kvtierd.tiers.sessions import keys_of, namespace_of, need_arena, need_frames, parent_of
from kvtierd.tiers.speeds import Speeds
from kvtierd.tiers.usage import Uses
from kvtierd.tiers.verify import copy_whole, whole_blocks
from kvtierd.tiers.workers import Workers

Frames = Sequence[memoryview]
Masks = npt.NDArray[np.uint8]


class Reads:
    """Serves what does not change a block's contents."""

    def __init__(
        self,
        settings: Settings,
        room: Room,
        onboarder: Onboarder,
        workers: Workers,
        clock: Clock,
        *,
        demand: Demand,
        offload: Offload | None,
        speeds: Speeds,
        uses: Uses,
        quick: Quick,
    ) -> None:
        self._uses = uses
        self._quick = quick
        self._demand = demand
        self._offload = offload
        self._speeds = speeds
        self._room = room
        self._copies = room.copies
        self._onboarder = onboarder
        self._workers = workers
        self._clock = clock
        self._limits: Leases
        self._message_bytes = settings.server.max_message_bytes
        self.leases: Register[Lease] = Register(settings.leases.max_leases)
        self.prefetcher = Prefetcher(room.copies, onboarder, settings.kv_cache_config.prefetch_window)
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take over what may change while the daemon runs."""
        self._limits = settings.leases
        self.prefetcher.window = settings.kv_cache_config.prefetch_window

    def acquire(self, session: Session, request: Acquire, frames: Frames) -> Answer | Awaitable[Answer]:
        """Lease the leading run in host slots; at once where all of it is there."""
        need_arena(session)
        need_frames(frames, 1)
        if request.ttl_ms < 0:
            raise RequestError(ErrorCode.BAD_ARGUMENT, f"ttl_ms is {request.ttl_ms}; 0 asks for the default")
        entry = namespace_of(session, request.namespace)
        keys, parent = keys_of(frames[0]), parent_of(request.parent)
        cls = self._copies.host_class(entry)
        if not request.verify:
            want = Want(session, entry, cls, keys, parent)
            held = self._quick.acquire(want, self.prefetcher.window)
            if held is not None:
                return self._lend_held(want, request, held)
        rows = self._copies.blocks.find_prefix(keys, entry.number)
        if not rows.size:
            return Answer(AcquireReply(id=0, lease=0, count=0), [b"", b""])
        sources = self._copies.blocks.residency(rows)
        slots = self._copies.blocks.table.host_slot[rows]
        if request.verify or (slots < 0).any() or self._copies.host.unproven(slots):
            return self._acquire_slowly(session, request, entry, keys, parent)
        self._copies.host.pool.hold(slots)
        self._uses.read(session, entry, keys, rows, slots, parent)
        self._used(entry, cls, rows, sources, parent)
        self._copied(cls, slots)
        self.prefetcher.follow(session, entry, rows)
        return self._grant(session, request, cls, slots, sources)

    def release(self, session: Session, request: Release, frames: Frames) -> Answer:
        """End leases; every id must be this session's."""
        need_frames(frames, 0)
        leases = [self._lease(session, number) for number in dict.fromkeys(request.leases)]
        for lease in leases:
            self.end(lease)
        return Answer(OkReply(id=0))

    async def get(self, session: Session, request: Get, frames: Frames) -> Answer:
        """Copy the leading run into frames, verified on the way."""
        need_frames(frames, 1)
        entry = namespace_of(session, request.namespace)
        shape = entry.geometry
        cls = self._copies.host_class(entry)
        limit = max(1, self._message_bytes // shape.block_bytes)
        keys, parent = keys_of(frames[0]), parent_of(request.parent)
        rows, sources, slots = await self._hold(entry, keys, limit, parent)
        self._uses.read(session, entry, keys, rows, slots, parent)
        good = 0
        self._speeds.host.begin()
        try:
            sums, codecs = self._copies.host.sums_of(cls, slots), self._copies.shapes.forms.codecs_in(slots)
            payload = np.empty((slots.size, shape.block_bytes), np.uint8)
            good = await self._workers.run(lambda: copy_whole(self._copies.host, cls, slots, sums, shape, payload))
        finally:
            self._speeds.host.end(good * shape.block_bytes)
            self._copies.host.release(cls, slots)
        self._drop_bad(entry, rows, slots, good)
        frames_out = [sums[:good].tobytes(), *(payload[i].data for i in range(good))]
        # The payload is this answer's own and never changes: ZeroMQ may send it from where it lies.
        reply = GetReply(id=0, count=good, tiers=sources[:good].tobytes(), codecs=codecs[:good])
        return Answer(reply, frames_out, on_sent=lambda: None)

    def prefetch(self, session: Session, request: Prefetch, frames: Frames) -> Answer | Awaitable[Answer]:
        """Bring the leading run towards a tier, in the background unless the client waits."""
        need_frames(frames, 1)
        entry, keys = namespace_of(session, request.namespace), keys_of(frames[0])
        if request.tier == "nvme":
            raise RequestError(
                ErrorCode.BAD_ARGUMENT, "prefetch towards nvme: blocks go there by themselves; use flush"
            )
        if request.tier == "gpu" and self._copies.gpu is None:
            raise RequestError(ErrorCode.UNAVAILABLE, "there is no gpu tier: gpu.capacity is 0")
        to_gpu = request.tier == "gpu"
        work = functools.partial(self._to_gpu if to_gpu else self.prefetcher.to_host, entry)
        if request.wait:
            return self._bring(session, entry, keys, work)
        rows = self._copies.blocks.find_prefix(keys, entry.number)
        self.prefetcher.start(wish_for(session, rows), work)
        return Answer(CountReply(id=0, count=rows.size))

    def lend(self, session: Session, ttl_ms: int, groups: list[tuple[SlotClass, Slots]]) -> tuple[Lease, int]:
        """Make a lease of held slots, by class, and say how long it lasts; where there can be none the holds end."""
        lease_id = self.leases.next_id(session.id, session.tenant)
        if lease_id is None:
            for cls, slots in groups:
                self._copies.host.release(cls, slots)
            message = f"too many leases are out ({self.leases.limits()}); release some"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=100)
        ttl_ms = min(ttl_ms or self._limits.ttl_ms, self._limits.max_ttl_ms)
        expires_ns = self._clock.now_ns() + ttl_ms * 1_000_000
        lease = Lease(lease_id, session.id, *groups[0], expires_ns, tuple(groups[1:]))
        self.leases.add(lease)
        if (leased := self._copies.host.leased) is not None:
            for cls, slots in groups:
                leased.begin(cls, slots)
        return lease, ttl_ms

    def share(self, cls: SlotClass, slots: Slots) -> Slots:
        """The leading ones of held slots that their tenant may lease; holds of the others end. RequestError `busy`
        where it may lease none."""
        leased = self._copies.host.leased
        if leased is None or (count := leased.fitting(cls, slots)) == slots.size:
            return slots
        leased.refused[cls.tenant] += 1
        self._copies.host.release(cls, slots[count:])
        if not count:
            raise leased.refusal(cls.tenant)
        return slots[:count]

    def end(self, lease: Lease) -> None:
        """Give a lease's slots back."""
        self.leases.remove(lease)
        leased = self._copies.host.leased
        for cls, slots in ((lease.cls, lease.slots), *lease.others):
            if leased is not None:
                leased.end(cls, slots)
            self._copies.host.release(cls, slots)

    def expire(self, now_ns: int) -> None:
        """End leases whose time is up."""
        for lease in self.leases.expired(now_ns):
            self._copies.counters["leases_expired"] += 1
            self.end(lease)

    def session_ended(self, session: Session) -> None:
        """End what a client left behind."""
        self.prefetcher.session_ended(session)
        for lease in self.leases.of_session(session.id):
            self.end(lease)

    def _used(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, sources: Masks, parent: Keys | None) -> None:
        """These blocks are read, and are in host: heat, ghost hits, and another chance to be written to nvme."""
        self._demand.read(rows, entry.geometry.slot_bytes, sources)
        self._offer(entry, cls, rows, parent)

    def _copied(self, cls: SlotClass, slots: Slots) -> None:
        """A client is going to copy these, which lay in host already. (Where they were read from nvme first, disk and
        lanes of the store have shared the time between reads and writes.)"""
        if self._offload is not None:
            self._offload.clients_copy(1e9 * slots.size * cls.slot_bytes / self._speeds.host.bytes_per_s)

    def _offer(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, parent: Keys | None) -> None:
        """Give blocks that are read another chance to be written to nvme."""
        if self._offload is not None:
            open_end = parent is not None and self._offload.follows_a_hole(
                self._copies.blocks.row_of(parent, entry.number)
            )
            self._offload.read(entry, cls, rows, open_end=open_end)

    async def _to_gpu(self, entry: NamespaceEntry, wish: Wish) -> int:
        wish.begun = wish.rows.size
        return await self._onboarder.raise_to_gpu(entry, wish.rows)

    async def _bring(
        self, session: Session, entry: NamespaceEntry, keys: Keys, work: Callable[[Wish], Awaitable[int]]
    ) -> Answer:
        rows = self._copies.blocks.find_prefix(keys, entry.number)
        return Answer(CountReply(id=0, count=await self.prefetcher.waited_for(wish_for(session, rows), work)))

    async def _hold(
        self, entry: NamespaceEntry, keys: Keys, limit: int, parent: Keys | None
    ) -> tuple[Rows, Masks, Slots]:
        """Hold the leading run in host: (rows, where they were, slots of those that made it).

        Rows are looked up here, in the same turn of the loop in which their slots are held: a row that was found
        earlier could be another block's by now. While the arena is still being allocated it waits for memory.
        """
        while True:
            rows = self._copies.blocks.find_prefix(keys, entry.number)[:limit]
            sources, growing = self._copies.blocks.residency(rows), self._room.growing
            self._copies.blocks.link_behind(parent, entry.number, rows)
            try:
                slots = await self._onboarder.hold_in_host(entry, rows)
            except RequestError:
                if not growing:
                    raise
                slots = np.empty(0, np.int32)
            if slots.size == rows.size or not growing:
                if slots.size:
                    self._used(entry, self._copies.host_class(entry), rows[: slots.size], sources[: slots.size], parent)
                return rows, sources, slots
            self._copies.host.release(self._copies.host_class(entry), slots)
            await self._room.next_chunk()

    async def _acquire_slowly(
        self, session: Session, request: Acquire, entry: NamespaceEntry, keys: Keys, parent: Keys | None
    ) -> Answer:
        cls, window = self._copies.host_class(entry), None
        if (run := self._copies.blocks.find_prefix(keys, entry.number)).size:
            # Starts a task, which begins after this request's own reads: those behind them never go first.
            window = self.prefetcher.follow(session, entry, run)
        try:
            rows, sources, slots = await self._hold(entry, keys, MAX_BATCH, parent)
        except asyncio.CancelledError:
            if window is not None:
                window.cancel()  # whoever does not wait for these blocks will not ask for the next
            raise
        self._uses.read(session, entry, keys, rows, slots, parent)
        if request.verify:
            host = self._copies.host
            try:
                good = await self._workers.run(
                    functools.partial(whole_blocks, host, cls, slots, host.sums_of(cls, slots), entry.geometry)
                )
            except BaseException:
                self._copies.host.release(cls, slots)
                raise
            self._copies.host.release(cls, slots[good:])
            self._drop_bad(entry, rows, slots, good)
            slots = slots[:good]
        return self._grant(session, request, cls, slots, sources)

    def _grant(self, session: Session, request: Acquire, cls: SlotClass, slots: Slots, sources: Masks) -> Answer:
        """Make the lease; the slots come with one hold each, which ends here when there can be none."""
        if not slots.size:
            return Answer(AcquireReply(id=0, lease=0, count=0), [b"", b""])
        slots = self.share(cls, slots)
        lease, ttl_ms = self.lend(session, request.ttl_ms, [(cls, slots)])
        descriptors = empty_descriptors(slots.size)
        self._copies.host.describe(cls, slots, descriptors)
        descriptors["source"] = sources[: slots.size]
        self._copies.counters["acquired_blocks"] += slots.size
        sums, codecs = self._copies.host.sums_of(cls, slots), self._copies.shapes.forms.codecs_in(slots)
        reply = AcquireReply(id=0, lease=lease.id, count=slots.size, ttl_ms=ttl_ms, codecs=codecs)
        return Answer(reply, [descriptors.tobytes(), sums.tobytes()])

    def _lend_held(self, want: Want, request: Acquire, held: Held) -> Answer:
        """Answer an Acquire whose blocks the quick way found and holds; policies were told already."""
        if not held.slots.size:
            return Answer(AcquireReply(id=0, lease=0, count=0), [b"", b""])
        if held.not_on_nvme:
            self._offer(want.entry, want.cls, held.rows, want.parent)
        if held.more_behind:
            self.prefetcher.follow(want.session, want.entry, held.rows)
        self._copied(want.cls, held.slots)
        slots = self.share(want.cls, held.slots)
        lease, ttl_ms = self.lend(want.session, request.ttl_ms, [(want.cls, slots)])
        count = slots.size
        self._copies.counters["acquired_blocks"] += count
        codecs = self._copies.shapes.forms.codecs_in(slots)
        reply = AcquireReply(id=0, lease=lease.id, count=count, ttl_ms=ttl_ms, codecs=codecs)
        return Answer(reply, [held.descriptors[:count].tobytes(), held.sums[:count].tobytes()])

    def _lease(self, session: Session, number: int) -> Lease:
        lease = self.leases.get(number, session.id)
        if lease is None:
            raise RequestError(ErrorCode.NOT_YOURS, f"lease {number} is not this session's, or has ended")
        return lease

    def _drop_bad(self, entry: NamespaceEntry, rows: Rows, slots: Slots, good: int) -> None:
        """The block after the good ones did not match its sums: drop its host copy, a good one may be on disk."""
        if good >= slots.size:
            return
        self._copies.counters["host_corrupt_blocks"] += 1
        bad = rows[good : good + 1]
        if self._copies.blocks.table.host_slot[bad[0]] == slots[good]:
            self._copies.drop_host(self._copies.host_class(entry), bad)
