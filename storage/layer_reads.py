"""Reading one layer's part of stored blocks: no more of an extent than that, and its header where nobody knows it yet.

A layer sum is trusted because the block's header is: the sum of all layer sums must be the block's, which the caller
has in memory. With the layer sums of a header kept, later reads of the same block need the layer's bytes only.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kvtierd.core.checksum import Bytes, block_sum
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.index.xxh3 import sums_of_parts
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.interface import DiskError, GoneError, LayerItem
from kvtierd.storage.layout import BlockShape, block_shape
from kvtierd.storage.parts import PartRead, read_parts
from kvtierd.storage.pool import IoPool
from kvtierd.storage.reader import shape_problem
from kvtierd.storage.record import Kind, Life, decode, stored_sums
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import Segment, fingerprint


@dataclasses.dataclass(slots=True)
class _Fetch:
    """An item on its way; `error` is why its bytes may not be used."""

    item: LayerItem
    shape: BlockShape
    error: StorageError | None = None
    segment: Segment | None = None
    life: Life | None = None
    header: Bytes | None = None

    @property
    def where(self) -> str:
        return f"segment {self.item.extent.segment} at {self.item.extent.offset}"

    @property
    def name(self) -> str:
        return f"block {self.item.key.hex()[:16]}"


class LayerReads:
    """Reads batches of layer parts, each as one request of an I/O thread: the caller says how much is in flight.

    A segment that is read from is pinned, so that it is not recycled under it.
    """

    def __init__(self, ring: Ring, pool: IoPool, counters: Counter[str]) -> None:
        self._ring = ring
        self._pool = pool
        self._counters = counters

    async def read(self, items: Sequence[LayerItem]) -> list[StorageError | None]:
        """Fetch parts; see BlockStore.read_layers."""
        fetches = [
            _Fetch(item, shape := block_shape(item.geometry, item.codec), _item_error(item, shape)) for item in items
        ]
        for fetch in fetches:
            if fetch.error is None:
                self._locate(fetch)
        good = [fetch for fetch in fetches if fetch.error is None]
        if good:
            await self._execute(good)
        for fetch in fetches:
            self._count(fetch)
        return [fetch.error for fetch in fetches]

    def _locate(self, fetch: _Fetch) -> None:
        item = fetch.item
        segment = self._ring.get(item.extent.segment)
        row = segment.rows.find(item.extent) if segment is not None else -1
        if segment is None or row < 0 or segment.rows.prints[row] != fingerprint(item.namespace, item.key):
            fetch.error = GoneError(f"{fetch.name} is no longer in {fetch.where}")
            return
        fetch.segment, fetch.life = segment, segment.life

    async def _execute(self, fetches: list[_Fetch]) -> None:
        segments = {fetch.segment.number: fetch.segment for fetch in fetches if fetch.segment is not None}
        for segment in segments.values():
            segment.pin()
        try:
            size = sum(_needed_bytes(fetch) for fetch in fetches)
            submitted = self._pool.read(
                lambda scratch: _transfer_all(fetches, scratch), lambda _: _verify_all(fetches), size
            )
            await asyncio.wait([submitted])
        finally:
            for segment in segments.values():
                segment.unpin()
        submitted.result()

    def _count(self, fetch: _Fetch) -> None:
        if fetch.error is None:
            self._counters["read_layer_parts"] += 1
            self._counters["read_bytes"] += _needed_bytes(fetch)
        elif isinstance(fetch.error, CorruptionError):
            self._counters["corrupt_reads"] += 1
        elif isinstance(fetch.error, GoneError):
            self._counters["gone_reads"] += 1
        else:
            self._counters["failed_reads"] += 1


def _needed_bytes(fetch: _Fetch) -> int:
    return fetch.shape.layer_stride + (0 if fetch.item.known else fetch.shape.header_bytes)


def _item_error(item: LayerItem, shape: BlockShape) -> StorageError | None:
    if not 0 <= item.layer < shape.layers:
        return StorageError(f"layer {item.layer} is not in 0..{shape.layers - 1}")
    if item.out.shape != (shape.layer_stride,) or item.out.dtype != np.uint8:
        return StorageError(f"a layer goes into uint8({shape.layer_stride},), not {item.out.dtype}{item.out.shape}")
    if item.sums.shape != (shape.layers,) or item.sums.dtype != np.uint64:
        return StorageError(f"layer sums go into uint64({shape.layers},), not {item.sums.dtype}{item.sums.shape}")
    if item.extent.length != shape.length:
        return StorageError(f"an extent of {item.extent.length} bytes is no such block, which takes {shape.length}")
    return None


def _transfer_all(fetches: list[_Fetch], scratch: Scratch) -> None:
    """Bring the bytes; one that cannot be read does not hold up the others."""
    used = 0
    reads: list[tuple[_Fetch, PartRead]] = []
    for fetch in fetches:
        if not fetch.item.known:
            if used + fetch.shape.header_bytes > scratch.headers.size:
                fetch.error = StorageError(f"{fetch.name}: too many headers in one request")
                continue
            fetch.header = scratch.headers[used : used + fetch.shape.header_bytes]
            used += fetch.shape.header_bytes
        reads += [(fetch, read) for read in _reads_of(fetch)]
    read_parts([read for _, read in reads], scratch)
    for fetch, read in reads:
        if read.error is not None:
            cause = read.error.strerror or read.error
            fetch.error = DiskError(f"cannot read {fetch.name} of {fetch.where}: {cause}")


def _reads_of(fetch: _Fetch) -> Iterator[PartRead]:
    item, shape, segment = fetch.item, fetch.shape, fetch.segment
    assert segment is not None
    if fetch.header is not None:
        yield PartRead(segment.file, fetch.header, item.extent.offset)
    begin = item.extent.offset + shape.header_bytes + item.layer * shape.layer_stride
    yield PartRead(segment.file, item.out, begin)


def _verify_all(fetches: list[_Fetch]) -> None:
    for fetch in fetches:
        if fetch.error is None and fetch.header is not None:
            fetch.error = _verify_header(fetch, fetch.header)
    for size in {fetch.shape.layer_bytes for fetch in fetches}:
        good = [fetch for fetch in fetches if fetch.error is None and fetch.shape.layer_bytes == size]
        for fetch, found in zip(good, sums_of_parts([fetch.item.out for fetch in good], size), strict=True):
            if found != int(fetch.item.sums[fetch.item.layer]):
                what = f"the bytes of layer {fetch.item.layer} of {fetch.name} are damaged"
                fetch.error = CorruptionError(f"{fetch.where}: {what}")


def _verify_header(fetch: _Fetch, view: Bytes) -> StorageError | None:
    """Check that this is the block's header, and take its layer sums."""
    item, life = fetch.item, fetch.life
    assert life is not None
    header = decode(view, life, item.extent.offset)
    if header is None:
        return CorruptionError(f"{fetch.where}: the header is damaged or of another life of the segment")
    if (header.kind, header.namespace, header.key) != (Kind.BLOCK, item.namespace, item.key):
        return CorruptionError(f"{fetch.where}: another record than {fetch.name} lies here")
    if problem := shape_problem(header, item.geometry, item.codec):
        return CorruptionError(f"{fetch.where}: {fetch.name} {problem}")
    found = stored_sums(view, header)
    if not block_sum(found) == header.block_sum == item.block_sum:
        return CorruptionError(f"{fetch.where}: {fetch.name} is not the one that was stored")
    item.sums[:] = found
    return None
