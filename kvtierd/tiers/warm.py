"""A warm start: the host tier begins with the blocks of the daemon's life before.

What was passed is memory and a table that describes it; the page table is made anew from rows that are true. A block
is verified before it is first served. Slots that a client may still write stay out of use (warm_quarantine).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from kvtierd.config.schema import Host
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index.block_table import BlockTable
from kvtierd.index.warm_rows import Words64
from kvtierd.policy.eviction import EvictionPolicy
from kvtierd.protocol.messages import TIER_NVME, Abort, OkReply
from kvtierd.protocol.service import Answer, Session
from kvtierd.storage.interface import BlockStore
from kvtierd.tiers.blocks import VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.host_tier import HostTier
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.offload import Offload
from kvtierd.tiers.operator import Operator
from kvtierd.tiers.sessions import need_frames
from kvtierd.tiers.warm_host import SNAPSHOT, Kept, WarmHostTier
from kvtierd.tiers.warm_memory import Memory
from kvtierd.tiers.warm_quarantine import Quarantine
from kvtierd.tiers.warm_snapshot import Snapshot, SnapshotFile
from kvtierd.tiers.warm_table import KnownNamespace
from kvtierd.tiers.warm_takeover import Found, Taken, take_over
from kvtierd.tiers.warm_verify import PIECE_BLOCKS, Verifier
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)

AbortHandler = Callable[[Session, Abort, Sequence[memoryview]], Answer]
Ours = list[tuple[NamespaceEntry, SlotClass, Rows, Slots]]


def host_tier(settings: Host, policy: EvictionPolicy, kept: Kept | None) -> HostTier:
    """The host tier of a daemon whose files somebody keeps, or of one that begins and ends alone."""
    return HostTier(settings, policy) if kept is None else WarmHostTier(settings, policy, kept.keeper)


def begin(copies: Copies, kept: Kept | None, workers: Workers) -> Cold:
    """Take over what was kept, where something is kept at all; before anything else is registered or stored."""
    if kept is None or not isinstance(copies.host, WarmHostTier):
        return Cold()
    return Warm(copies, copies.host, kept, workers)


class Cold:
    """Nothing is kept."""

    verifier: Verifier | None = None

    def recover(self, store: BlockStore | None, now_ns: int) -> None:
        """Make the blocks of the life before blocks of this one, and quarantine what may be written still."""

    def start(self, offload: Offload | None, operator: Operator) -> None:
        """Pin what operators had pinned, verify in the background, and bring to disk what is nowhere there."""

    def step(self, now_ns: int) -> None:
        """Take a snapshot for the next life, a piece at a time; call it every so often."""

    async def close(self) -> None:
        """Stop verifying and watching."""

    def writer_gone(self, session: Session) -> None:
        """Nothing of a session of this life can be written any more."""

    def given_back(self, token: bytes, reservation: int) -> None:
        """A client of the life before does not write a reservation any more."""

    def aborts(self, ours: AbortHandler) -> AbortHandler:
        """Serve an Abort: of reservations of this life by `ours`, of earlier ones here."""

        def abort(session: Session, request: Abort, frames: Sequence[memoryview]) -> Answer:
            if not request.token:
                return ours(session, request, frames)
            need_frames(frames, 0)
            self.given_back(request.token, request.reservation)
            return Answer(OkReply(id=0))

        return abort

    def stats(self) -> dict[str, int | str]:
        """Gauges and texts by name."""
        return {"warm_unverified_blocks": 0, "warm_quarantined_slots": 0, "warm_refusal": ""}


class Warm(Cold):
    """Fills a host tier at start. Everything runs on the loop."""

    verifier: Verifier

    def __init__(self, copies: Copies, host: WarmHostTier, kept: Kept, workers: Workers) -> None:
        self._copies = copies
        self._host = host
        self._taken, self._before, file = begin_again(host, kept, copies.blocks.table)
        self._memory = Memory(copies, host, file, workers)
        self._operator: Operator | None = None
        self.verifier = Verifier(copies, workers, host.unverified)
        self._quarantine = Quarantine(host)
        self._background: asyncio.Task[None] | None = None
        self._ours: Ours = []
        self._register_namespaces()

    def _register_namespaces(self) -> None:
        """Give every namespace the number that it had."""
        table = self._copies.namespaces
        for known in self._taken.namespaces:
            # Clients say anew what loss they allow.
            table.register(known.tenant, known.namespace, allow_loss=None, ttl_s=known.ttl_s)
        table.on_change.append(self._note)
        assert len(table) == len(self._taken.namespaces), "a namespace was registered before"

    def recover(self, store: BlockStore | None, now_ns: int) -> None:
        """See Cold."""
        if store is not None:
            for entry in self._copies.namespaces.entries:
                store.register(entry.stored_digest, entry.stored)
        used: list[Slots] = []
        ours: Ours = []
        for cls, number, rows64, slots in _groups(self._taken.blocks):
            entry = self._copies.namespaces[number]
            if _fits(entry, cls):
                rows, kept = self._enter(entry, cls, rows64, slots)
                ours.append((entry, cls, rows, kept))
                used.append(kept)
        if self._before is not None:
            recalled = self._memory.recall_forms(self._before)
            used += [slots for *_, slots in recalled] + self._memory.recall_extents(self._before)
            self._copies.counters["warm_adopted_blocks"] += self._copies.shapes.forms.count
            ours += [one for one in recalled if self._host.unverified.among(one[3]).any()]
            self._memory.recall_uses(self._before, now_ns)
        used += self._quarantine.hold(self._taken.lent, self._taken.processes)
        self._withdraw_all_but(used)
        adopted = sum(rows.size for _, _, rows, _ in ours)
        self._copies.counters["warm_adopted_blocks"] += adopted
        if self._taken.namespaces:
            _log.info(
                "host tier: %d blocks of the life before, %d slots in quarantine", adopted, self._quarantine.slots
            )
        self._taken = Taken(reason=self._taken.reason)
        self._ours = ours

    def start(self, offload: Offload | None, operator: Operator) -> None:
        """See Cold."""
        self._operator = operator
        self._background = asyncio.create_task(self._go_on(offload, operator), name="warm-verify")

    def step(self, now_ns: int) -> None:
        """See Cold."""
        if self._operator is not None:
            self._memory.step(now_ns, self._operator.pinned)

    async def close(self) -> None:
        """See Cold."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)
        await self._memory.close(self._operator.pinned() if self._operator is not None else [])
        self._quarantine.close()

    def writer_gone(self, session: Session) -> None:
        """See Cold."""
        self._host.writer_gone(session)

    def given_back(self, token: bytes, reservation: int) -> None:
        """See Cold."""
        self._quarantine.given_back(token, reservation)

    def stats(self) -> dict[str, int | str]:
        """See Cold."""
        return {
            "warm_unverified_blocks": self._host.unverified.pending,
            "warm_quarantined_slots": self._quarantine.slots,
            "warm_refusal": self._taken.reason,
        }

    def _note(self, entry: NamespaceEntry) -> None:
        known = KnownNamespace(
            tenant=entry.tenant,
            digest=entry.digest,
            namespace=entry.namespace,
            allow_loss=entry.allow_loss,
            ttl_s=entry.ttl_s,
        )
        self._host.table.note(entry.number, known)

    def _enter(self, entry: NamespaceEntry, cls: SlotClass, rows64: Words64, slots: Slots) -> tuple[Rows, Slots]:
        """Rows for blocks, in the order in which they were stored; those that find no place are left out."""
        copies, table = self._copies, self._copies.blocks.table
        keys = np.ascontiguousarray(rows64[:, :4]).view(np.uint8).reshape(-1, 32)
        fresh, position, rows = copies.blocks.add(keys, entry.number, VISIBLE)
        table.block_sum[fresh] = rows64[position, 5]
        # One that is on disk with other bytes: what is on disk has been verified, or will be before it is served.
        fits = (rows >= 0) & (table.block_sum[rows] == rows64[:, 5]) & (table.host_slot[rows] < 0)
        first = np.zeros(rows.size, np.bool_)
        first[np.unique(rows, return_index=True)[1]] = True
        rows, slots = rows[fits & first], slots[fits & first]
        if rows.size:
            self._host.take(cls, slots)
            self._host.unverified.add(slots)
            copies.add_host(cls, rows, slots)
            copies.host.release(cls, slots)
        return rows, slots

    def _withdraw_all_but(self, used: list[Slots]) -> None:
        """Rows of free slots are not true any more: they must not come back in the life after this one."""
        found = [found.slots for found in (*self._taken.blocks, *self._taken.lent)]
        if found:
            taken = np.concatenate([*used, np.empty(0, np.int32)])
            self._host.withdraw(np.setdiff1d(np.concatenate(found), taken).astype(np.int32))

    async def _go_on(self, offload: Offload | None, operator: Operator) -> None:
        if self._before is not None:
            pins, self._before = self._before.pins, None
            await operator.pin_again(pins)
        await self._verify_all(offload)

    async def _verify_all(self, offload: Offload | None) -> None:
        """Newest first: those are asked for first. A piece at a time, so that requests come between."""
        table, pool = self._copies.blocks.table, self._host.pool
        for entry, cls, rows, slots in self._ours:
            for end in range(rows.size, 0, -PIECE_BLOCKS):
                piece = slice(max(0, end - PIECE_BLOCKS), end)
                mine = (table.host_slot[rows[piece]] == slots[piece]) & self._host.unverified.among(slots[piece])
                if mine.any():
                    some_rows, some = rows[piece][mine], slots[piece][mine]
                    pool.hold(some)
                    try:
                        await self.verifier.verify(entry, cls, some_rows, some)
                    finally:
                        self._host.release(cls, some)
        for entry, cls, rows, slots in self._ours:
            if offload is not None:
                still = (table.host_slot[rows] == slots) & ~self._host.unverified.among(slots)
                still &= (table.flags[rows] & (VISIBLE | TIER_NVME)) == VISIBLE
                offload.recovered(entry, cls, rows[still], slots[still])
        self._ours = []


def begin_again(host: WarmHostTier, kept: Kept, blocks: BlockTable) -> tuple[Taken, Snapshot | None, SnapshotFile]:
    """Take over what was passed: the memory, what the last snapshot said, and the file for the next one."""
    snapshots = [fd for name, fd in kept.passed if name == SNAPSHOT]
    taken = take_over(host, [file for file in kept.passed if file[0] != SNAPSHOT], blocks)
    before = None
    for fd in snapshots:
        file = SnapshotFile(fd)
        before = before or file.read()
        file.close()
    host.keeper.forget(SNAPSHOT)
    fresh = SnapshotFile()
    if before is not None and not taken.reason:
        fresh.write(before)  # should this life end before it has one of its own
    host.keeper.keep(SNAPSHOT, fresh.fd)
    return taken, None if taken.reason else before, fresh


def _groups(found: list[Found]) -> list[tuple[SlotClass, int, Words64, Slots]]:
    """Rows of blocks by class and namespace, each group in the order in which its blocks were stored."""
    out = []
    for cls in {found.cls.id: found.cls for found in found}.values():
        rows = np.concatenate([some.rows for some in found if some.cls is cls])
        slots = np.concatenate([some.slots for some in found if some.cls is cls])
        numbers = (rows[:, 4] & np.uint64(0xFFFF)).astype(np.int64)
        order = np.lexsort((rows[:, 6], numbers))
        rows, slots, numbers = rows[order], slots[order], numbers[order]
        begins = np.flatnonzero(np.diff(numbers, prepend=-1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), numbers.size], strict=True):
            out.append((cls, int(numbers[begin]), rows[begin:end], slots[begin:end]))
    return out


def _fits(entry: NamespaceEntry, cls: SlotClass) -> bool:
    shape = (entry.geometry.slot_bytes, entry.geometry.layers, entry.tenant)
    return shape == (cls.slot_bytes, cls.layers, cls.tenant)
