"""Compression in host: cold blocks of namespaces that allow loss become FP8, before they move to nvme or at rest.

Two ways lead here. The write-behind asks just before it writes a batch: what is cold then is encoded, the smaller form
takes the block's place in host, and that form is what is written. And a hand goes round the block table, as in CLOCK,
for blocks that cooled down later, or were decoded by a read and have rested since.

Either way the exact slot is held while worker threads encode it, piece by piece, into a slot of the smaller size class,
and the two change places in one turn of the loop. Whoever leases the exact slot keeps it; it is freed with the last
hold. A source that is not what its sums say is left alone: no new sum is made of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Settings
from kvtierd.core.checksum import Sums, block_sums
from kvtierd.core.clock import Clock
from kvtierd.core.stored_form import Codec, choose_codec
from kvtierd.gpu.slot_pool import NO_SLOT, SlotClass, Slots
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST
from kvtierd.storage.interface import WriteItem
from kvtierd.tiers.blocks import OFFLOADING, PIECE_ROWS, PREFETCHED, VISIBLE, Rows
from kvtierd.tiers.compress_forms import EXTENT
from kvtierd.tiers.compress_work import Encoding, Shapes, encode, in_pieces, loss_of, shapes_of
from kvtierd.tiers.demand import Demand
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.room import Room
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)

STEP_BYTES = 32 << 20
"""Exact bytes that the hand takes up at once; the next step begins with a turn of the ticker after it is done."""
REST_S = 10
"""A block that was used within this time stays as it is, however cold."""
DECODED_REST_S = 60
"""The same for a block that a read has decoded: it would only be decoded again by the next one."""
SECOND_NS = 1_000_000_000


@dataclasses.dataclass(slots=True, eq=False)
class Encoded:
    """What became of a batch: block i of it lies in compressed form in held slot `slots[i]`, -1 where it does not.

    Those `withheld` have been through FP8 before and could not be encoded now: written as they are, they would pass for
    exact ones.
    """

    entry: NamespaceEntry
    cls: SlotClass
    slots: Slots
    sums: Sums
    withheld: npt.NDArray[np.bool_]

    def forms(self, index: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.uint8], Sums]:
        """Codecs of these blocks of the batch, [n], and the block sums of those that are compressed."""
        codecs = np.where(self.slots[index] >= 0, np.uint8(Codec.FP8_E4M3), np.uint8(Codec.RAW))
        sums = np.zeros(index.size, np.uint64)
        coded = codecs != Codec.RAW
        sums[coded] = block_sums(self.sums[index[coded]])
        return codecs, sums


class Compressor:
    """Everything runs on the loop; bytes move in worker threads."""

    def __init__(self, room: Room, workers: Workers, demand: Demand, settings: Settings, clock: Clock) -> None:
        self._room = room
        self._copies = room.copies
        self._workers = workers
        self._demand = demand
        self._clock = clock
        self.settings = settings.kv_cache_config.compression
        self._hand = 0
        self._work: asyncio.Task[None] | None = None
        self._groups, self._relative_l2, self._largest = 0, 0.0, 0.0

    def step(self) -> None:
        """Look at the next rows, and begin to compress those that are cold and at rest."""
        entries = self._copies.namespaces.entries
        if not self.settings.enabled or (self._work is not None and not self._work.done()):
            return
        if not any(self._may(entry) for entry in entries):
            return
        rows = self._next_rows()
        if rows.size:
            entry = entries[int(self._copies.blocks.table.namespace[rows[0]])]
            self._work = asyncio.create_task(self._compress_at_rest(entry, rows), name="compress")
            self._work.add_done_callback(self._ended)

    async def close(self) -> None:
        """Wait for the step under way."""
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)

    def stats(self) -> dict[str, float]:
        """Gauges by name."""
        return {
            "compressed_forms": self._copies.shapes.forms.count,
            "compress_relative_l2_mean": self._relative_l2 / max(1, self._groups),
            "compress_error_max": self._largest,
        }

    async def before_offload(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots) -> Encoded | None:
        """Compress what is cold of a batch that is about to be written, whose exact slots are held once by the caller.

        The compressed slots come with a hold each, which the caller ends. None where nothing was to be compressed; a
        block that is not is to be written as it is. Raises nothing: whatever goes wrong here costs the compression.
        """
        if not self._may(entry):
            return None
        decoded = self._copies.shapes.forms.in_tier(rows, TIER_HOST)
        wanted = self._demand.heat(rows) < self.settings.threshold if self.settings.enabled else decoded
        chosen = np.flatnonzero((wanted | decoded) & self._may_be_compressed(rows, slots))
        if not chosen.size and not decoded.any():
            return None
        cls_for = self._class_of(entry)
        new = self._room.take_host(cls_for, chosen.size)
        self._copies.counters["compress_put_off_blocks"] += chosen.size - new.size
        chosen = chosen[: new.size]
        nowhere, nothing = np.full(rows.size, NO_SLOT, np.int32), np.zeros((rows.size, cls.layers), np.uint64)
        found = Encoded(entry, cls_for, nowhere, nothing, decoded)
        good = np.zeros(new.size, np.bool_)
        try:
            good, found.sums[chosen] = await self._encode(entry, cls, rows[chosen], slots[chosen], cls_for, new)
        except Exception:  # noqa: BLE001 - a fault of the codec must not cost the block its copy on disk
            _log.exception("compression ended with a bug; the blocks are written as they are")
            self._copies.counters["compress_failed_blocks"] += chosen.size
        finally:
            self._copies.host.release(cls_for, new[~good])
        found.slots[chosen[good]] = new[good]
        found.withheld[chosen[good]] = False
        self._exchange(entry, cls, rows[chosen[good]], slots[chosen[good]], cls_for, new[good])
        return found

    def item(self, found: Encoded, index: int, exact: WriteItem) -> WriteItem:
        """What to write of block `index` of a batch, `exact` where it was not compressed."""
        slot = int(found.slots[index])
        if slot < 0:
            return exact
        data = self._copies.host.view(found.cls, slot)
        return dataclasses.replace(exact, data=data, sums=found.sums[index], codec=Codec.FP8_E4M3)

    def _may(self, entry: NamespaceEntry) -> bool:
        return entry.allow_loss and choose_codec(entry.geometry, lossy=True) is not Codec.RAW

    def _class_of(self, entry: NamespaceEntry) -> SlotClass:
        form = shapes_of(entry.geometry).form
        return self._copies.host.class_for(form.slot_bytes, form.layers, entry.tenant)

    def _may_be_compressed(self, rows: Rows, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which blocks lie in these slots still, and nowhere where they are wanted exact."""
        table = self._copies.blocks.table
        whole = (table.flags[rows] & (VISIBLE | TIER_HOST | TIER_GPU)) == (VISIBLE | TIER_HOST)
        same = (table.host_slot[rows] == slots) & ~self._copies.host.absent(slots)
        found: npt.NDArray[np.bool_] = whole & same & (table.pins[rows] == 0)
        return found

    def _next_rows(self) -> Rows:
        """The next rows that may be compressed: of one namespace, STEP_BYTES at most, from a bounded part of the table.

        The hand stays where there is more of the part to do.
        """
        table, spaces = self._copies.blocks.table, self._copies.namespaces.entries
        begin = self._hand if self._hand < table.used_rows else 0
        end = min(begin + PIECE_ROWS, table.used_rows)
        rows = np.arange(begin, end, dtype=np.int32)
        rows = rows[self._idle(rows)]
        allowed = np.array([self._may(entry) for entry in spaces], np.bool_)
        rows = rows[allowed[table.namespace[rows]]]
        rows = rows[self._at_rest(rows)]
        if not rows.size:
            self._hand = end
            return rows
        entry = spaces[int(table.namespace[rows[0]])]
        rows = rows[table.namespace[rows] == entry.number]
        rows = rows[: max(1, STEP_BYTES // entry.geometry.slot_bytes)]
        self._hand = int(rows[-1]) + 1
        chosen: Rows = rows
        return chosen

    def _idle(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows are blocks in exact form in host that nobody holds or moves."""
        table = self._copies.blocks.table
        slots = table.host_slot[rows]
        marks = table.marks[rows] & np.uint8(OFFLOADING | PREFETCHED | EXTENT)
        idle: npt.NDArray[np.bool_] = (slots >= 0) & (marks == 0) & (table.moves[rows] == 0)
        idle[idle] = self._copies.host.pool.holds[slots[idle]] == 0
        idle[idle] = self._may_be_compressed(rows[idle], slots[idle])
        return idle

    def _at_rest(self, rows: Rows) -> npt.NDArray[np.bool_]:
        decoded = self._copies.shapes.forms.in_tier(rows, TIER_HOST)
        unused_s = self._clock.now_ns() // SECOND_NS - self._copies.blocks.table.last_access_s[rows].astype(np.int64)
        rested = unused_s >= np.where(decoded, DECODED_REST_S, REST_S)
        found: npt.NDArray[np.bool_] = rested & (self._demand.heat(rows) < self.settings.threshold)
        return found

    async def _compress_at_rest(self, entry: NamespaceEntry, rows: Rows) -> None:
        """Compress blocks that nobody holds, into free slots and those of colder ones; others are put off."""
        copies, cls, cls_for = self._copies, self._copies.host_class(entry), self._class_of(entry)
        # A turn of the loop later: some may have been taken up by others, or be other blocks.
        rows = rows[self._idle(rows)]
        rows = rows[copies.blocks.table.namespace[rows] == entry.number]
        held = copies.blocks.table.host_slot[rows]
        copies.host.pool.hold(held)
        copies.blocks.begin_move(rows)
        new = self._take_spare(cls_for, rows)
        copies.counters["compress_put_off_blocks"] += rows.size - new.size
        try:
            if new.size:
                some, slots = rows[: new.size], held[: new.size]
                good, _ = await self._encode(entry, cls, some, slots, cls_for, new)
                self._exchange(entry, cls, some[good], slots[good], cls_for, new[good])
        finally:
            copies.blocks.end_move(rows)
            copies.host.release(cls, held)
            copies.host.release(cls_for, new)

    def _take_spare(self, cls: SlotClass, rows: Rows) -> Slots:
        """Slots that displace nothing hotter. A class that has none at all gets its first chunk as a store would."""
        slots = self._room.take_spare(cls, rows)
        if slots.size or cls.total:
            return slots
        return self._room.take_host(cls, 1)

    async def _encode(
        self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots, cls_for: SlotClass, new: Slots
    ) -> tuple[npt.NDArray[np.bool_], Sums]:
        """Encode blocks from held slots into held slots: which are good, and their layer sums."""
        copies, shapes, forms = self._copies, shapes_of(entry.geometry), self._copies.shapes.forms
        old, sums = copies.host.sums_of(cls, slots), np.zeros((rows.size, cls.layers), np.uint64)
        items = [
            Encoding(
                copies.host.view(cls, slot), copies.host.view(cls_for, target), old[i], sums[i], forms.errors.get(row)
            )
            for i, (row, slot, target) in enumerate(zip(rows.tolist(), slots.tolist(), new.tolist(), strict=True))
        ]

        def work(block: int, first: int, end: int) -> None:
            encode(shapes, items[block], first, end)
            if end == cls.layers and items[block].good:
                items[block].loss = loss_of(shapes, [items[block].target])

        await in_pieces(self._workers.run, work, cls.layers, entry.geometry.layer_stride, len(items))
        good = np.array([item.good for item in items], np.bool_)
        copies.host.set_sums(cls_for, new[good], sums[good])
        self._account(shapes, [item for item in items if item.good], rows.size)
        return good, sums

    def _account(self, shapes: Shapes, good: list[Encoding], tried: int) -> None:
        counters = self._copies.counters
        counters["compress_failed_blocks"] += tried - len(good)
        counters["compressed_blocks"] += len(good)
        counters["compressed_in_bytes"] += len(good) * shapes.geometry.slot_bytes
        counters["compressed_out_bytes"] += len(good) * shapes.form.slot_bytes
        for item in good:
            self._groups += item.loss.groups
            self._relative_l2 += item.loss.relative_l2
            self._largest = max(self._largest, item.loss.largest)

    def _exchange(
        self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots, cls_for: SlotClass, new: Slots
    ) -> None:
        """Blocks lie in their compressed forms from now on, but for those that changed, or that others hold too.

        The caller has one hold of each slot.
        """
        copies = self._copies
        copies.ensure_rows(rows.size)
        still = self._may_be_compressed(rows, slots) & (copies.host.pool.holds[slots] == 1)
        if not entry.allow_loss or not still.any():
            return
        forms = copies.shapes.rows_for(int(np.count_nonzero(still)))
        rows, slots, new = (each[still][: forms.size] for each in (rows, slots, new))
        copies.blocks.table.host_slot[rows] = NO_SLOT
        copies.host.disown(cls, slots)
        copies.shapes.forms.settle(cls_for, rows, forms, new)
        self._chain(cls_for, rows, new)

    def _chain(self, cls: SlotClass, rows: Rows, slots: Slots) -> None:
        """Tell eviction which of these blocks follow each other, so that none goes before what comes behind it."""
        behind = self._copies.blocks.table.next_row[rows[:-1]] == rows[1:]
        before = np.full(slots.size, NO_SLOT, np.int32)
        before[1:][behind] = slots[:-1][behind]
        self._copies.host.chained(cls, slots, before)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # The blocks stay as they are; the bug must not be lost with the task.
            self._copies.counters["compress_failed_blocks"] += 1
            _log.error("compression ended with a bug", exc_info=error)
