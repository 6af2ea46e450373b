"""Segment headers: two copies that say whose a segment is and which life of it this is (FORMAT.md §3)."""

from __future__ import annotations

import dataclasses

import numpy as np
import xxhash

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.io import SegmentFile, read_exact, write_exact
from kvtierd.storage.layout import CHECKED_FROM, FIRST_RECORD, READABLE_VERSIONS, SEGMENT, SEGMENT_MAGIC
from kvtierd.storage.record import Life

EMPTY = "is empty"
"""What is said of a header page of zeros."""


def encode_header(life: Life, uuid: bytes, page: Bytes) -> None:
    """Write a segment header into `page` ([4096] uint8)."""
    page[:] = 0
    fields = (life.version, life.segment, uuid, life.generation, life.salt, life.size_bytes, life.free)
    SEGMENT.pack_into(page.data, 0, SEGMENT_MAGIC, 0, *fields)
    checksum = xxhash.xxh3_64_intdigest(page[CHECKED_FROM:].data)
    page[8:16] = np.frombuffer(checksum.to_bytes(8, "little"), np.uint8)


def decode_header(page: Bytes, segment: int, uuid: bytes) -> Life | None:
    """Read a segment header; None unless it is valid, of this store and this segment."""
    magic, checksum, version, number, owner, generation, salt, size, free = SEGMENT.unpack_from(page.data)
    if magic != SEGMENT_MAGIC or xxhash.xxh3_64_intdigest(page[CHECKED_FROM:PAGE_BYTES].data) != checksum:
        return None
    if version not in READABLE_VERSIONS or number != segment or owner != uuid or size % PAGE_BYTES:
        return None
    return Life(segment, generation, salt, size, version, free=free == 1)


def write_headers(file: SegmentFile, life: Life, uuid: bytes, scratch: Scratch) -> None:
    """Write a life's header, both copies where its version has two, and return when they are on stable storage."""
    page = scratch.headers[:PAGE_BYTES]
    encode_header(life, uuid, page)
    write_exact(file, [page], 0, scratch)
    if life.version > 1:
        write_exact(file, [page], life.end_bytes, scratch)
    file.sync()


@dataclasses.dataclass(frozen=True, slots=True)
class FoundHeader:
    """The life that a segment file names; None when no copy is valid. `problem` says what is wrong, if anything.

    `is_interrupted` says that a crash explains it: a file that had no header yet, or one of whose two copies only the
    first had been written anew. Nothing is lost then.
    """

    life: Life | None
    problem: str = ""
    is_interrupted: bool = False

    @property
    def lost(self) -> bool:
        """Whether there may be records that nobody can read."""
        return self.life is None and not self.is_interrupted


def read_headers(file: SegmentFile, number: int, uuid: bytes, scratch: Scratch) -> FoundHeader:
    """Read both copies of a segment's header; the valid one of the larger generation counts."""
    size = file.size_bytes() // PAGE_BYTES * PAGE_BYTES
    first, cause = _read_header(file, 0, number, uuid, scratch)
    if first is not None and first.version == 1:
        return FoundHeader(first)
    second, second_cause = _read_header(file, max(size - PAGE_BYTES, 0), number, uuid, scratch)
    if first is not None and second is not None:
        return _of_two(first, second)
    life = first or second
    if life is None:
        third = _read_header(file, FIRST_RECORD, number, uuid, scratch)[1]
        if cause == second_cause == third == EMPTY:
            return FoundHeader(None, "it was being made, and has no header yet", is_interrupted=True)
        return FoundHeader(None, f"its header {cause}, and the copy of it {second_cause}")
    what = f"its header {cause}" if first is None else f"the copy of its header {second_cause}"
    return FoundHeader(life, f"{what}; the other one counts", is_interrupted=second_cause == EMPTY)


def _of_two(first: Life, second: Life) -> FoundHeader:
    if first == second:
        return FoundHeader(first)
    newer = max(first, second, key=lambda life: life.generation)
    return FoundHeader(newer, "the copies of its header are of two lives; the later one counts", is_interrupted=True)


def _read_header(file: SegmentFile, offset: int, number: int, uuid: bytes, scratch: Scratch) -> tuple[Life | None, str]:
    page = scratch.headers[:PAGE_BYTES]
    try:
        read_exact(file, [page], offset, scratch)
    except OSError as error:
        return None, f"cannot be read ({error.strerror or error})"
    life = decode_header(page, number, uuid)
    if life is not None and life.version > 1 and offset not in {0, life.end_bytes}:
        return None, "is not where it should be"
    if life is not None:
        return life, ""
    return None, "is not valid" if page.any() else EMPTY
