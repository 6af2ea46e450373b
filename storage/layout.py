"""The format as structs: magics, sizes and byte tables of FORMAT.md, checked at import."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import numpy as np

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Codec, EncodedLayout, encodable
from kvtierd.core.units import PAGE_BYTES, align_up

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""What this code reads; it writes FORMAT_VERSION. What is older is taken over in place (FORMAT.md §8)."""

SUPERBLOCK_MAGIC = b"KVTSUPER"
SEGMENT_MAGIC = b"KVTSEGMT"
RECORD_MAGIC = b"KVTRECRD"

SUPERBLOCK = struct.Struct("<8sQII16sQ")
"""magic, checksum, version, copy, uuid, epoch."""
SEGMENT = struct.Struct("<8sQII16sQQQI")
"""magic, checksum, version, segment, uuid, generation, salt, segment_bytes, free."""
RECORD = struct.Struct("<8sQHBBIQQQIIQ32s32sQIIIIQ32x")
"""As RECORD_DTYPE."""

RECORD_DTYPE = np.dtype(
    [
        ("magic", "S8"),
        ("checksum", "<u8"),
        ("version", "<u2"),
        ("kind", "u1"),
        ("codec", "u1"),
        ("header_bytes", "<u4"),
        ("payload_bytes", "<u8"),
        ("sequence", "<u8"),
        ("generation", "<u8"),
        ("segment", "<u4"),
        ("count", "<u4"),
        ("offset", "<u8"),
        ("namespace", "<u8", 4),
        ("key", "<u8", 4),
        ("block_sum", "<u8"),
        ("layer_bytes", "<u4"),
        ("layer_stride", "<u4"),
        ("scale_offset", "<u4"),
        ("scale_bytes", "<u4"),
        ("origin", "<u8"),
        ("reserved", "V32"),
    ]
)
"""A record header without its body: what a scan keeps of each record, as columns."""

KILL_DTYPE = np.dtype([("namespace", "<u8", 4), ("key", "<u8", 4), ("sequence", "<u8")])
"""One entry of a tombstone."""

CHECKED_FROM = 16
"""Magic and checksum come first; the checksum covers everything behind them."""
MAX_HEADER_BYTES = 64 << 10
SEQUENCE_BITS = 40
"""Sequence numbers of one epoch: 2**40 of them."""
DIGEST_ZERO = bytes(32)
FIRST_RECORD = PAGE_BYTES

assert SUPERBLOCK.size == 48
assert SEGMENT.size == 68
assert RECORD.size == RECORD_DTYPE.itemsize == 192
assert KILL_DTYPE.itemsize == 72
MAX_KILLS = (MAX_HEADER_BYTES - RECORD.size) // KILL_DTYPE.itemsize


def header_bytes(body_bytes: int) -> int:
    """Size of a record's header, whole pages, for a body of so many bytes."""
    return align_up(RECORD.size + body_bytes)


def block_header_bytes(layers: int) -> int:
    """Size of the header of a BLOCK record."""
    return header_bytes(8 * layers)


CODECS = frozenset(Codec)
COLUMNS_OF_GROUPS = 3
"""Scales, and two columns of errors behind them, of as many bytes each."""


class BlockShape(NamedTuple):
    """What a geometry measures on disk in a codec, computed once: the properties of a Geometry are too dear per block.

    `scale_offset` and `scale_bytes` are where a layer's part holds its scales; both are 0 where it has none.
    """

    layers: int
    layer_bytes: int
    layer_stride: int
    payload_bytes: int
    header_bytes: int
    scale_offset: int = 0
    scale_bytes: int = 0

    @property
    def length(self) -> int:
        """Bytes of a BLOCK record."""
        return self.header_bytes + self.payload_bytes


@functools.lru_cache(maxsize=1024)
def block_shape(geometry: Geometry, codec: int = Codec.RAW) -> BlockShape:
    """The shape of a geometry's blocks. Raises ValueError for a codec that these blocks do not have."""
    layers, header = geometry.layers, block_header_bytes(geometry.layers)
    if codec == Codec.RAW:
        return BlockShape(layers, geometry.layer_bytes, geometry.layer_stride, geometry.slot_bytes, header)
    if codec != Codec.FP8_E4M3:
        raise ValueError(f"{codec} is no codec; there are {', '.join(f'{known} {known.name}' for known in Codec)}")
    form = EncodedLayout(geometry)
    scales = form.scales_offset, form.scale_bytes
    return BlockShape(layers, form.layer_bytes, form.layer_stride, form.slot_bytes, header, *scales)


def codec_problem(geometry: Geometry, codec: int) -> str:
    """Why blocks of this geometry cannot have this codec; "" where they can."""
    if codec in codecs_of(geometry):
        return ""
    known = ", ".join(f"{each} {each.name}" for each in codecs_of(geometry))
    return f"codec {codec} is none of those of {geometry.dtype} blocks with layout {geometry.layout}: {known}"


@functools.lru_cache(maxsize=1024)
def shape_of(geometry: Geometry, codec: int) -> tuple[BlockShape, str]:
    """The shape of blocks in a codec and ""; or that of their exact form, and `codec_problem`."""
    problem = codec_problem(geometry, codec)
    return block_shape(geometry, Codec.RAW if problem else codec), problem


def codecs_of(geometry: Geometry) -> tuple[Codec, ...]:
    """The codecs that blocks of this geometry may have."""
    return tuple(Codec) if encodable(geometry) else (Codec.RAW,)


def segment_name(segment: int) -> str:
    """File name of a segment."""
    return f"segment-{segment:06d}"


INDEX_FILES = ("checkpoint", "journal")


def index_name(kind: str, number: int) -> str:
    """File name of a checkpoint or journal."""
    return f"{kind}-{number:06d}"


def index_number(kind: str, name: str) -> int | None:
    """The number in the name of a file of this kind; None for any other name."""
    stem, _, digits = name.partition("-")
    if stem != kind or not digits.isdecimal() or not digits.isascii():
        return None
    number = int(digits)
    return number if index_name(kind, number) == name and 0 < number < 1 << 63 else None


def segment_id(name: str) -> int | None:
    """The id in a segment's file name; None for any other name."""
    stem, _, digits = name.partition("-")
    if stem != "segment" or not digits.isdecimal() or not digits.isascii():
        return None
    number = int(digits)
    return number if segment_name(number) == name and number < 1 << 32 else None
