"""Pin, Unpin, Delete, Purge, Flush: what operators and careful clients ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from kvtierd.config.schema import Settings
from kvtierd.core.errors import ErrorCode, RequestError, StorageError
from kvtierd.protocol.messages import CountReply, Delete, Flush, OkReply, Pin, Purge, Tier, Unpin
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.onboard import Onboarder
from kvtierd.tiers.sessions import keys_of, namespace_of, need_frames, state_of
from kvtierd.tiers.write_behind import WriteBehind

Frames = Sequence[memoryview]


def pinned_max(settings: Settings) -> int:
    """Most bytes that pins may hold."""
    return int(settings.host.capacity * settings.leases.max_pinned_share)


class Admin:
    """Serves what changes how long blocks stay."""

    def __init__(
        self, copies: Copies, onboarder: Onboarder, write_behind: WriteBehind | None, pinned_bytes_max: int
    ) -> None:
        self._copies = copies
        self._onboarder = onboarder
        self._write_behind = write_behind
        self.pinned_bytes_max = pinned_bytes_max
        """Most that pins may hold."""
        self.pinned_bytes = 0
        self._pinning_bytes = 0
        """Of pins whose blocks are on their way into host: they count too, or many at once would pass the limit."""

    async def pin(self, session: Session, request: Pin, frames: Frames) -> Answer:
        """Hold the present ones of the keys in host until Unpin or the end of the session."""
        need_frames(frames, 1)
        entry = namespace_of(session, request.namespace)
        pins = state_of(session).pins
        keys = [key.tobytes() for key in keys_of(frames[0])]
        wanted = [key for key in dict.fromkeys(keys) if key not in pins]
        size = entry.geometry.slot_bytes
        if self.pinned_bytes + self._pinning_bytes + len(wanted) * size > self.pinned_bytes_max:
            raise RequestError(
                ErrorCode.TOO_LARGE,
                f"{len(wanted)} more pins of {size} bytes go over the limit of {self.pinned_bytes_max} pinned bytes; "
                "unpin some or raise leases.max_pinned_share",
            )
        found = np.frombuffer(b"".join(wanted), np.uint8).reshape(len(wanted), -1) if wanted else None
        rows = self._copies.blocks.find(found, entry.number) if found is not None else np.empty(0, np.int32)
        table = self._copies.blocks.table
        names = [key.tobytes() for key in table.key[rows]]
        self._pinning_bytes += rows.size * size
        try:
            slots = await self._onboarder.hold_in_host(entry, rows) if rows.size else rows
        finally:
            self._pinning_bytes -= rows.size * size
        pinned = 0
        for name, slot in zip(names, slots.tolist(), strict=False):
            if name in pins or state_of(session).ended:
                # Another Pin of the same session was faster, or the session ended while blocks were on their way.
                self._copies.host.release(self._copies.host_class(entry), np.array([slot], np.int32))
                continue
            pins[name] = (entry, slot)
            pinned += 1
            self._copies.blocks.table.pins[self._copies.host.pool.row[slot]] += 1
        self.pinned_bytes += pinned * size
        return Answer(CountReply(id=0, count=pinned))

    def unpin(self, session: Session, request: Unpin, frames: Frames) -> Answer:
        """Take back pins that this session holds; others are ignored."""
        need_frames(frames, 1)
        entry = namespace_of(session, request.namespace)
        pins = state_of(session).pins
        mine = [key for key in (key.tobytes() for key in keys_of(frames[0])) if pins.get(key, (None, 0))[0] is entry]
        for key in dict.fromkeys(mine):
            self._end_pin(*pins.pop(key))
        return Answer(CountReply(id=0, count=len(set(mine))))

    def delete(self, session: Session, request: Delete, frames: Frames) -> Answer:
        """Forget blocks everywhere."""
        need_frames(frames, 1)
        entry = namespace_of(session, request.namespace)
        rows = np.unique(self._copies.blocks.find(keys_of(frames[0]), entry.number))
        self.forget(entry, rows)
        return Answer(CountReply(id=0, count=rows.size))

    async def purge(self, session: Session, request: Purge, frames: Frames) -> Answer:
        """Forget a namespace, or drop its copies in some tiers where another copy remains; others go on meanwhile."""
        need_frames(frames, 0)
        if "nvme" in request.tiers:
            raise RequestError(ErrorCode.BAD_ARGUMENT, "purge of nvme copies alone is not offered; delete the blocks")
        if request.namespace:
            entries = [namespace_of(session, request.namespace)]
        else:
            entries = [entry for entry in self._copies.namespaces.entries if entry.tenant == session.tenant]
        count = 0
        for entry in entries:
            for rows in self._copies.blocks.of_namespace(entry.number):
                if request.tiers:
                    count += sum(self.thin(entry, rows, tier) for tier in request.tiers)
                else:
                    self.forget(entry, rows)
                    count += rows.size
                await asyncio.sleep(0)
        return Answer(CountReply(id=0, count=count))

    async def flush(self, _session: Session, _request: Flush, frames: Frames) -> Answer:
        """Wait until everything committed before is on stable storage."""
        need_frames(frames, 0)
        if self._write_behind is None:
            raise RequestError(ErrorCode.UNAVAILABLE, "there is no nvme tier: nvme.directory is empty")
        await self.make_durable()
        return Answer(OkReply(id=0))

    async def make_durable(self) -> None:
        """Have what was stored and forgotten before be so after a crash too. RequestError when the disk fails."""
        if self._write_behind is None:
            return
        try:
            await self._write_behind.flush()
        except StorageError as error:
            raise RequestError(ErrorCode.UNAVAILABLE, f"nvme: {error}", retry_after_ms=1000) from error

    def session_ended(self, session: Session) -> None:
        """End a client's pins."""
        state_of(session).ended = True
        pins = state_of(session).pins
        while pins:
            self._end_pin(*pins.popitem()[1])

    def _end_pin(self, entry: NamespaceEntry, slot: int) -> None:
        self.pinned_bytes -= entry.geometry.slot_bytes
        row = int(self._copies.host.pool.row[slot])
        if row >= 0:  # else the block was deleted
            self._copies.blocks.table.pins[row] -= 1
        self._copies.host.release(self._copies.host_class(entry), np.array([slot], np.int32))

    def forget(self, entry: NamespaceEntry, rows: Rows) -> None:
        """Forget blocks everywhere."""
        if not rows.size:
            return
        self._copies.counters["deleted_blocks"] += rows.size
        self._copies.forget(entry, rows)
        if self._write_behind is not None:
            self._write_behind.kick()

    def thin(self, entry: NamespaceEntry, rows: Rows, tier: Tier) -> int:
        """Drop copies in one tier of blocks that have another copy and are not in use there."""
        copies = self._copies
        rows = copies.keep_elsewhere(rows, tier)
        column = copies.blocks.table.host_slot if tier == "host" else copies.blocks.table.gpu_slot
        tier_slots = copies.host if tier == "host" else copies.gpu
        assert tier_slots is not None or not rows.size, "a gpu copy without a gpu tier"
        if tier_slots is None:
            return 0
        if tier == "host":
            scattered = rows[copies.shapes.scattered(rows)]
            copies.shapes.gather(scattered)
            return int(scattered.size) + self._thin_slots(entry, rows[column[rows] >= 0], tier)
        return self._thin_slots(entry, rows, tier)

    def _thin_slots(self, entry: NamespaceEntry, rows: Rows, tier: Tier) -> int:
        copies = self._copies
        tier_slots = copies.host if tier == "host" else copies.gpu
        assert tier_slots is not None
        column = copies.blocks.table.host_slot if tier == "host" else copies.blocks.table.gpu_slot
        idle = rows[tier_slots.pool.holds[column[rows]] == 0]
        if idle.size and tier == "host":
            copies.drop_host(copies.host_class(entry), idle)
        elif idle.size:
            copies.drop_gpu(copies.gpu_class(entry), idle)
        return int(idle.size)
