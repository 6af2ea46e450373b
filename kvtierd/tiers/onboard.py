"""Bringing blocks towards gpu: from nvme or gpu into host slots, and from host into gpu slots.

One block has at most one move into host at a time; whoever else wants it waits for the same move. A destination slot
is held by its move and by every waiter from the start, so it cannot change hands between arrival and use.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from kvtierd.core.checksum import block_sum, layer_sums
from kvtierd.core.errors import CorruptionError, ErrorCode, RequestError, StorageError
from kvtierd.core.token_spans import clear_padding, copy_tokens, of_tokens
from kvtierd.core.units import MIB
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME
from kvtierd.storage.interface import BlockStore, GoneError, ReadItem
from kvtierd.tiers.blocks import PREFETCHED, READ_BACK, Rows
from kvtierd.tiers.compress_reads import Decoder
from kvtierd.tiers.moves import Arrival, Claim, Move
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.onboard_gpu import GpuRaiser
from kvtierd.tiers.room import Room
from kvtierd.tiers.speeds import Speeds
from kvtierd.tiers.warm_verify import Verifier
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)

PIECE_BLOCKS = 8
PIECE_BLOCKS_MAX = 64
PIECE_BYTES = 8 * MIB
"""Of one job: as many blocks as make two requests to the disk, within these bounds. Few enough to keep the loop for no
longer than a millisecond, enough to hide a job's own cost; the store spreads its requests over its threads."""


class Onboarder:
    """Moves into host and gpu. Every method runs on the loop; bytes move in worker threads."""

    def __init__(
        self, room: Room, store: BlockStore | None, workers: Workers, speeds: Speeds, inflight_max: int
    ) -> None:
        self._copies = room.copies
        self._room = room
        self._store = store
        self._workers = workers
        self._decoder = Decoder(room.copies, workers)
        self._speeds = speeds
        self._arriving: dict[int, Arrival] = {}
        self._inflight_max = inflight_max
        self._tasks: set[asyncio.Task[None]] = set()
        self.raise_to_gpu = GpuRaiser(self, room, workers, speeds).raise_to_gpu
        self.verifier: Verifier | None = None
        """Of blocks of the life before, where there is one."""

    async def hold_in_host(self, entry: NamespaceEntry, rows: Rows, *, ahead: bool = False) -> Slots:
        """Bring the rows into host and hold them there: slots of the leading run that made it, one hold each.

        RequestError `busy` when not even the first finds room. Shorter than `rows` when there is no room for more, a
        block could not be read, or it was deleted meanwhile. When cancelled it holds nothing. With `ahead` nobody has
        asked for the blocks yet: they are no use of those that are there, displace nothing that is hotter, and where
        there is no room the answer is short and no error.
        """
        return await self.landed(self.claim(entry, rows, ahead=ahead))

    async def landed(self, claim: Claim) -> Slots:
        """Wait for what was claimed; as `hold_in_host`. It ends the claim, also when it is cancelled."""
        copies, slots = self._copies, claim.slots
        try:
            if claim.waits:
                await asyncio.wait(claim.waits)
        except asyncio.CancelledError:
            self.drop(claim)
            raise
        landed = (copies.blocks.table.host_slot[claim.rows] == slots) & (copies.host.pool.row[slots] >= 0)
        good = slots.size if landed.all() else int(landed.argmin())
        if good < slots.size:
            copies.host.release(claim.cls, slots[good:])
        slots = slots[:good]
        if self.verifier is not None and copies.host.unproven(slots):
            return await self.verifier.leading_good(claim.entry, claim.cls, claim.rows[:good], slots)
        return slots

    def drop(self, claim: Claim) -> None:
        """End a claim that nobody waits for any more: its holds go, the moves end by themselves."""
        self._copies.host.release(claim.cls, claim.slots)

    def is_arriving(self, row: int) -> bool:
        """Whether a move of the row into host is under way."""
        return row in self._arriving

    async def close(self) -> None:
        """Wait for moves under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def claim(self, entry: NamespaceEntry, rows: Rows, *, ahead: bool = False) -> Claim:
        """Hold what is in host, join moves under way, start the missing ones; stop at the first that finds no room.

        Errors are those of `hold_in_host`. Wait for it with `landed`, or `drop` it.
        """
        copies, cls = self._copies, self._copies.host_class(entry)
        slots = copies.blocks.table.host_slot[rows].copy()
        present = slots >= 0
        copies.host.pool.hold(slots[present])
        if not ahead:
            copies.host.touch(cls, slots[present])
        waits: set[asyncio.Future[None]] = set()
        fresh: list[int] = []
        missing = np.flatnonzero(~present)
        if np.unique(rows[missing]).size < missing.size:
            copies.host.release(cls, slots[present])
            raise RequestError(ErrorCode.BAD_ARGUMENT, "a key is named twice; a prefix has every key once")
        for i in missing.tolist():
            arrival = self._arriving.get(int(rows[i]))
            if arrival is None:
                fresh.append(i)
                continue
            slots[i] = arrival.slot
            copies.host.pool.hold(slots[i : i + 1])
            waits.add(arrival.done)
        if not fresh:
            return Claim(entry, cls, rows, slots, waits)
        new = self._take(cls, rows[fresh], ahead=ahead)
        end = fresh[new.size] if new.size < len(fresh) else rows.size
        if end == 0:
            copies.host.release(cls, slots[slots >= 0])
            if ahead:
                return Claim(entry, cls, rows[:0], slots[:0], set())
            copies.counters["busy_reads"] += 1
            raise RequestError(
                ErrorCode.BUSY,
                "no host slot may be taken now, or too many blocks are on their way",
                retry_after_ms=self._room.pressure.retry_ms(cls, len(fresh)),
            )
        places = np.array(fresh[: new.size], np.intp)
        slots[places] = new
        copies.host.pool.hold(new)
        beyond = slots[end:]
        if beyond.size and (beyond := beyond[beyond >= 0]).size:
            copies.host.release(cls, beyond)
        waits |= self._start(entry, cls, rows[places], new)
        return Claim(entry, cls, rows[:end], slots[:end], waits)

    def _take(self, cls: SlotClass, rows: Rows, *, ahead: bool) -> Slots:
        """Slots for the leading ones of these rows."""
        allowed = self._copies.under_way.leading(cls.tenant, rows[: max(0, self._inflight_max - len(self._arriving))])
        if not ahead:
            self._room.pressure.wanted(cls, rows)
            return self._room.take_host(cls, allowed.size)
        slots = self._room.take_spare(cls, allowed)
        self._copies.counters["prefetched_blocks"] += slots.size
        self._copies.counters["prefetch_refused_blocks"] += rows.size - slots.size
        self._copies.blocks.mark_as(rows[: slots.size], PREFETCHED)
        return slots

    def _start(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots) -> set[asyncio.Future[None]]:
        """Plan the jobs and start them. What they read from is settled and held now: they begin in a later turn."""
        self._copies.blocks.begin_move(rows)
        self._copies.absences.back(rows)
        scattered, coded = self._copies.shapes.scattered(rows), self._copies.shapes.forms.mask(rows)
        from_gpu = ((self._copies.blocks.residency(rows) & TIER_GPU) != 0) & ~scattered
        waits: set[asyncio.Future[None]] = set()
        step = min(max(PIECE_BLOCKS, PIECE_BYTES // entry.geometry.slot_bytes), PIECE_BLOCKS_MAX)
        for chosen, run, tier in (
            (scattered & ~coded, self._from_extents, TIER_HOST),
            (coded, self._from_compressed, TIER_HOST),
            (from_gpu, self._from_gpu, TIER_GPU),
            (~(from_gpu | scattered), self._from_nvme, TIER_NVME),
        ):
            places = np.flatnonzero(chosen)
            for begin in range(0, places.size, step):
                piece = places[begin : begin + step]
                move = self._plan(entry, cls, rows[piece], slots[piece], gpu=run == self._from_gpu)
                self._decoder.plan(move, tier, compressed=run == self._from_compressed)
                if run == self._from_extents:
                    move.scattered = self._copies.shapes.hold(move.rows)
                task = asyncio.create_task(run(move))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
                waits.add(move.done)
        return waits

    def _plan(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots, *, gpu: bool) -> Move:
        sources = self._copies.blocks.table.gpu_slot[rows] if gpu else np.empty(0, np.int32)
        sums = np.zeros((rows.size, entry.geometry.layers), np.uint64)
        if gpu:
            assert self._copies.gpu is not None
            self._copies.gpu.pool.hold(sources)
            sums = self._copies.gpu.sums_of(self._copies.gpu_class(entry), sources)
        self._copies.under_way.changed(entry.tenant, rows.size, gpu=gpu)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            self._arriving[row] = Arrival(slot, done)
        return Move(entry, cls, rows, slots, sources, sums, np.zeros(rows.size, np.bool_), done)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waited has seen a miss, since nothing landed; the bug must not be lost with the task.
            self._copies.counters["onboard_failed_blocks"] += 1
            _log.error("onboarding ended with a bug", exc_info=error)

    async def _from_nvme(self, move: Move) -> None:
        copies, store, table, entry = self._copies, self._store, self._copies.blocks.table, move.entry
        on_disk = np.flatnonzero(table.segment[move.rows] >= 0)
        try:
            if store is not None and on_disk.size:
                items = self._decoder.items(move, on_disk)
                errors = await self._decoder.finish(move, on_disk, items, await self._read(store, items))
                move.good[on_disk] = [error is None for error in errors]
                self._lost_on_disk(move.rows[on_disk], errors)
                copies.blocks.mark_as(move.rows[move.good], READ_BACK)
                copies.counters["onboarded_bytes"] += int(move.good.sum()) * entry.geometry.slot_bytes
        finally:
            copies.counters["onboarded_blocks"] += int(move.good.sum())
            self._land(move)

    async def _read(self, store: BlockStore, items: list[ReadItem]) -> list[StorageError | None]:
        moved, hop = 0, self._speeds.nvme
        asked = sum(item.out.size for item in items)
        hop.begin(asked)
        try:
            errors = await store.read(items)
            moved = sum(item.out.size for item, error in zip(items, errors, strict=True) if error is None)
        finally:
            hop.end(moved, asked)
        return errors

    async def _from_compressed(self, move: Move) -> None:
        try:
            await self._decoder.from_host(move)
        finally:
            self._land(move)

    async def _from_gpu(self, move: Move) -> None:
        copies, gpu = self._copies, self._copies.gpu
        assert gpu is not None
        gpu_cls, sources = copies.gpu_class(move.entry), move.sources

        def copy_all() -> None:
            for i, (source, target) in enumerate(zip(sources.tolist(), move.slots.tolist(), strict=True)):
                view = copies.host.view(move.cls, target)
                gpu.copy_out(gpu_cls, source, view)
                move.good[i] = bool((layer_sums(view, move.entry.geometry) == move.sums[i]).all())

        asked = sources.size * gpu_cls.slot_bytes
        self._speeds.gpu.begin(asked)
        try:
            await self._workers.run(copy_all)
        finally:
            self._speeds.gpu.end(int(move.good.sum()) * gpu_cls.slot_bytes, asked)
            gpu.touch(gpu_cls, sources[gpu.pool.row[sources] >= 0])
            gpu.release(gpu_cls, sources)
            bad = ~move.good
            if bad.any():
                copies.counters["gpu_corrupt_blocks"] += int(bad.sum())
                same = copies.blocks.table.gpu_slot[move.rows] == sources
                copies.drop_gpu(gpu_cls, move.rows[bad & same])
            self._land(move)

    async def _from_extents(self, move: Move) -> None:
        copies, geometry = self._copies, move.entry.geometry

        def gather() -> None:
            for piece in move.scattered:
                source = copies.host.view(piece.cls, piece.slot)
                target = copies.host.view(move.cls, int(move.slots[piece.block]))
                of = of_tokens(geometry, piece.of_tokens)
                copy_tokens(source, of, piece.offset, target, geometry, piece.first, piece.tokens)
            for i, slot in enumerate(move.slots.tolist()):
                view = copies.host.view(move.cls, slot)
                clear_padding(view, geometry)
                layer_sums(view, geometry, move.sums[i])
                move.good[i] = block_sum(move.sums[i]) == copies.shapes.forms.host_sum(int(move.rows[i]))

        try:
            await self._workers.run(gather)
        finally:
            copies.shapes.release(move.scattered)
            copies.counters["gathered_blocks"] += int(move.good.sum())
            bad = move.rows[~move.good & copies.blocks.live(move.rows)]
            if bad.size:
                copies.counters["host_corrupt_blocks"] += bad.size
                copies.drop_scattered(bad)
            self._land(move)

    def _land(self, move: Move) -> None:
        """End a move: what arrived whole becomes host copies, the rest orphans that go with their last hold."""
        copies, cls = self._copies, move.cls
        kept = move.good & copies.blocks.live(move.rows) & (~move.lossy | move.entry.allow_loss)
        if kept.any():
            copies.host.set_sums(cls, move.slots[kept], move.sums[kept])
            copies.add_host(cls, move.rows[kept], move.slots[kept])
            self._decoder.landed(move, kept)
        copies.blocks.unmark_as(move.rows[~kept], PREFETCHED)
        for row in move.rows.tolist():
            del self._arriving[row]
        copies.under_way.changed(move.entry.tenant, -move.rows.size, gpu=move.sources.size > 0)
        copies.blocks.end_move(move.rows)
        copies.host.release(cls, move.slots)
        move.done.set_result(None)

    def _lost_on_disk(self, rows: Rows, errors: list[StorageError | None]) -> None:
        gone = 0
        for row, error in zip(rows.tolist(), errors, strict=True):
            if isinstance(error, GoneError):
                gone += 1
            elif error is not None:
                self._not_read(row, error)
        if gone:  # misses, which the store counts
            _log.info("nvme read: %d blocks were recycled before they could be read; they are misses", gone)

    def _not_read(self, row: int, error: StorageError) -> None:
        """A block could not be read: a corrupt one is dropped for good, a failed read may succeed next time."""
        _log.warning("nvme read: %s", error, extra=self._copies.log_fields(row, "nvme"))
        kind = "onboard_corrupt_blocks" if isinstance(error, CorruptionError) else "onboard_failed_blocks"
        self._copies.counters[kind] += 1
        if isinstance(error, CorruptionError) and self._copies.blocks.table.segment[row] >= 0:
            self._copies.drop_nvme(np.array([row], np.int32))
