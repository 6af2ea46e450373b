"""What the daemon leaves for its next life beside the rows of blocks: what changes too often for a row of its own.

Heat and uses, what was learned of returns, operators' pins, and blocks that lie in FP8. It is written every so often
and at the end, whole, into a memory file of its own that nobody maps: a header, and one snapshot behind it.

    0    16   magic
    16    8   offset of the snapshot
    24    8   its bytes
    32    8   xxh3-64 of its bytes
    40    8   xxh3-64 of the header up to here

A new snapshot is written beside the old one, then the header names it, then the old one's pages are given back: after
a kill -9 at any moment one of the two is there. What it says of a slot is true only while the slot's generation is that
of the snapshot; what came later is not known to it.
"""

from __future__ import annotations

import os
import struct
from typing import Final

import msgspec
import numpy as np
import xxhash

from kvtierd.core.units import PAGE_BYTES, align_up
from kvtierd.storage.punch import punch

FORMAT: Final = 1
MAX_BYTES: Final = 1 << 34

_MAGIC: Final = b"kvtierd snapshot"
_HEADER = struct.Struct("<16sQQQ")
_SUM = struct.Struct("<Q")

USE = np.dtype(
    [
        ("place", "<i8"),  # of the slot: as in the table of rows, slabs have `stride` places each
        ("generation", "<u8"),
        ("parent", "<i8"),  # place of the block before it, or -1
        ("last_access_s", "<u4"),
        ("at", "<u4"),  # in ticks
        ("heat", "<u2"),
        ("kind", "<u2"),  # plus 1; 0 for none
        ("pace", "u1"),
        ("marks", "u1"),
        ("pad", "u1", 2),
    ]
)
"""Of a block in a slot of its own."""
FORM = np.dtype(
    [
        ("place", "<i8"),
        ("generation", "<u8"),
        ("key", "u1", 32),
        ("block_sum", "<u8"),  # of the exact block
        ("decoded_sum", "<u8"),  # of a decoded one
        ("namespace", "<u4"),
        ("last_access_s", "<u4"),
        ("heat", "<u2"),
        ("marks", "u1"),
        ("pad", "u1", 5),
    ]
)
"""Of a block that lies in FP8, or that was decoded: a row of the table says nothing of either."""


class Forms(msgspec.Struct, frozen=True):
    """Compressed forms of one shape, or decoded blocks: FORM [n] and their layer sums u64 [n, layers]."""

    decoded: bool
    layers: int
    rows: bytes
    sums: bytes


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """An extent of another size: `tokens` of a block from `first` on, or several blocks. Keys are [n, 32], block sums
    u64 [n], layer sums u64 [layers]."""

    place: int
    generation: int
    namespace: int
    first: int
    tokens: int
    keys: bytes
    block_sums: bytes
    sums: bytes


class Pins(msgspec.Struct, frozen=True):
    """Blocks of one namespace that operators pinned: keys [n, 32]."""

    namespace: int
    keys: bytes


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `learned` are arrays by name (kvtierd.policy.returns), which mean something to one version only."""

    format: int = FORMAT
    version: str = ""
    uses: bytes = b""
    forms: list[Forms] = []
    extents: list[Extent] = []
    pins: list[Pins] = []
    learned: dict[str, bytes] = {}


_decode = msgspec.msgpack.Decoder(Snapshot).decode
_encode = msgspec.msgpack.Encoder().encode


class SnapshotFile:
    """The file. With `fd` that of an earlier life."""

    def __init__(self, fd: int = -1) -> None:
        self.fd = os.memfd_create("kvtierd-snapshot", os.MFD_CLOEXEC) if fd < 0 else fd

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)

    def read(self) -> Snapshot | None:
        """What is there; None where there is nothing that is whole and of this format."""
        begin, nbytes, wanted = self._header()
        if not nbytes:
            return None
        data = b""
        while len(data) < nbytes and (piece := os.pread(self.fd, nbytes - len(data), begin + len(data))):
            data += piece
        if xxhash.xxh3_64_intdigest(data) != wanted:
            return None
        try:
            found = _decode(data)
        except (msgspec.MsgspecError, ValueError):
            return None
        return found if found.format == FORMAT else None

    def write(self, snapshot: Snapshot) -> None:
        """Put a snapshot in the place of what is there. OSError where there is no memory for both. For a thread."""
        data = _encode(snapshot)
        before, size, _ = self._header()
        room = align_up(len(data))
        begin = PAGE_BYTES if not size or before >= PAGE_BYTES + room else before + align_up(size)
        view, at = memoryview(data), begin
        while view:
            count = os.pwrite(self.fd, view[: 1 << 22], at)
            view, at = view[count:], at + count
        head = _HEADER.pack(_MAGIC, begin, len(data), xxhash.xxh3_64_intdigest(data))
        os.pwrite(self.fd, head + _SUM.pack(xxhash.xxh3_64_intdigest(head)), 0)
        if size:
            punch(self.fd, before, align_up(size))

    def _header(self) -> tuple[int, int, int]:
        """Offset, bytes and sum of the snapshot; no bytes where there is none."""
        found = os.pread(self.fd, _HEADER.size + _SUM.size, 0)
        if len(found) < _HEADER.size + _SUM.size:
            return 0, 0, 0
        head = found[: _HEADER.size]
        magic, begin, nbytes, total = _HEADER.unpack(head)
        good = magic == _MAGIC and _SUM.unpack(found[_HEADER.size :])[0] == xxhash.xxh3_64_intdigest(head)
        return (begin, nbytes, total) if good and nbytes <= MAX_BYTES else (0, 0, 0)
