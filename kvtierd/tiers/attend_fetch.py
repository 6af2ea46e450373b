"""Bringing parts of blocks into the staging ring: from nvme, from extents of other sizes, from a gpu out of reach."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Codec, EncodedLayout
from kvtierd.core.token_spans import copy_tokens
from kvtierd.index.xxh3 import sums_of_parts
from kvtierd.protocol.messages import TIER_NVME
from kvtierd.storage.interface import BlockStore, Extent, Extents, GoneError, LayerParts
from kvtierd.storage.layout import block_shape
from kvtierd.tiers.attend_places import Fidelity, Numbers, Place, lossy_at, places_of
from kvtierd.tiers.attend_ring import StagingRing
from kvtierd.tiers.attend_stream import Job
from kvtierd.tiers.attend_times import AttendTimes
from kvtierd.tiers.blocks import READ_BACK
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.sequences import OpenedSequence
from kvtierd.tiers.shapes import HeldPiece
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)

Indices = npt.NDArray[np.intp]
Bring = Callable[[OpenedSequence, int, Job, Indices], Coroutine[Any, Any, None]]
"""Bring some parts of a job from one place: sequence, layer, job, which of the job's blocks."""

_NVME = int(Place.NVME)
_TO_BRING = tuple(
    map(int, (_NVME, Place.SCATTERED, Place.COMPRESSED, Place.HOST, Place.GPU, Place.GPU_ONLY, Place.NOWHERE))
)
"""The places, in the order in which parts are brought from them."""


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

    async def fetch(self, sequence: OpenedSequence, layer: int, job: Job) -> None:
        """Bring the parts of a job; `job.errors` says which did not come, and why."""
        rows, fidelity = sequence.rows[job.numbers], job.stream.fidelity
        places = job.places = places_of(self._copies, rows, fidelity)
        for place in _TO_BRING if (places != places[0]).any() else (int(places[0]),):
            which = np.flatnonzero(places == place)
            if 0 < which.size < rows.size:
                # Some may have moved while others were brought; until they are held none can.
                moved = places_of(self._copies, rows[which], fidelity) != place
                for i in which[moved].tolist():
                    job.errors[i] = StorageError("the block has moved meanwhile")
                which = which[~moved]
            if which.size:
                job.lossy[which] = lossy_at(self._copies, rows[which], places[which])
                busy = self._times.disk if place == _NVME else self._times.copy
                await busy.of(self._how_to_bring(place)(sequence, layer, job, which))

    def _how_to_bring(self, place: int) -> Bring:
        if place == _NVME:
            return self._from_nvme
        if place in {Place.GPU, Place.GPU_ONLY}:
            return self._from_gpu
        others = {
            Place.SCATTERED: self._from_extents,
            Place.COMPRESSED: self._from_compressed,
            Place.HOST: self._from_host,
        }
        return others.get(Place(place), self._from_nowhere)

    def _views(self, sequence: OpenedSequence, job: Job, which: Indices) -> list[Bytes]:
        """Where these parts of a job go."""
        size = sequence.entry.geometry.layer_stride
        return [self._ring.view(job.offset + i * size, size) for i in which.tolist()]

    async def _from_nvme(self, sequence: OpenedSequence, layer: int, job: Job, which: Indices) -> None:
        """Read the parts in the form in which they are stored; codes are decoded by the kernel."""
        forms = self._copies.shapes.forms
        if not forms.seen:
            await self._in_form(sequence, layer, job, which, Codec.RAW)
            return
        coded = forms.in_tier(sequence.rows[job.numbers[which]], TIER_NVME)
        groups = ((Codec.RAW, which[~coded]), (Codec.FP8_E4M3, which[coded]))
        reads = [self._in_form(sequence, layer, job, some, codec) for codec, some in groups if some.size]
        # Both end before the job does: they write into its memory.
        for error in await asyncio.gather(*reads, return_exceptions=True):
            if error is not None:
                raise error

    async def _in_form(self, sequence: OpenedSequence, layer: int, job: Job, which: Indices, codec: Codec) -> None:
        assert self._store is not None
        copies, entry, table = self._copies, sequence.entry, self._copies.blocks.table
        numbers, step = job.numbers[which], entry.geometry.layer_stride
        rows = sequence.rows[numbers]
        # Others may be on disk with other bytes than before.
        exact = copies.shapes.forms.lossy[rows] == 0
        length = block_shape(entry.geometry, codec).length
        parts = LayerParts(
            namespace=entry.stored_digest,
            geometry=entry.geometry,
            layer=layer,
            keys=table.key[rows],
            extents=Extents(
                table.segment[rows].view(np.uint32), table.extent_page[rows], np.full(rows.size, length, np.int64)
            ),
            block_sums=copies.shapes.forms.nvme_sums(rows),
            memory=self._ring.memory,
            offsets=job.offset + step * which,
            sums=sequence.sums[numbers],
            known=sequence.known[numbers] & exact,
            codec=codec,
        )
        job.codecs[which] = codec
        errors = await self._store.read_layers(parts)
        if errors:
            good = np.delete(np.arange(rows.size), list(errors))
            for i, error in errors.items():
                job.errors[int(which[i])] = error
                self._lost(int(rows[i]), parts.extents[i], error)
            numbers, rows, exact, sums = numbers[good], rows[good], exact[good], parts.sums[good]
        else:
            sums = parts.sums
        sequence.sums[numbers], sequence.known[numbers] = sums, exact
        copies.blocks.mark_as(rows, READ_BACK)

    def _lost(self, row: int, extent: Extent, error: StorageError) -> None:
        """A part could not be read: a corrupt block is dropped for good, unless it lies elsewhere by now."""
        if isinstance(error, GoneError):  # it lies elsewhere, or is a miss, which the store counts
            return
        _log.warning("attention: %s", error, extra=self._copies.log_fields(row, "nvme"))
        if not isinstance(error, CorruptionError):
            self._copies.counters["attend_failed_parts"] += 1
            return
        self._copies.counters["onboard_corrupt_blocks"] += 1
        table = self._copies.blocks.table
        if (table.segment[row], table.extent_page[row]) == (extent.segment, extent.offset >> 12):
            self._copies.drop_nvme(np.array([row], np.int32))

    async def _from_extents(self, sequence: OpenedSequence, layer: int, job: Job, which: Indices) -> None:
        """Gather blocks from the extents that they lie in; these are held meanwhile."""
        held, views = self._copies.shapes.hold(sequence.rows[job.numbers[which]]), self._views(sequence, job, which)
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

    async def _from_compressed(self, sequence: OpenedSequence, layer: int, job: Job, which: Indices) -> None:
        """Copy codes and scales of blocks that are compressed in host, verified. Forms that are damaged are dropped."""
        copies, host, entry, rows = self._copies, self._copies.host, sequence.entry, sequence.rows[job.numbers[which]]
        views = self._views(sequence, job, which)
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
        job.codecs[which] = Codec.FP8_E4M3
        bad = np.array(found, np.uint64) != np.array(sums, np.uint64)
        damaged = rows[bad & copies.blocks.live(rows) & forms.mask(rows)]
        if damaged.size:
            copies.counters["host_corrupt_blocks"] += damaged.size
            copies.drop_scattered(damaged)
        # Not a CorruptionError, for there may be a good copy on disk: that is tried next.
        for i in which[bad].tolist():
            job.errors[i] = StorageError("its compressed form in host is damaged")

    async def _from_host(self, sequence: OpenedSequence, layer: int, job: Job, which: Indices) -> None:
        """Copy out of host slots that blocks have got meanwhile."""
        host, cls, table = self._copies.host, self._copies.host_class(sequence.entry), self._copies.blocks.table
        begin = layer * sequence.entry.geometry.layer_stride
        slots, views = table.host_slot[sequence.rows[job.numbers[which]]], self._views(sequence, job, which)
        host.pool.hold(slots)

        def copy() -> None:
            for slot, view in zip(slots.tolist(), views, strict=True):
                view[:] = host.view(cls, slot)[begin : begin + view.size]

        try:
            await self._workers.run(copy)
        finally:
            host.release(cls, slots)

    async def _from_gpu(self, sequence: OpenedSequence, layer: int, job: Job, which: Indices) -> None:
        """Copy out of slots of a gpu, which the processor may not be able to read."""
        gpu = self._copies.gpu
        assert gpu is not None
        cls, begin = self._copies.gpu_class(sequence.entry), layer * sequence.entry.geometry.layer_stride
        slots = self._copies.blocks.table.gpu_slot[sequence.rows[job.numbers[which]]]
        views = self._views(sequence, job, which)
        gpu.pool.hold(slots)

        def copy() -> None:
            for slot, view in zip(slots.tolist(), views, strict=True):
                gpu.copy_part_out(cls, slot, begin, view)

        try:
            await self._workers.run(copy)
        finally:
            gpu.release(cls, slots)

    async def _from_nowhere(self, _sequence: OpenedSequence, _layer: int, job: Job, which: Indices) -> None:
        for i in which.tolist():
            job.errors[i] = StorageError("the block is in no tier any more")


def _one_layer(geometry: Geometry) -> Geometry:
    return msgspec.structs.replace(geometry, layers=1)


def _of_tokens(geometry: Geometry, piece: HeldPiece) -> Geometry:
    return msgspec.structs.replace(geometry, block_size=piece.of_tokens)
