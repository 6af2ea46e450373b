"""Reading one layer's part of stored blocks: no more of an extent than that, and its header where nobody knows it yet.

A layer sum is trusted because the block's header is: the sum of all layer sums must be the block's, which the caller
has in memory. With the layer sums of a header kept, later reads of the same block need the layer's bytes only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes, Sums, block_sum
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.units import PAGE_BYTES
from kvtierd.index.xxh3 import SHORTEST, sums_of, sums_of_parts
from kvtierd.storage.buffers import Scratch, address
from kvtierd.storage.interface import DiskError, GoneError, LayerParts
from kvtierd.storage.layout import BlockShape, block_shape
from kvtierd.storage.parts import PartReads, read_parts
from kvtierd.storage.pool import IoPool
from kvtierd.storage.reader import shape_problem
from kvtierd.storage.record import Kind, Life, decode, stored_sums
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import Segment, fingerprints
from kvtierd.storage.uninterrupted import uninterrupted

Indices = npt.NDArray[np.intp]
_NONE: Indices = np.zeros(0, np.intp)


@dataclasses.dataclass(slots=True)
class _Fetch:
    """Parts on their way; `errors` is why the bytes of some may not be used.

    `which` says in which of `segments` each lies, in their `lives` of when the fetch began ([n] int64).
    """

    parts: LayerParts
    shape: BlockShape
    all_known: bool
    which: npt.NDArray[np.int64]
    errors: dict[int, StorageError] = dataclasses.field(default_factory=dict)
    segments: list[Segment] = dataclasses.field(default_factory=list)
    lives: list[Life] = dataclasses.field(default_factory=list)
    headers: dict[int, Bytes] = dataclasses.field(default_factory=dict)

    @property
    def good(self) -> Indices:
        """Those without an error."""
        found = np.arange(len(self.parts))
        return np.delete(found, list(self.errors)) if self.errors else found

    @property
    def unknown(self) -> Indices:
        """Those without an error whose layer sums are not known."""
        if self.all_known:
            return _NONE
        good = self.good
        found: Indices = good[~self.parts.known[good]]
        return found

    @property
    def needed_bytes(self) -> int:
        """What is read, or was, of those without an error."""
        count = len(self.parts) - len(self.errors)
        return count * self.shape.layer_stride + self.unknown.size * self.shape.header_bytes

    def addresses(self, which: Indices) -> Sums:
        """Where these go in memory."""
        return (address(self.parts.memory) + self.parts.offsets[which]).astype(np.uint64)

    def where(self, i: int) -> str:
        """What messages call the place of a part."""
        extent = self.parts.extents[i]
        return f"segment {extent.segment} at {extent.offset}"


class LayerReads:
    """Reads batches of layer parts, each as one request of an I/O thread: the caller says how much is in flight.

    A segment that is read from is pinned, so that it is not recycled under it.
    """

    def __init__(self, ring: Ring, pool: IoPool, counters: Counter[str]) -> None:
        self._ring = ring
        self._pool = pool
        self._counters = counters

    async def read(self, parts: LayerParts) -> dict[int, StorageError]:
        """Fetch parts; see BlockStore.read_layers. Goes on to its end when it is cancelled."""
        shape = block_shape(parts.geometry, parts.codec)
        if problem := _problem(parts, shape):
            return {i: StorageError(problem) for i in range(len(parts))}
        fetch = _Fetch(parts, shape, bool(parts.known.all()), np.zeros(len(parts), np.int64))
        self._locate(fetch)
        if len(fetch.errors) < len(parts):
            await self._execute(fetch)
        self._count(fetch)
        return fetch.errors

    def _locate(self, fetch: _Fetch) -> None:
        parts, extents = fetch.parts, fetch.parts.extents
        prints = fingerprints(parts.namespace, parts.keys)
        there = np.zeros(len(parts), np.bool_)
        for number in dict.fromkeys(extents.segment.tolist()):
            segment = self._ring.get(number)
            if segment is None or segment.life is None:
                continue
            mine = extents.segment == number
            fetch.which[mine] = len(fetch.segments)
            fetch.segments.append(segment)
            fetch.lives.append(segment.life)
            there |= mine & segment.rows.are_live(extents, prints)
        if not there.all():
            for i in np.flatnonzero(~there).tolist():
                fetch.errors[i] = GoneError(f"{parts.name(i)} is no longer in {fetch.where(i)}")
        if (wrong := extents.length != fetch.shape.length).any():
            for i in np.flatnonzero(wrong).tolist():
                what = f"an extent of {extents.length[i]} bytes is no such block, which takes {fetch.shape.length}"
                fetch.errors[i] = StorageError(what)

    async def _execute(self, fetch: _Fetch) -> None:
        for segment in fetch.segments:
            segment.pin()
        try:
            submitted = self._pool.read(
                lambda scratch: _transfer(fetch, scratch), lambda _: _verify(fetch), fetch.needed_bytes
            )
            await uninterrupted(submitted)
        finally:
            for segment in fetch.segments:
                segment.unpin()

    def _count(self, fetch: _Fetch) -> None:
        self._counters["read_layer_parts"] += len(fetch.parts) - len(fetch.errors)
        self._counters["read_bytes"] += fetch.needed_bytes
        for error in fetch.errors.values():
            if isinstance(error, CorruptionError):
                self._counters["corrupt_reads"] += 1
            elif isinstance(error, GoneError):
                self._counters["gone_reads"] += 1
            else:
                self._counters["failed_reads"] += 1


def _problem(parts: LayerParts, shape: BlockShape) -> str:
    """Why nothing of this can be read; "" where it can."""
    if not 0 <= parts.layer < shape.layers:
        return f"layer {parts.layer} is not in 0..{shape.layers - 1}"
    last = int(parts.offsets.max(initial=0)) + shape.layer_stride
    if parts.memory.dtype != np.uint8 or parts.offsets.min(initial=0) < 0 or last > parts.memory.size:
        return f"a layer takes {shape.layer_stride} bytes, and not all lie within uint8[{parts.memory.size}]"
    if parts.sums.shape != (len(parts), shape.layers) or parts.sums.dtype != np.uint64:
        wanted = f"uint64({len(parts)}, {shape.layers})"
        return f"layer sums go into {wanted}, not {parts.sums.dtype}{parts.sums.shape}"
    return ""


def _transfer(fetch: _Fetch, scratch: Scratch) -> None:
    """Bring the bytes; one that cannot be read does not hold up the others."""
    parts, shape, unknown = fetch.parts, fetch.shape, fetch.unknown
    if unknown.size:
        room = scratch.headers.size // shape.header_bytes
        for i in unknown[room:].tolist():
            fetch.errors[i] = StorageError(f"{parts.name(i)}: too many headers in one request")
        unknown = unknown[:room]
    begins = np.arange(unknown.size) * shape.header_bytes
    for i, begin in zip(unknown.tolist(), begins.tolist(), strict=True):
        fetch.headers[i] = scratch.headers[begin : begin + shape.header_bytes]
    good = fetch.good
    index = np.concatenate([unknown, good]) if unknown.size else good
    starts = parts.extents.page[index].astype(np.int64) * PAGE_BYTES
    starts[unknown.size :] += shape.header_bytes + parts.layer * shape.layer_stride
    sizes = np.full(index.size, shape.layer_stride, np.int64)
    sizes[: unknown.size] = shape.header_bytes
    addresses = np.concatenate([(address(scratch.headers) + begins).astype(np.uint64), fetch.addresses(good)])
    files = [segment.file for segment in fetch.segments]
    errors = read_parts(PartReads(files, fetch.which[index], addresses, sizes, starts), scratch)
    for place, error in errors.items():
        i = int(index[place])
        cause = error.strerror or error
        fetch.errors[i] = DiskError(f"cannot read {parts.name(i)} of {fetch.where(i)}: {cause}")


def _verify(fetch: _Fetch) -> None:
    parts = fetch.parts
    for i, header in fetch.headers.items():
        if i not in fetch.errors and (error := _verify_header(fetch, i, header)) is not None:
            fetch.errors[i] = error
    good = fetch.good
    for i in good[_sums(fetch, good) != parts.sums[good, parts.layer]].tolist():
        what = f"the bytes of layer {parts.layer} of {parts.name(i)} are damaged"
        fetch.errors[i] = CorruptionError(f"{fetch.where(i)}: {what}")


def _sums(fetch: _Fetch, which: Indices) -> Sums:
    """What these parts sum up to."""
    size = fetch.shape.layer_bytes
    if size >= SHORTEST:
        return sums_of(fetch.addresses(which), size)
    begins = fetch.parts.offsets[which].tolist()
    return np.array(sums_of_parts([fetch.parts.memory[begin : begin + size] for begin in begins], size), np.uint64)


def _verify_header(fetch: _Fetch, i: int, view: Bytes) -> StorageError | None:
    """Check that this is the block's header, and take its layer sums."""
    parts, where, name = fetch.parts, fetch.where(i), fetch.parts.name(i)
    header = decode(view, fetch.lives[fetch.which[i]], parts.extents[i].offset)
    if header is None:
        return CorruptionError(f"{where}: the header is damaged or of another life of the segment")
    if (header.kind, header.namespace, header.key) != (Kind.BLOCK, parts.namespace, parts.keys[i].tobytes()):
        return CorruptionError(f"{where}: another record than {name} lies here")
    if problem := shape_problem(header, parts.geometry, parts.codec):
        return CorruptionError(f"{where}: {name} {problem}")
    found = stored_sums(view, header)
    if not block_sum(found) == header.block_sum == int(parts.block_sums[i]):
        return CorruptionError(f"{where}: {name} is not the one that was stored")
    parts.sums[i] = found
    return None
