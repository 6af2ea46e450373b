"""One read request: extents that lie side by side, fetched with one call and verified just after by an I/O thread."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvtierd.core.checksum import Bytes, block_sum
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Codec
from kvtierd.core.units import KIB, MIB
from kvtierd.storage.buffers import HEADERS_BYTES, Scratch
from kvtierd.storage.hashing import sums_of_blocks
from kvtierd.storage.interface import DiskError, ReadItem
from kvtierd.storage.io import read_exact
from kvtierd.storage.layout import RECORD, BlockShape, block_shape, shape_of
from kvtierd.storage.record import BlockFields, Kind, Life, RecordHeader, decode, names_block, stored_sums
from kvtierd.storage.segment import Segment
from kvtierd.storage.writer import RUN_RECORDS

RUN_BYTES = 4 * MIB + 64 * KIB
"""Neighbours are read in requests of this size: larger ones leave threads without work where few blocks are read, and
keep a block waiting for the last one of its request."""


@dataclasses.dataclass(slots=True)
class Fetch:
    """An item on its way; `error` is why its bytes may not be used."""

    item: ReadItem
    shape: BlockShape
    error: StorageError | None = None


@dataclasses.dataclass(slots=True)
class ReadRun:
    """Fetches one behind the other in one segment: one read request."""

    segment: Segment
    life: Life
    fetches: list[Fetch] = dataclasses.field(default_factory=list)
    length: int = 0
    headers: int = 0
    views: list[Bytes] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> int:
        """Offset behind the last fetch."""
        extent = self.fetches[-1].item.extent
        return extent.offset + extent.length

    def add(self, fetch: Fetch) -> None:
        """Take in a fetch that lies behind the last one."""
        self.fetches.append(fetch)
        self.length += fetch.item.extent.length
        self.headers += fetch.shape.header_bytes

    def takes(self, segment: Segment, fetch: Fetch) -> bool:
        """Whether the request may grow by this extent."""
        extent = fetch.item.extent
        return (
            self.segment is segment
            and self.end == extent.offset
            and self.length + extent.length <= RUN_BYTES
            and len(self.fetches) < RUN_RECORDS
            and self.headers + fetch.shape.header_bytes <= HEADERS_BYTES
        )


def fetch_run(run: ReadRun, scratch: Scratch) -> None:
    """Bring the bytes. When a request for several fails, each is tried alone: a bad sector costs one block.

    Headers stay in the thread's scratch until `verify_run`, its next step.
    """
    run.views = _views(run, scratch)
    try:
        _transfer(run, run.fetches, run.views, scratch)
    except OSError as error:
        if len(run.fetches) == 1:
            run.fetches[0].error = _read_error(run, run.fetches[0], error)
            return
        for fetch, view in zip(run.fetches, run.views, strict=True):
            try:
                _transfer(run, [fetch], [view], scratch)
            except OSError as cause:
                fetch.error = _read_error(run, fetch, cause)


def verify_run(run: ReadRun) -> None:
    """Check what was fetched; outcomes are left in `Fetch.error`."""
    groups: dict[BlockShape, list[tuple[Fetch, Bytes]]] = {}
    for fetch, view in zip(run.fetches, run.views, strict=True):
        if fetch.error is None:
            groups.setdefault(fetch.shape, []).append((fetch, view))
    for shape, fetched in groups.items():
        found = sums_of_blocks([fetch.item.out for fetch, _ in fetched], shape)
        for sums, (fetch, view) in zip(found, fetched, strict=True):
            fetch.item.sums[:] = sums
            if not _is_whole(run.life, fetch, view):
                fetch.error = _verify(run.life, fetch.item, view)


def fetch_of(item: ReadItem) -> Fetch:
    """An item to be fetched; its error is set where it cannot be."""
    shape, problem = shape_of(item.geometry, item.codec)
    return Fetch(item, shape, StorageError(problem) if problem else item_error(item, shape))


def item_error(item: ReadItem, shape: BlockShape) -> StorageError | None:
    """Why an item cannot be read at all: its arrays or its extent do not fit its geometry."""
    if item.out.shape != (shape.payload_bytes,) or item.out.dtype != np.uint8:
        return StorageError(f"a block goes into uint8({shape.payload_bytes},), not {item.out.dtype}{item.out.shape}")
    if item.sums.shape != (shape.layers,) or item.sums.dtype != np.uint64:
        return StorageError(f"layer sums go into uint64({shape.layers},), not {item.sums.dtype}{item.sums.shape}")
    if item.extent.length != shape.length:
        found = item.extent.length
        return StorageError(f"an extent of {found} bytes is no block of this geometry, which takes {shape.length}")
    return None


def _views(run: ReadRun, scratch: Scratch) -> list[Bytes]:
    """A place for each header."""
    views: list[Bytes] = []
    used = 0
    for fetch in run.fetches:
        views.append(scratch.headers[used : used + fetch.shape.header_bytes])
        used += fetch.shape.header_bytes
    return views


def _transfer(run: ReadRun, fetches: list[Fetch], views: list[Bytes], scratch: Scratch) -> None:
    buffers = [buffer for fetch, view in zip(fetches, views, strict=True) for buffer in (view, fetch.item.out)]
    read_exact(run.segment.file, buffers, fetches[0].item.extent.offset, scratch)


def _read_error(run: ReadRun, fetch: Fetch, error: OSError) -> StorageError:
    extent = fetch.item.extent
    where = f"segment {run.life.segment} at {extent.offset}"
    return DiskError(f"cannot read {extent.length} bytes of {where}: {error.strerror or error}")


def _is_whole(life: Life, fetch: Fetch, view: Bytes) -> bool:
    """Whether these are the block's bytes; `_verify` says why not."""
    item, shape = fetch.item, fetch.shape
    fields = BlockFields(item.namespace, item.key, item.block_sum, shape, item.codec)
    sums = np.ascontiguousarray(item.sums, "<u8")
    return (
        names_block(view, fields, item.extent.offset, life)
        and sums.tobytes() == view.data[RECORD.size : RECORD.size + sums.nbytes]
        and block_sum(sums) == item.block_sum
    )


def _verify(life: Life, item: ReadItem, view: Bytes) -> StorageError | None:
    """Check that these are the block's bytes, whole: header, identity, geometry, and every layer against its sum.

    `item.sums` are those of the bytes.
    """
    where = f"segment {life.segment} at {item.extent.offset}"
    header = decode(view, life, item.extent.offset)
    if header is None:
        return CorruptionError(f"{where}: the header is damaged or of another life of the segment")
    if (header.kind, header.namespace, header.key) != (Kind.BLOCK, item.namespace, item.key):
        return CorruptionError(f"{where}: another record than block {item.key.hex()[:16]} lies here")
    if problem := shape_problem(header, item.geometry, item.codec):
        return CorruptionError(f"{where}: block {item.key.hex()[:16]} {problem}")
    if not np.array_equal(item.sums, stored_sums(view, header)):
        layer = int(np.flatnonzero(item.sums != stored_sums(view, header))[0])
        return CorruptionError(f"{where}: the bytes of layer {layer} of block {item.key.hex()[:16]} are damaged")
    if not block_sum(item.sums) == header.block_sum == item.block_sum:
        return CorruptionError(f"{where}: block {item.key.hex()[:16]} is not the one that was stored")
    return None


def shape_problem(header: RecordHeader, geometry: Geometry, codec: int) -> str:
    """What is wrong with the form that a header names; "" where it is the one that is wanted."""
    if header.codec != codec:
        return f"is stored as {Codec(header.codec).name}, not {Codec(codec).name}"
    form = (header.payload_bytes, header.header_bytes, header.scale_offset, header.scale_bytes)
    found = (header.count, header.layer_bytes, header.layer_stride, *form)
    return "" if found == block_shape(geometry, codec) else "has another geometry than its namespace"
