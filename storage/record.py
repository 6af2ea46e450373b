"""Record headers: encoding, and the checks that make a page of bytes a header (FORMAT.md §4)."""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage import layout
from kvtierd.storage.layout import CHECKED_FROM, CODECS, FORMAT_VERSION, RECORD, RECORD_MAGIC

_CHECKSUM = struct.Struct("<Q")
_ZEROS = memoryview(bytes(layout.MAX_HEADER_BYTES))


class Kind(enum.IntEnum):
    """What a record is."""

    BLOCK = 1
    NAMESPACE = 2
    TOMBSTONE = 3


Kill = tuple[bytes, bytes, int]
"""Namespace digest and key of what a tombstone kills, and the largest origin that it kills."""


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """One life of a segment: what every record header of it must name, and the seed of their checksums.

    A life that is `free` has no records: it ends another one, and is ended before a record is written.
    """

    segment: int
    generation: int
    salt: int
    size_bytes: int
    version: int = FORMAT_VERSION
    free: bool = False

    @property
    def end_bytes(self) -> int:
        """Where records must end: the last page holds the second copy of the header, from version 2 on."""
        return self.size_bytes - (PAGE_BYTES if self.version > 1 else 0)

    @property
    def seed(self) -> int:
        """Seed of the record checksums."""
        return self.generation ^ self.salt


@dataclasses.dataclass(frozen=True, slots=True)
class RecordHeader:
    """The fields of a header that vary; position and generation come from where it lies.

    `origin` is the sequence number under which a block was first stored: not its own where it was written again.
    """

    kind: Kind
    offset: int
    sequence: int
    header_bytes: int
    payload_bytes: int = 0
    count: int = 0
    namespace: bytes = layout.DIGEST_ZERO
    key: bytes = layout.DIGEST_ZERO
    block_sum: int = 0
    layer_bytes: int = 0
    layer_stride: int = 0
    codec: int = Codec.RAW
    scale_offset: int = 0
    scale_bytes: int = 0
    origin: int = 0

    @property
    def length(self) -> int:
        """Bytes of header and payload."""
        return self.header_bytes + self.payload_bytes

    @property
    def body_bytes(self) -> int:
        """Bytes of the body that follows the fixed part."""
        if self.kind is Kind.BLOCK:
            return 8 * self.count
        return self.count if self.kind is Kind.NAMESPACE else layout.KILL_DTYPE.itemsize * self.count


def encode(header: RecordHeader, body: Bytes, life: Life, target: Bytes) -> None:
    """Write a header into `target` ([header_bytes] uint8), checksum last; what the body leaves is zeroed."""
    fields = (
        life.version,
        header.kind,
        header.codec,
        header.header_bytes,
        header.payload_bytes,
        header.sequence,
        life.generation,
        life.segment,
        header.count,
        header.offset,
        header.namespace,
        header.key,
        header.block_sum,
        header.layer_bytes,
        header.layer_stride,
        header.scale_offset,
        header.scale_bytes,
        _origin(header.origin, header.sequence, life),
    )
    _put(target, fields, body, life)


@dataclasses.dataclass(slots=True)
class BlockFields:
    """What the header of a BLOCK record says of its block: `encode_block` and `names_block` take no other object,
    because one for each header costs more than the rest of what is done with it."""

    namespace: bytes
    key: bytes
    block_sum: int
    shape: layout.BlockShape
    codec: int


def encode_block(
    block: BlockFields, sums: Sums, offset: int, sequence: int, origin: int, life: Life, target: Bytes
) -> None:
    """As `encode` of the header of a BLOCK record at `offset`; `sums` ([layers] u64) are its body."""
    shape = block.shape
    fields = (
        life.version,
        Kind.BLOCK,
        block.codec,
        shape.header_bytes,
        shape.payload_bytes,
        sequence,
        life.generation,
        life.segment,
        shape.layers,
        offset,
        block.namespace,
        block.key,
        block.block_sum,
        shape.layer_bytes,
        shape.layer_stride,
        shape.scale_offset,
        shape.scale_bytes,
        _origin(origin, sequence, life),
    )
    _put(target, fields, np.ascontiguousarray(sums, "<u8").view(np.uint8), life)


def names_block(view: Bytes, block: BlockFields, offset: int, life: Life) -> bool:
    """Whether the header that starts `view` is valid for this place, and says just this.

    So does `decode` with each field compared, which can tell what is wrong; this is for the many that are right.
    """
    shape, data = block.shape, view.data
    (magic, checksum, version, *about, sequence, generation, segment, count, at, digest, key, total, layer, stride,
     scale_offset, scale_bytes, origin) = RECORD.unpack_from(data)  # fmt: skip
    return bool(
        (magic, version, generation, segment, at) == (RECORD_MAGIC, life.version, life.generation, life.segment, offset)
        and (digest, key, total) == (block.namespace, block.key, block.block_sum)
        and about == [Kind.BLOCK, block.codec, shape.header_bytes, shape.payload_bytes]
        and (count, layer, stride) == (shape.layers, shape.layer_bytes, shape.layer_stride)
        and (scale_offset, scale_bytes) == (shape.scale_offset, shape.scale_bytes)
        and origin <= sequence
        and offset + shape.length <= life.end_bytes
        and xxhash.xxh3_64_intdigest(data[CHECKED_FROM : shape.header_bytes], life.seed) == checksum
    )


def _origin(origin: int, sequence: int, life: Life) -> int:
    return (origin or sequence) if life.version > 1 else 0


def _put(target: Bytes, fields: tuple[Any, ...], body: Bytes, life: Life) -> None:
    # By way of memoryviews: each assignment to an array would let go of the GIL, and wait to have it again.
    data, end = target.data, RECORD.size + body.size
    RECORD.pack_into(data, 0, RECORD_MAGIC, 0, *fields)
    data[RECORD.size : end] = body.data
    data[end:] = _ZEROS[: len(data) - end]
    _CHECKSUM.pack_into(data, 8, xxhash.xxh3_64_intdigest(data[CHECKED_FROM:], life.seed))


def claimed_header_bytes(page: Bytes, life: Life, offset: int) -> int:
    """How long a header at the start of `page` says it is, 0 if it is none of this life or cannot be that long.

    Nothing is verified yet: it says how much to read for `decode`.
    """
    magic, _, version, _, _, size, _, _, generation, *_ = RECORD.unpack_from(page.data)
    if magic != RECORD_MAGIC or version != life.version or generation != life.generation:
        return 0
    aligned = size % PAGE_BYTES == 0 and PAGE_BYTES <= size <= layout.MAX_HEADER_BYTES
    return size if aligned and offset + size <= life.end_bytes else 0


def decode(view: Bytes, life: Life, offset: int) -> RecordHeader | None:
    """Read the header that starts `view`; None unless it is valid for this place (FORMAT.md §6.2)."""
    size = claimed_header_bytes(view, life, offset)
    if size == 0 or size > view.size:
        return None
    values = RECORD.unpack_from(view.data)
    _, checksum, _, kind, codec, _, payload, sequence, _, segment, count, at, digest, key, total, *form, origin = values
    if xxhash.xxh3_64_intdigest(view[CHECKED_FROM:size].data, life.seed) != checksum:
        return None
    if segment != life.segment or at != offset or codec not in CODECS or kind not in Kind._value2member_map_:
        return None
    layer, stride, *scales = form
    about = (size, payload, count, digest, key, total, layer, stride, codec, *scales, origin or sequence)
    header = RecordHeader(Kind(kind), offset, sequence, *about)
    return header if _consistent(header, life) else None


def _consistent(header: RecordHeader, life: Life) -> bool:
    """Whether the sizes agree with each other; a checksum does not protect against a writer's bug."""
    if header.header_bytes != layout.header_bytes(header.body_bytes):
        return False
    if header.offset + header.length > life.end_bytes:
        return False
    if header.origin > header.sequence:
        return False
    form = header.scale_offset + layout.COLUMNS_OF_GROUPS * header.scale_bytes
    if form != (header.layer_bytes if header.codec != Codec.RAW else 0):
        return False
    payload = header.count * header.layer_stride if header.kind is Kind.BLOCK else 0
    return header.payload_bytes == payload and payload % PAGE_BYTES == 0


def body_of(view: Bytes, header: RecordHeader) -> Bytes:
    """The body of a decoded header, as a view."""
    return view[RECORD.size : RECORD.size + header.body_bytes]


def stored_sums(view: Bytes, header: RecordHeader) -> Sums:
    """Layer sums of a BLOCK header, [layers] u64, as a view."""
    return body_of(view, header).view("<u8")


def namespace_body(namespace: Namespace) -> Bytes:
    """Encode a namespace for its record."""
    return np.frombuffer(msgspec.msgpack.encode(namespace), np.uint8)


def stored_namespace(view: Bytes, header: RecordHeader) -> Namespace | None:
    """The namespace of a NAMESPACE header; None when it is not one, or not the one that the digest names."""
    try:
        namespace = msgspec.msgpack.decode(body_of(view, header).tobytes(), type=Namespace)
    except (msgspec.DecodeError, ValueError):
        return None
    return namespace if namespace.digest() == header.namespace else None


def kill_body(kills: Sequence[Kill]) -> Bytes:
    """Encode (namespace digest, key, sequence) entries for a tombstone."""
    return np.frombuffer(b"".join(n + k + s.to_bytes(8, "little") for n, k, s in kills), np.uint8)


def stored_kills(view: Bytes, header: RecordHeader) -> npt.NDArray[np.void]:
    """The entries of a TOMBSTONE header, KILL_DTYPE, as a copy."""
    return body_of(view, header).view(layout.KILL_DTYPE).copy()
