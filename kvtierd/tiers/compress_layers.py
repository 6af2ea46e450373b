"""One layer of compressed blocks, decoded into memory of the caller's: what attention reads that cannot take codes.

On the loop, but for the bytes, which move in worker threads.
"""

from __future__ import annotations

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import StorageError
from kvtierd.core.stored_form import Codec
from kvtierd.storage.interface import LayerItem
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.compress_work import decode_layer, shapes_of
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.workers import Workers


class LayerDecoder:
    """Brings exact-form layers ([layer_stride] uint8) out of what lies in FP8 in host or on nvme."""

    def __init__(self, copies: Copies, workers: Workers) -> None:
        self._copies = copies
        self._workers = workers

    def view(self, entry: NamespaceEntry, row: int, view: Bytes) -> Bytes:
        """Of the memory for a block's layer, what its stored form on nvme is read into."""
        coded = self._copies.shapes.forms.nvme_codec(row) is not Codec.RAW
        return view[: shapes_of(entry.geometry).form.layer_stride] if coded else view

    async def read(
        self, items: list[LayerItem], views: list[Bytes], errors: list[StorageError | None]
    ) -> list[StorageError | None]:
        """Decode in place what was read in FP8 into the beginnings of `views`; the outcome of each read."""
        coded = [i for i, item in enumerate(items) if item.codec != Codec.RAW and errors[i] is None]
        if not coded:
            return errors
        found = list(errors)

        def decode_all() -> None:
            for i in coded:
                item = items[i]
                if not decode_layer(shapes_of(item.geometry), item.out, int(item.sums[item.layer]), views[i]):
                    found[i] = StorageError(f"block {item.key.hex()[:16]} changed in memory after it was read")

        await self._workers.run(decode_all)
        return found

    async def from_host(
        self, entry: NamespaceEntry, rows: Rows, layer: int, views: list[Bytes]
    ) -> list[StorageError | None]:
        """Decode a layer of blocks that are compressed in host. Forms that are damaged are dropped."""
        copies, shapes = self._copies, shapes_of(entry.geometry)
        cls = copies.host.class_for(shapes.form.slot_bytes, shapes.form.layers, entry.tenant)
        slots = copies.shapes.forms.slots(rows)
        copies.host.pool.hold(slots)
        sums, begin = copies.host.sums_of(cls, slots)[:, layer], layer * shapes.form.layer_stride
        good = np.zeros(rows.size, np.bool_)

        def decode_all() -> None:
            for i, slot in enumerate(slots.tolist()):
                coded = copies.host.view(cls, slot)[begin : begin + shapes.form.layer_stride]
                good[i] = decode_layer(shapes, coded, int(sums[i]), views[i])

        try:
            await self._workers.run(decode_all)
        finally:
            copies.host.release(cls, slots)
        damaged = rows[~good & copies.blocks.live(rows) & copies.shapes.forms.mask(rows)]
        if damaged.size:
            copies.counters["host_corrupt_blocks"] += damaged.size
            copies.drop_scattered(damaged)
        # Not a CorruptionError, for there may be a good copy on disk: that is tried next.
        return [None if is_good else StorageError("its compressed form in host is damaged") for is_good in good]
