"""Journal and checkpoint as bytes: frames of rows, each with a checksum of its own (FORMAT.md §6)."""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtierd.core.namespace import Namespace
from kvtierd.storage.layout import CHECKED_FROM, FORMAT_VERSION

Rows = npt.NDArray[np.void]

FRAME_MAGIC = b"KVTINDEX"
FRAME = struct.Struct("<8sQHBBIQQQ16s")
"""magic, checksum, version, kind, zero, count, body_bytes, file, frame, uuid."""
SPACE = struct.Struct("<II32s")
"""One namespace of a NAMESPACES frame: its number in the file, bytes of its encoding, digest; the encoding follows."""
END = struct.Struct("<QQ")
"""Body of an END frame: blocks in the file, bytes that the store has written in all its life."""
BEGIN = struct.Struct("<Q")
"""Body of a BEGIN frame: frames of an earlier journal that were on stable storage when this one was begun, and in the
bits from BETWEEN_SHIFT on how many journals lie between the two: those that had nothing on stable storage."""
BETWEEN_SHIFT = 48
BETWEEN_MAX = (1 << 64 - BETWEEN_SHIFT) - 1

ENTRY_DTYPE = np.dtype(
    [
        ("key", "<u8", 4),
        ("sequence", "<u8"),
        ("origin", "<u8"),
        ("block_sum", "<u8"),
        ("segment", "<u4"),
        ("page", "<u4"),
        ("space", "<u4"),
        ("codec", "u1"),
        ("reserved", "V3"),
    ]
)
"""A block: `page` is the offset of its record in the segment / 4096, `space` its namespace's number in the file."""
KILL_ENTRY_DTYPE = np.dtype([("key", "<u8", 4), ("sequence", "<u8"), ("space", "<u4"), ("reserved", "V4")])
"""A kill, as in a TOMBSTONE."""
HEAD_DTYPE = np.dtype([("generation", "<u8"), ("head", "<u8"), ("segment", "<u4"), ("sealed", "<u4")])
"""Records of this life before `head` are all in the index; `sealed` says that none will follow."""
FRAME_ROWS = 1 << 14
"""Most rows of a frame, so that one damaged bit costs no more than these."""

assert FRAME.size == 64
assert ENTRY_DTYPE.itemsize == 72
assert KILL_ENTRY_DTYPE.itemsize == 48
assert HEAD_DTYPE.itemsize == 24


class FrameKind(enum.IntEnum):
    """What a frame holds."""

    NAMESPACES = 1
    BLOCKS = 2
    KILLS = 3
    HEADS = 4
    END = 5
    BEGIN = 6


FIXED_SIZES = {FrameKind.END: END.size, FrameKind.BEGIN: BEGIN.size}
ROW_DTYPES = {FrameKind.BLOCKS: ENTRY_DTYPE, FrameKind.KILLS: KILL_ENTRY_DTYPE, FrameKind.HEADS: HEAD_DTYPE}


@dataclasses.dataclass(slots=True)
class Contents:
    """What a file of frames holds up to its first invalid frame.

    `spaces` is digest and namespace by number; a namespace is None where only its digest is known, or its encoding
    could not be read. `blocks` and `kills` name these numbers. `valid_bytes` is where the valid frames end, `frames`
    how many they are; `ended` is True for a whole checkpoint. `before` and `between` are what BEGIN says of an earlier
    journal.
    """

    spaces: dict[int, tuple[bytes, Namespace | None]]
    blocks: Rows
    kills: Rows
    heads: Rows
    valid_bytes: int = 0
    frames: int = 0
    before: int = 0
    between: int = 0
    ended: bool = False
    lifetime_bytes: int = 0


class FrameWriter:
    """Makes the frames of one file, numbered from 0, and gives namespaces their numbers in it."""

    def __init__(self, uuid: bytes, file: int) -> None:
        self._uuid = uuid
        self._file = file
        self._next = 0
        self.spaces: dict[bytes, int] = {}
        self._whole: set[bytes] = set()

    def namespaces(self, known: list[tuple[bytes, Namespace | None]]) -> Iterator[bytes]:
        """Frames that number these, those that have no number yet or were only a digest before."""
        body = bytearray()
        count = 0
        for digest, namespace in known:
            if digest in self._whole or (digest in self.spaces and namespace is None):
                continue
            number = self.spaces.setdefault(digest, len(self.spaces))
            if namespace is not None:
                self._whole.add(digest)
            encoded = msgspec.msgpack.encode(namespace) if namespace is not None else b""
            body += SPACE.pack(number, len(encoded), digest) + encoded
            count += 1
        if count:
            yield self._frame(FrameKind.NAMESPACES, count, bytes(body))

    def rows(self, kind: FrameKind, rows: Rows) -> Iterator[bytes]:
        """Frames of rows; `space` in them must be numbers of this file."""
        for begin in range(0, len(rows), FRAME_ROWS):
            piece = np.ascontiguousarray(rows[begin : begin + FRAME_ROWS])
            yield self._frame(kind, len(piece), piece.tobytes())

    @property
    def frames(self) -> int:
        """Frames made so far."""
        return self._next

    def begin(self, before: int, between: int = 0) -> bytes:
        """The frame that starts a journal."""
        return self._frame(FrameKind.BEGIN, 1, BEGIN.pack(before | between << BETWEEN_SHIFT))

    def end(self, blocks: int, lifetime_bytes: int) -> bytes:
        """The frame that makes a checkpoint whole."""
        return self._frame(FrameKind.END, 1, END.pack(blocks, lifetime_bytes))

    def _frame(self, kind: FrameKind, count: int, body: bytes) -> bytes:
        fields = (FORMAT_VERSION, kind, 0, count, len(body), self._file, self._next, self._uuid)
        self._next += 1
        frame = bytearray(FRAME.pack(FRAME_MAGIC, 0, *fields) + body)
        frame[8:16] = xxhash.xxh3_64_intdigest(memoryview(frame)[CHECKED_FROM:]).to_bytes(8, "little")
        return bytes(frame)


def decode_file(data: bytes, uuid: bytes, file: int) -> Contents:
    """Read the valid frames that start a file; whatever follows the first invalid one is left alone."""
    spaces: dict[int, tuple[bytes, Namespace | None]] = {}
    rows: dict[FrameKind, list[Rows]] = {kind: [np.empty(0, dtype)] for kind, dtype in ROW_DTYPES.items()}
    none = {kind: np.empty(0, dtype) for kind, dtype in ROW_DTYPES.items()}
    found = Contents(spaces, none[FrameKind.BLOCKS], none[FrameKind.KILLS], none[FrameKind.HEADS])
    for kind, count, body, end in _frames(data, uuid, file):
        if kind == FrameKind.NAMESPACES:
            spaces.update(_spaces(body, count))
        elif kind == FrameKind.BEGIN:
            (word,) = BEGIN.unpack(body)
            found.before, found.between = word & (1 << BETWEEN_SHIFT) - 1, word >> BETWEEN_SHIFT
        elif kind == FrameKind.END:
            blocks, found.lifetime_bytes = END.unpack(body)
            found.ended = blocks == sum(map(len, rows[FrameKind.BLOCKS]))  # means nothing in a journal
        else:
            rows[FrameKind(kind)].append(np.frombuffer(body, ROW_DTYPES[FrameKind(kind)], count))
        found.valid_bytes = end
        found.frames += 1
    found.blocks = np.concatenate(rows[FrameKind.BLOCKS])
    found.kills = np.concatenate(rows[FrameKind.KILLS])
    found.heads = np.concatenate(rows[FrameKind.HEADS])
    return found


def _frames(data: bytes, uuid: bytes, file: int) -> Iterator[tuple[int, int, memoryview, int]]:
    """Kind, count, body and end of each valid frame."""
    view, at, number = memoryview(data), 0, 0
    while at + FRAME.size <= len(view):
        magic, checksum, version, kind, _, count, size, of_file, own, owner = FRAME.unpack_from(view, at)
        end = at + FRAME.size + size
        named = magic == FRAME_MAGIC and version == FORMAT_VERSION and kind in FrameKind._value2member_map_
        if not named or (of_file, own, owner) != (file, number, uuid) or end > len(view):
            return
        if xxhash.xxh3_64_intdigest(view[at + CHECKED_FROM : end]) != checksum or not _fits(kind, count, size):
            return
        yield kind, count, view[at + FRAME.size : end], end
        at, number = end, number + 1


def _fits(kind: int, count: int, size: int) -> bool:
    """Whether a body has the size that its rows take; a checksum does not protect against a writer's bug."""
    if kind == FrameKind.NAMESPACES:
        return size >= count * SPACE.size
    if kind in FIXED_SIZES:
        return size == FIXED_SIZES[FrameKind(kind)]
    return size == count * ROW_DTYPES[FrameKind(kind)].itemsize


def _spaces(body: memoryview, count: int) -> Iterator[tuple[int, tuple[bytes, Namespace | None]]]:
    at = 0
    for _ in range(count):
        if at + SPACE.size > len(body):
            return
        number, size, digest = SPACE.unpack_from(body, at)
        at += SPACE.size
        yield number, (digest, _namespace(bytes(body[at : at + size]), digest))
        at += size


def _namespace(encoded: bytes, digest: bytes) -> Namespace | None:
    """A namespace; None where it is not known or not the one that the digest names."""
    if not encoded:
        return None
    try:
        namespace = msgspec.msgpack.decode(encoded, type=Namespace)
    except (msgspec.DecodeError, ValueError):
        return None
    return namespace if namespace.digest() == digest else None
