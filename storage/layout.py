"""The format as structs: magics, sizes and byte tables of FORMAT.md, checked at import."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import numpy as np

from kvtierd.core.geometry import Geometry
from kvtierd.core.units import PAGE_BYTES, align_up

FORMAT_VERSION = 1

SUPERBLOCK_MAGIC = b"KVTSUPER"
SEGMENT_MAGIC = b"KVTSEGMT"
RECORD_MAGIC = b"KVTRECRD"

SUPERBLOCK = struct.Struct("<8sQII16sQ")
"""magic, checksum, version, copy, uuid, epoch."""
SEGMENT = struct.Struct("<8sQII16sQQQ")
"""magic, checksum, version, segment, uuid, generation, salt, segment_bytes."""
RECORD = struct.Struct("<8sQHBBIQQQIIQ32s32sQII48x")
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
        ("reserved", "V48"),
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
assert SEGMENT.size == 64
assert RECORD.size == RECORD_DTYPE.itemsize == 192
assert KILL_DTYPE.itemsize == 72
MAX_KILLS = (MAX_HEADER_BYTES - RECORD.size) // KILL_DTYPE.itemsize


def header_bytes(body_bytes: int) -> int:
    """Size of a record's header, whole pages, for a body of so many bytes."""
    return align_up(RECORD.size + body_bytes)


def block_header_bytes(layers: int) -> int:
    """Size of the header of a BLOCK record."""
    return header_bytes(8 * layers)


class BlockShape(NamedTuple):
    """What a geometry measures on disk, computed once: the properties of a Geometry are too dear per block."""

    layers: int
    layer_bytes: int
    layer_stride: int
    payload_bytes: int
    header_bytes: int

    @property
    def length(self) -> int:
        """Bytes of a BLOCK record."""
        return self.header_bytes + self.payload_bytes


@functools.lru_cache(maxsize=1024)
def block_shape(geometry: Geometry) -> BlockShape:
    """The shape of a geometry's blocks."""
    layers, header = geometry.layers, block_header_bytes(geometry.layers)
    return BlockShape(layers, geometry.layer_bytes, geometry.layer_stride, geometry.slot_bytes, header)


def segment_name(segment: int) -> str:
    """File name of a segment."""
    return f"segment-{segment:06d}"


def segment_id(name: str) -> int | None:
    """The id in a segment's file name; None for any other name."""
    stem, _, digits = name.partition("-")
    if stem != "segment" or not digits.isdecimal() or not digits.isascii():
        return None
    number = int(digits)
    return number if segment_name(number) == name and number < 1 << 32 else None
