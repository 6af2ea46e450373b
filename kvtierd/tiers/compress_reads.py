"""Reads of what is compressed: blocks are decoded on their way into a slot of their own.

From host the compressed form is held and decoded into the new slot. From nvme it is read into the end of that slot and
decoded in place, so that a read needs no memory beside the slot. What arrives is hashed anew; the old sums vouch for
what was decoded, never for what came of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums, block_sums
from kvtierd.core.errors import StorageError
from kvtierd.core.keys import KEY_BYTES
from kvtierd.core.stored_form import Codec
from kvtierd.storage.interface import ReadItem
from kvtierd.tiers.compress_work import Decoding, decode, in_pieces, shapes_of, tail
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.moves import Move
from kvtierd.tiers.workers import Workers


class Decoder:
    """Decodes for moves into host. Runs on the loop; bytes move in worker threads."""

    def __init__(self, copies: Copies, workers: Workers) -> None:
        self._copies = copies
        self._workers = workers

    def plan(self, move: Move, tier: int, *, compressed: bool) -> None:
        """Note which blocks of a move have been through FP8 in the tier that it takes them from. Where it decodes
        compressed forms these are held from here on, for it begins in a later turn."""
        forms = self._copies.shapes.forms
        move.lossy = forms.in_tier(move.rows, tier)
        if compressed:
            move.sources = forms.slots(move.rows)
            self._copies.host.pool.hold(move.sources)

    async def from_host(self, move: Move) -> None:
        """Decode held compressed forms into the move's slots, and end the holds. Forms that are damaged are dropped."""
        copies, form = self._copies, shapes_of(move.entry.geometry).form
        cls = copies.host.class_for(form.slot_bytes, form.layers, move.entry.tenant)
        try:
            sums = copies.host.sums_of(cls, move.sources)
            items = [
                self._decoding(move, i, copies.host.view(cls, source), sums[i])
                for i, source in enumerate(move.sources.tolist())
            ]
            await self._decode(move, items, np.arange(move.rows.size))
        finally:
            copies.host.release(cls, move.sources)
        damaged = move.rows[~move.good & copies.blocks.live(move.rows) & copies.shapes.forms.mask(move.rows)]
        if damaged.size:
            copies.counters["host_corrupt_blocks"] += damaged.size
            copies.drop_scattered(damaged)

    def items(self, move: Move, places: npt.NDArray[np.intp]) -> list[ReadItem]:
        """What to read from nvme for the blocks at these places of a move: each into its slot, or what FP8 made of it
        into the end of it."""
        copies, entry, rows = self._copies, move.entry, move.rows[places]
        keys = copies.blocks.table.key[rows].tobytes()
        items = [
            ReadItem(entry.stored_digest, keys[at : at + KEY_BYTES], entry.geometry, extent, total, view, move.sums[i])
            for at, extent, total, view, i in zip(
                range(0, len(keys), KEY_BYTES),
                copies.extents(rows, entry),
                copies.shapes.forms.nvme_sums(rows).tolist(),
                copies.host.views(move.cls, move.slots[places]),
                places.tolist(),
                strict=True,
            )
        ]
        for item in (items[at] for at in np.flatnonzero(move.lossy[places]).tolist()):
            item.out, item.codec = tail(item.out, shapes_of(entry.geometry).form), Codec.FP8_E4M3
            item.sums = np.zeros_like(item.sums)
        return items

    async def finish(
        self, move: Move, places: npt.NDArray[np.intp], items: list[ReadItem], errors: list[StorageError | None]
    ) -> list[StorageError | None]:
        """Decode what was read in FP8 for the blocks at these places of a move; the outcome of each read."""
        coded = [i for i, item in enumerate(items) if item.codec != Codec.RAW and errors[i] is None]
        if not coded:
            return errors
        decodings = [self._decoding(move, int(places[i]), items[i].out, items[i].sums) for i in coded]
        await self._decode(move, decodings, places[coded])
        found = list(errors)
        for i, decoding in zip(coded, decodings, strict=True):
            if not decoding.good:
                name = items[i].key.hex()[:16]
                found[i] = StorageError(f"block {name} changed in memory between its read and its decoding")
        return found

    def landed(self, move: Move, kept: npt.NDArray[np.bool_]) -> None:
        """Blocks of a move have their own slots in host: remember which of them have been through FP8."""
        forms, rows, lossy = self._copies.shapes.forms, move.rows[kept], move.lossy[kept]
        totals = np.zeros(rows.size, np.uint64)
        if lossy.any():
            totals[lossy] = block_sums(move.sums[kept][lossy])
            # The next life of the daemon would take it for the exact block, whose sum it does not have.
            self._copies.host.withdraw(move.slots[kept][lossy])
        forms.arrived(rows, lossy, totals)
        for place, lost in move.errors.items():
            if kept[place]:
                forms.errors[int(move.rows[place])] = lost

    def _decoding(self, move: Move, index: int, source: npt.NDArray[np.uint8], sums: Sums) -> Decoding:
        shapes = shapes_of(move.entry.geometry)
        lost = np.zeros((shapes.form.layers, 2 * shapes.form.groups), np.float32)
        move.errors[index] = lost
        target = self._copies.host.view(move.cls, int(move.slots[index]))
        return Decoding(source, target, sums, move.sums[index], lost)

    async def _decode(self, move: Move, items: list[Decoding], places: npt.NDArray[np.intp]) -> None:
        shapes = shapes_of(move.entry.geometry)

        def work(block: int, first: int, end: int) -> None:
            decode(shapes, items[block], first, end)

        await in_pieces(self._workers.run, work, shapes.form.layers, shapes.geometry.layer_stride, len(items))
        move.good[places] = [item.good for item in items]
        good = int(np.count_nonzero(move.good[places]))
        self._copies.counters["decompressed_blocks"] += good
        self._copies.counters["decompressed_bytes"] += good * shapes.geometry.slot_bytes
