"""What the daemon leaves of the arena for its next life, in one memory file that only it maps: the block table.

    header       what it is a table of: format, bytes of a chunk, number of slabs
    slabs        a record a slab: its chunk, how that is cut, where its generations are
    namespaces   a log: number, tenant and all that a namespace is, each with its checksum
    rows         64 bytes a slot (kvtierd.index.warm_rows), those of a slab side by side

The file is sparse: its pages are there for slots that have been cut. What a process has written into it is there after
a kill -9 too, so only order matters: a record is made invalid before what it describes changes, and its checksum
written last. Nothing in it depends on the version of the package. A power failure ends it with the memory.
"""

from __future__ import annotations

import os
import struct
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtierd.core.namespace import DIGEST_BYTES, Namespace
from kvtierd.core.units import PAGE_BYTES, align_up, format_bytes
from kvtierd.index.warm_rows import WORDS, Words64
from kvtierd.tiers.arena import LastingFile

FORMAT: Final = 1
"""Of everything in the file: a table of another format is not read."""
LOG_BYTES: Final = 512 << 20
"""Address space of the log of namespaces: for as many as the block table has numbers for."""
NUMBERS: Final = 1 << 16
"""Namespace numbers that a row can name."""
NAMESPACES_MAX: Final = 32_768
"""With more than these a table is not taken over: nobody would ever forget old ones."""

_MAGIC: Final = b"kvtierd warm tbl"
_HEADER = struct.Struct("<16sQQQQ")
_ENTRY = struct.Struct("<IIQ")
"""Before each entry of the log: bytes, namespace number, checksum."""
SLAB = np.dtype(
    [("chunk", "<u8"), ("slot_bytes", "<u8"), ("layers", "<u8"), ("table", "<u8"), ("part", "<u8"), ("tenant", "S32"),
     ("check", "<u8")]
)  # fmt: skip


class WarmTableError(ValueError):
    """A table of an earlier life that cannot be taken over, and why."""


class KnownNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace as the log has it."""

    tenant: str
    digest: bytes
    namespace: Namespace
    allow_loss: bool = False
    ttl_s: int = 0


_decode = msgspec.msgpack.Decoder(KnownNamespace).decode
_encode = msgspec.msgpack.Encoder().encode


class WarmTable:
    """The file, mapped. With `fd` that of an earlier life: WarmTableError when it is of another format or shape."""

    def __init__(self, chunk_bytes: int, slabs_max: int, fd: int = -1) -> None:
        self.slabs_max = slabs_max
        self.stride = chunk_bytes // PAGE_BYTES
        """Rows of a slab: the most slots that a chunk can be cut into."""
        self._slabs_at = PAGE_BYTES
        self._log_at = align_up(self._slabs_at + slabs_max * SLAB.itemsize)
        self._rows_at = self._log_at + LOG_BYTES
        rows = slabs_max * self.stride
        size = self._rows_at + align_up(rows * WORDS * 8)
        header = _HEADER.pack(_MAGIC, FORMAT, chunk_bytes, slabs_max, size)
        if fd >= 0:
            _check(fd, header)
        try:
            self._file = LastingFile("block-table", size, fd)
        except ValueError as error:
            raise WarmTableError(str(error)) from error
        memory = self._file.memory
        if fd < 0:
            self._file.back(0, self._log_at)
            memory[: len(header)] = np.frombuffer(header, np.uint8)
        self.rows: Words64 = memory[self._rows_at : self._rows_at + rows * WORDS * 8].view("<u8").reshape(rows, WORDS)
        self._slabs: npt.NDArray[np.void] = memory[self._slabs_at :][: slabs_max * SLAB.itemsize].view(SLAB)
        self._log = memory[self._log_at : self._rows_at]
        self._log_end = 0
        self.digests: Words64 = np.zeros(NUMBERS, np.uint64)
        """First word of each namespace's digest, 0 for a number without an entry in the log."""

    @property
    def fd(self) -> int:
        """The file."""
        return self._file.fd

    def close(self) -> None:
        """Let go of the memory."""
        self.rows = np.empty((0, WORDS), np.uint64)
        self._slabs, self._log = np.empty(0, SLAB), np.empty(0, np.uint8)
        self._file.close()

    # Slabs

    def slab(self, slab: int) -> np.void | None:
        """The record of a slab, a copy; None where there is none."""
        record = self._slabs[slab].copy()
        return record if record["check"] == _sum_of(record) else None

    def cut(self, slab: int, slots: int, **fields: int | str) -> None:
        """A slab is cut into `slots` slots, and its rows are invalid; OSError when there is no memory for them."""
        self.uncut(slab)
        first = slab * self.stride
        self._file.back(self._rows_at + first * WORDS * 8, slots * WORDS * 8)
        self.rows[first : first + slots] = 0
        record = np.zeros(1, SLAB)
        for name, value in fields.items():
            record[name] = value
        record["check"] = _sum_of(record[0])
        self._slabs[slab] = record[0]

    def uncut(self, slab: int) -> None:
        """A slab has no slots any more."""
        self._slabs[slab]["check"] = 0

    # Namespaces

    def note(self, number: int, known: KnownNamespace) -> None:
        """Enter a namespace in the log, or enter again what has changed. Blocks of one that finds no room are left out
        of the table."""
        payload = _encode(known)
        end = self._log_end + _ENTRY.size + len(payload)
        if end + _ENTRY.size > LOG_BYTES or number >= NUMBERS:
            self.digests[min(number, NUMBERS - 1) :] = 0
            self._log_end = LOG_BYTES
            return
        entry = np.frombuffer(payload, np.uint8)
        self._log[self._log_end + _ENTRY.size : end] = entry
        head = _ENTRY.pack(len(payload), number, _entry_sum(number, payload))
        self._log[self._log_end : self._log_end + _ENTRY.size] = np.frombuffer(head, np.uint8)
        self._log_end = end
        self.digests[number] = digest_word(known.digest)

    def namespaces(self) -> list[KnownNamespace]:
        """All namespaces of the log by number; the log goes on behind its last entry that is whole.

        WarmTableError when one is not what this version would make of it.
        """
        found: dict[int, KnownNamespace] = {}
        while self._log_end + _ENTRY.size <= LOG_BYTES:
            length, number, sum_ = _ENTRY.unpack(self._log[self._log_end : self._log_end + _ENTRY.size].tobytes())
            begin = self._log_end + _ENTRY.size
            payload = self._log[begin : begin + length].tobytes()
            if not length or sum_ != _entry_sum(number, payload):
                break
            found[number] = _known(payload)
            self.digests[number] = digest_word(found[number].digest)
            self._log_end = begin + length
        if sorted(found) != list(range(len(found))):
            raise WarmTableError("the log of namespaces has holes")
        if len(found) > NAMESPACES_MAX:
            raise WarmTableError(f"it has {len(found)} namespaces; more than {NAMESPACES_MAX} are not kept")
        return [found[number] for number in range(len(found))]


def digest_word(digest: bytes) -> int:
    """What stands for a namespace in its rows' checksums; never 0."""
    return int.from_bytes(digest[:8], "little") | 1


def _known(payload: bytes) -> KnownNamespace:
    try:
        known = _decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WarmTableError(f"a namespace of it cannot be read: {error}") from error
    if len(known.digest) != DIGEST_BYTES or known.namespace.digest() != known.digest:
        raise WarmTableError("this version gives its namespaces other digests")
    return known


def _check(fd: int, wanted: bytes) -> None:
    found = os.pread(fd, len(wanted), 0)
    if len(found) < len(wanted):
        raise WarmTableError("the passed file is no block table")
    magic, form, chunk_bytes, slabs, size = _HEADER.unpack(found)
    _, _, want_chunk, want_slabs, _ = _HEADER.unpack(wanted)
    if magic != _MAGIC:
        raise WarmTableError("the passed file is no block table")
    if form != FORMAT:
        raise WarmTableError(f"it has format {form}; this version writes {FORMAT}")
    if (chunk_bytes, slabs) != (want_chunk, want_slabs):
        before, now = format_bytes(chunk_bytes), format_bytes(want_chunk)
        raise WarmTableError(f"it is of {slabs} chunks of {before}; the host tier has {want_slabs} of {now} now")
    if found != wanted:
        raise WarmTableError(f"it has {size} bytes")


def _sum_of(record: Any) -> int:
    return xxhash.xxh3_64_intdigest(record.tobytes()[: -SLAB["check"].itemsize]) | 1


def _entry_sum(number: int, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=number)
