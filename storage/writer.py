"""One write request: records that lie side by side, verified, encoded and written by an I/O thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from kvtierd.core.checksum import Bytes, block_sum
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.keys import KEY_BYTES
from kvtierd.core.units import KIB, MIB
from kvtierd.storage.buffers import HEADERS_BYTES, Scratch
from kvtierd.storage.hashing import sums_of_blocks
from kvtierd.storage.interface import DiskError, WriteItem
from kvtierd.storage.io import write_exact
from kvtierd.storage.layout import BlockShape, header_bytes, shape_of
from kvtierd.storage.record import BlockFields, Kill, Kind, Life, RecordHeader, encode, encode_block
from kvtierd.storage.segment import Segment

RUN_BYTES = 4 * MIB + 64 * KIB
"""Records are gathered into requests of this size: the way from one request to the next counts for little beside what
it takes the disk, and a read that comes meanwhile waits for no longer one. A larger record is a request of its own."""
RUN_RECORDS = 128
"""Most records of a request: their headers fit the memory for them, their buffers one system call."""

assert RUN_RECORDS * 2 < 1024  # IOV_MAX
EMPTY = np.empty(0, np.uint8)


@dataclasses.dataclass(slots=True)
class Draft:
    """A record on its way: `body` and `item` are what it will hold, the rest is known once it has a place.

    `shape` is the block's; `length` counts header and payload. `error` is why it was not written; `segment` is -1 while
    it has no place.
    """

    kind: Kind
    namespace: bytes
    header_bytes: int
    length: int
    body: Bytes = dataclasses.field(default_factory=lambda: EMPTY)
    count: int = 0
    item: WriteItem | None = None
    shape: BlockShape | None = None
    kills: Sequence[Kill] = dataclasses.field(default=())
    segment: int = -1
    life: Life | None = None
    offset: int = 0
    sequence: int = 0
    origin: int = 0
    block_sum: int = 0
    row: int = -1
    rewrite: bool = False
    error: StorageError | None = None


@dataclasses.dataclass(slots=True)
class Run:
    """Drafts placed one behind the other in one segment: one write request. `memory` is for their headers."""

    segment: Segment
    life: Life
    drafts: list[Draft] = dataclasses.field(default_factory=list)
    length: int = 0
    headers: int = 0
    memory: Bytes = dataclasses.field(default_factory=lambda: EMPTY)

    def add(self, draft: Draft) -> None:
        """Take in a record that lies behind the last one."""
        self.drafts.append(draft)
        self.length += draft.length
        self.headers += draft.header_bytes

    def takes(self, draft: Draft) -> bool:
        """Whether the request may grow by this record."""
        return not self.drafts or (
            self.length + draft.length <= RUN_BYTES
            and len(self.drafts) < RUN_RECORDS
            and self.headers + draft.header_bytes <= HEADERS_BYTES
        )


def prepare_run(run: Run, memory: Bytes) -> None:
    """Verify each source, and encode the headers into `memory` ([>= run.headers] uint8) in the order of the drafts.

    What is not good leaves a hole. Outcomes are left in `Draft.error`.
    """
    run.memory = memory
    used = 0
    _verify_sources(run.drafts)
    for draft in run.drafts:
        if draft.error is None:
            _encode(draft, run.life, memory[used : used + draft.header_bytes])
        used += draft.header_bytes


def write_run(run: Run, scratch: Scratch) -> None:
    """Write what `prepare_run` found good. Outcomes are left in `Draft.error`."""
    for piece, used in _pieces(run.drafts):
        try:
            _write_piece(run, piece, used, scratch)
        except OSError as error:
            where = f"segment {run.life.segment} at {piece[0].offset}"
            for draft in piece:
                draft.error = DiskError(f"cannot write {draft.length} bytes to {where}: {error.strerror or error}")


def _item_error(item: WriteItem, shape: BlockShape) -> StorageError | None:
    """Why an item cannot be a record at all: its arrays do not fit its geometry, or its key is none."""
    if item.data.shape != (shape.payload_bytes,) or item.data.dtype != np.uint8:
        return StorageError(
            f"block data is {item.data.dtype}{item.data.shape}; uint8({shape.payload_bytes},) is wanted"
        )
    if item.sums.shape != (shape.layers,) or item.sums.dtype != np.uint64:
        return StorageError(f"layer sums are {item.sums.dtype}{item.sums.shape}; uint64({shape.layers},) is wanted")
    if len(item.key) != KEY_BYTES:
        return StorageError(f"a key of {len(item.key)} bytes; {KEY_BYTES} are wanted")
    return None


def _verify_sources(drafts: list[Draft]) -> None:
    """Set the error of blocks whose bytes are not those of their sums."""
    groups: dict[BlockShape, list[tuple[Draft, WriteItem]]] = {}
    for draft in drafts:
        if draft.item is not None and draft.shape is not None:
            groups.setdefault(draft.shape, []).append((draft, draft.item))
    for shape, blocks in groups.items():
        found = sums_of_blocks([item.data for _, item in blocks], shape)
        for sums, (draft, item) in zip(found, blocks, strict=True):
            if sums.tobytes() != item.sums.tobytes():
                layer = int(np.flatnonzero(sums != item.sums)[0])
                draft.error = CorruptionError(
                    f"block {item.key.hex()[:16]} changed before it was stored: the sum of layer {layer} differs"
                )


def _pieces(drafts: list[Draft]) -> Iterator[tuple[list[Draft], int]]:
    """Split at records that are not written: (drafts, where their headers begin in the run's memory)."""
    piece: list[Draft] = []
    begin = end = 0
    for draft in drafts:
        if draft.error is None:
            piece.append(draft)
        elif piece:
            yield piece, begin
            piece = []
        end += draft.header_bytes
        begin = begin if piece else end
    if piece:
        yield piece, begin


def _write_piece(run: Run, piece: list[Draft], used: int, scratch: Scratch) -> None:
    buffers: list[Bytes] = []
    for draft in piece:
        buffers.append(run.memory[used : used + draft.header_bytes])
        used += draft.header_bytes
        if draft.item is not None:
            buffers.append(draft.item.data)
    write_exact(run.segment.file, buffers, piece[0].offset, scratch)


def _encode(draft: Draft, life: Life, page: Bytes) -> None:
    item = draft.item
    if item is None:
        header = RecordHeader(
            draft.kind, draft.offset, draft.sequence, draft.header_bytes, count=draft.count, namespace=draft.namespace
        )
        encode(header, draft.body, life, page)
        return
    assert draft.shape is not None
    draft.block_sum = block_sum(item.sums)
    fields = BlockFields(item.namespace, item.key, draft.block_sum, draft.shape, item.codec)
    encode_block(fields, item.sums, draft.offset, draft.sequence, draft.origin, life, page)


def block_draft(item: WriteItem) -> Draft:
    """A block's record; its error is set where it cannot be one."""
    shape, problem = shape_of(item.geometry, item.codec)
    error = StorageError(problem) if problem else _item_error(item, shape)
    return Draft(Kind.BLOCK, item.namespace, shape.header_bytes, shape.length, item=item, shape=shape, error=error)


def header_draft(kind: Kind, namespace: bytes, body: Bytes, count: int, kills: Sequence[Kill] = ()) -> Draft:
    """A record without payload."""
    size = header_bytes(body.size)
    return Draft(kind, namespace, size, size, body, count, kills=kills)
