"""Bringing parts of blocks into the staging ring: from nvme, from extents of other sizes, from a gpu out of reach."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Codec, EncodedLayout, form_of
from kvtierd.core.token_spans import copy_tokens
from kvtierd.index.xxh3 import sums_of_parts
from kvtierd.storage.interface import BlockStore, GoneError, LayerItem
from kvtierd.tiers.attend_places import Codecs, Fidelity, Numbers, Place, lossy_at, places_of
from kvtierd.tiers.attend_ring import StagingRing
from kvtierd.tiers.attend_stream import Job
from kvtierd.tiers.attend_times import AttendTimes
from kvtierd.tiers.blocks import READ_BACK
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.sequences import OpenedSequence
from kvtierd.tiers.shapes import HeldPiece
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)

Errors = list[StorageError | None]


class PartFetcher:
    """Fills jobs from where their blocks are when the job begins. What is damaged on disk is dropped from there."""

    def __init__(
        self, copies: Copies, store: BlockStore | None, workers: Workers, ring: StagingRing, times: AttendTimes
    ) -> None:
        self._times = times
        self._copies = copies
        self._store = store
        self._workers = workers
        self._ring = ring

    def count_in_nvme(self, sequence: OpenedSequence, numbers: Numbers, fidelity: Fidelity) -> int:
        """How many of these blocks would be read from nvme now."""
        places = places_of(self._copies, sequence.rows[numbers], fidelity)
        return int(np.count_nonzero(places == Place.NVME))

    async def fetch(self, sequence: OpenedSequence, layer: int, job: Job) -> Errors:
        """Bring the parts of a job; None for each that came whole."""
        errors: Errors = [None] * job.numbers.size
        rows, fidelity = sequence.rows[job.numbers], job.stream.fidelity
        places = job.places = places_of(self._copies, rows, fidelity)
        for place, bring in (
            (Place.NVME, self._from_nvme),
            (Place.SCATTERED, self._from_extents),
            (Place.COMPRESSED, self._from_compressed),
            (Place.HOST, self._from_host),
            (Place.GPU, self._from_gpu),
            (Place.GPU_ONLY, self._from_gpu),
            (Place.NOWHERE, self._from_nowhere),
        ):
            which = np.flatnonzero(places == place)
            if not which.size:
                continue
            if which.size < rows.size:  # some may have moved while others were brought; until they are held none can
                moved = places_of(self._copies, rows[which], fidelity) != place
                for i in which[moved].tolist():
                    errors[i] = StorageError("the block has moved meanwhile")
                which = which[~moved]
            job.lossy[which] = lossy_at(self._copies, rows[which], places[which])
            if which.size:
                busy = self._times.disk if place == Place.NVME else self._times.copy
                await busy.of(self._some(bring, sequence, layer, job, which, errors))
        return errors

    async def _some(
        self,
        bring: Callable[[OpenedSequence, int, Numbers, list[Bytes], Codecs], Awaitable[Errors]],
        sequence: OpenedSequence,
        layer: int,
        job: Job,
        which: Numbers,
        errors: Errors,
    ) -> None:
        size = sequence.entry.geometry.layer_stride
        views = [self._ring.view(job.offset + i * size, size) for i in which.tolist()]
        codecs = np.zeros(which.size, np.uint8)
        found = await bring(sequence, layer, job.numbers[which], views, codecs)
        job.codecs[which] = codecs
        for i, error in zip(which.tolist(), found, strict=True):
            errors[i] = error

    async def _from_nvme(
        self, sequence: OpenedSequence, layer: int, numbers: Numbers, views: list[Bytes], codecs: Codecs
    ) -> Errors:
        """Read the parts in the form in which they are stored; codes are decoded by the kernel."""
        assert self._store is not None
        copies, entry, table = self._copies, sequence.entry, self._copies.blocks.table
        forms, sums = copies.shapes.forms, sequence.sums[numbers]
        rows = sequence.rows[numbers].tolist()
        exact = forms.lossy[sequence.rows[numbers]] == 0  # others may be on disk with other bytes than before
        known = (sequence.known[numbers] & exact).tolist()
        items = [
            LayerItem(
                entry.stored_digest,
                table.key[row].tobytes(),
                entry.geometry,
                copies.extent(row, entry),
                forms.nvme_sum(row),
                layer,
                views[i][: form_of(entry.geometry, forms.nvme_codec(row)).layer_stride],
                sums[i],
                known[i],
                forms.nvme_codec(row),
            )
            for i, row in enumerate(rows)
        ]
        codecs[:] = [item.codec for item in items]
        errors = await self._store.read_layers(items)
        good = np.array([error is None for error in errors])
        sequence.sums[numbers[good]], sequence.known[numbers[good]] = sums[good], exact[good]
        copies.blocks.mark_as(sequence.rows[numbers[good]], READ_BACK)
        for row, item, error in zip(rows, items, errors, strict=True):
            if error is not None:
                self._lost(row, item, error)
        return errors

    def _lost(self, row: int, item: LayerItem, error: StorageError) -> None:
        """A part could not be read: a corrupt block is dropped for good, unless it lies elsewhere by now."""
        if isinstance(error, GoneError):  # it lies elsewhere, or is a miss, which the store counts
            return
        _log.warning("attention: %s", error, extra=self._copies.log_fields(row, "nvme"))
        if not isinstance(error, CorruptionError):
            self._copies.counters["attend_failed_parts"] += 1
            return
        self._copies.counters["onboard_corrupt_blocks"] += 1
        table = self._copies.blocks.table
        if (table.segment[row], table.extent_page[row]) == (item.extent.segment, item.extent.offset >> 12):
            self._copies.drop_nvme(np.array([row], np.int32))

    async def _from_extents(
        self, sequence: OpenedSequence, layer: int, numbers: Numbers, views: list[Bytes], _codecs: Codecs
    ) -> Errors:
        """Gather blocks from the extents that they lie in; these are held meanwhile."""
        held = self._copies.shapes.hold(sequence.rows[numbers])
        host, shape = self._copies.host, _one_layer(sequence.entry.geometry)

        def gather() -> None:
            for piece in held:
                of = _one_layer(_of_tokens(shape, piece))
                begin = layer * of.layer_stride
                source = host.view(piece.cls, piece.slot)[begin : begin + of.layer_stride]
                copy_tokens(source, of, piece.offset, views[piece.block], shape, piece.first, piece.tokens)

        try:
            await self._workers.run(gather)
        finally:
            self._copies.shapes.release(held)
        return [None] * numbers.size

    async def _from_compressed(
        self, sequence: OpenedSequence, layer: int, numbers: Numbers, views: list[Bytes], codecs: Codecs
    ) -> Errors:
        """Copy codes and scales of blocks that are compressed in host, verified. Forms that are damaged are dropped."""
        copies, host, entry, rows = self._copies, self._copies.host, sequence.entry, sequence.rows[numbers]
        forms, form = copies.shapes.forms, EncodedLayout(entry.geometry)
        cls, slots = host.class_for(form.slot_bytes, form.layers, entry.tenant), forms.slots(rows)
        host.pool.hold(slots)
        sums, begin = host.sums_of(cls, slots)[:, layer].tolist(), layer * form.layer_stride

        def copy() -> list[int]:
            for slot, view in zip(slots.tolist(), views, strict=True):
                view[: form.layer_stride] = host.view(cls, slot)[begin : begin + form.layer_stride]
            return sums_of_parts(views, form.layer_bytes)

        try:
            found = await self._workers.run(copy)
        finally:
            host.release(cls, slots)
        codecs[:] = Codec.FP8_E4M3
        bad = np.array(found, np.uint64) != np.array(sums, np.uint64)
        damaged = rows[bad & copies.blocks.live(rows) & forms.mask(rows)]
        if damaged.size:
            copies.counters["host_corrupt_blocks"] += damaged.size
            copies.drop_scattered(damaged)
        # Not a CorruptionError, for there may be a good copy on disk: that is tried next.
        return [StorageError("its compressed form in host is damaged") if is_bad else None for is_bad in bad.tolist()]

    async def _from_host(
        self, sequence: OpenedSequence, layer: int, numbers: Numbers, views: list[Bytes], _codecs: Codecs
    ) -> Errors:
        """Copy out of host slots that blocks have got meanwhile."""
        host, cls = self._copies.host, self._copies.host_class(sequence.entry)
        begin = layer * sequence.entry.geometry.layer_stride
        slots = self._copies.blocks.table.host_slot[sequence.rows[numbers]]
        host.pool.hold(slots)

        def copy() -> None:
            for slot, view in zip(slots.tolist(), views, strict=True):
                view[:] = host.view(cls, slot)[begin : begin + view.size]

        try:
            await self._workers.run(copy)
        finally:
            host.release(cls, slots)
        return [None] * numbers.size

    async def _from_gpu(
        self, sequence: OpenedSequence, layer: int, numbers: Numbers, views: list[Bytes], _codecs: Codecs
    ) -> Errors:
        """Copy out of slots of a gpu, which the processor may not be able to read."""
        gpu = self._copies.gpu
        assert gpu is not None
        cls, begin = self._copies.gpu_class(sequence.entry), layer * sequence.entry.geometry.layer_stride
        slots = self._copies.blocks.table.gpu_slot[sequence.rows[numbers]]
        gpu.pool.hold(slots)

        def copy() -> None:
            for slot, view in zip(slots.tolist(), views, strict=True):
                gpu.copy_part_out(cls, slot, begin, view)

        try:
            await self._workers.run(copy)
        finally:
            gpu.release(cls, slots)
        return [None] * numbers.size

    async def _from_nowhere(
        self, _sequence: OpenedSequence, _layer: int, numbers: Numbers, _views: list[Bytes], _codecs: Codecs
    ) -> Errors:
        return [StorageError("the block is in no tier any more")] * numbers.size


def _one_layer(geometry: Geometry) -> Geometry:
    return msgspec.structs.replace(geometry, layers=1)


def _of_tokens(geometry: Geometry, piece: HeldPiece) -> Geometry:
    return msgspec.structs.replace(geometry, block_size=piece.of_tokens)
