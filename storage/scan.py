"""Find the records of one segment by reading their headers (FORMAT.md §6.2 and §6.3). Runs in an I/O thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import KIB, MIB, PAGE_BYTES
from kvtierd.storage import record
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.io import SegmentFile, read_exact
from kvtierd.storage.layout import FIRST_RECORD, KILL_DTYPE, RECORD, RECORD_DTYPE, RECORD_MAGIC
from kvtierd.storage.record import Kind, Life, RecordHeader

SEARCH_BYTES = MIB
"""How much is read at a time where the next header has to be searched."""
NEAR_BYTES = 128 * KIB
"""After a record shorter than this, so much is read at once: the next headers are probably in it."""
MAX_BAD_PAGES = 64
"""Pages of a segment that may be unreadable before the rest of it is given up."""


@dataclasses.dataclass(slots=True)
class Scan:
    """What a segment holds: `blocks` as RECORD_DTYPE rows in the order of their offsets, `kills` as KILL_DTYPE rows.

    `dropped` counts torn and damaged records, `unreadable` pages that the disk did not give; `end` is behind the last
    valid record, `last_sequence` the largest number seen. `damaged` has the offsets of pages that say they are a header
    of this life and are none.
    """

    life: Life
    blocks: npt.NDArray[np.void]
    kills: npt.NDArray[np.void]
    namespaces: dict[bytes, Namespace]
    dropped: int = 0
    unreadable: int = 0
    end: int = FIRST_RECORD
    last_sequence: int = 0
    damaged: list[int] = dataclasses.field(default_factory=list)


class _Window:
    """The part of a file that was read last, so that near headers cost one read. `limit` is where the file ends."""

    def __init__(self, file: SegmentFile, limit: int, scratch: Scratch) -> None:
        self._file = file
        self._limit = limit
        self._scratch = scratch
        self._begin = self._end = 0
        self.nothing = scratch.bounce[:0]

    def at(self, offset: int, wanted: int, ahead: int) -> Bytes:
        """At least `wanted` bytes from `offset`, and what else is at hand; `ahead` is how much to read if it is not.

        Empty behind the end of the file. Raises OSError.
        """
        wanted = min(wanted, self._limit - offset)
        if wanted <= 0:
            return self.nothing
        if offset < self._begin or offset + wanted > self._end:
            size = min(max(wanted, ahead), self._limit - offset, self._scratch.bounce.size)
            self._begin = self._end = 0  # nothing is at hand if this fails
            read_exact(self._file, [self._scratch.bounce[:size]], offset, self._scratch)
            self._begin, self._end = offset, offset + size
        return self._scratch.bounce[offset - self._begin : self._end - self._begin]


class Scanner:
    """Walks one segment. `scan` gives what it found, whatever was damaged; `visit` is shown each valid record."""

    def __init__(
        self,
        file: SegmentFile,
        life: Life,
        scratch: Scratch,
        visit: Callable[[RecordHeader, Bytes], None] = lambda _header, _view: None,
    ) -> None:
        self._visit = visit
        self._limit = min(life.end_bytes, file.size_bytes() // PAGE_BYTES * PAGE_BYTES)
        self._window = _Window(file, self._limit, scratch)
        self._life = life
        self._ahead = NEAR_BYTES
        self._bad_pages: set[int] = set()
        self._blocks = bytearray()
        self._kills: list[npt.NDArray[np.void]] = []
        self._found = Scan(life, np.empty(0, RECORD_DTYPE), np.empty(0, KILL_DTYPE), {})

    def scan(self, begin: int = FIRST_RECORD) -> Scan:
        """Read headers from a record's offset to the end of the segment."""
        found, offset = self._found, begin
        found.end = begin
        hole, claims = False, 0
        while offset < self._limit and len(self._bad_pages) <= MAX_BAD_PAGES:
            header = self._record_at(offset)
            if header is None:
                hole, claims = True, claims + self._claims_at(offset)
                offset = self._search(offset)
                continue
            found.dropped += max(claims, 1) if hole else 0
            hole, claims = False, 0
            offset += header.length
            found.end = offset
            self._ahead = NEAR_BYTES if header.length < NEAR_BYTES else PAGE_BYTES
        found.dropped += claims
        found.unreadable = len(self._bad_pages)
        found.blocks = np.frombuffer(bytes(self._blocks), RECORD_DTYPE)
        found.kills = np.concatenate([found.kills, *self._kills])
        return found

    def _record_at(self, offset: int) -> RecordHeader | None:
        """The valid record at an offset, taken in; None where there is none or it cannot be read."""
        view = self._pages_at(offset, PAGE_BYTES, self._ahead)
        size = record.claimed_header_bytes(view, self._life, offset) if view.size else 0
        if size > view.size:
            view = self._pages_at(offset, size, size)
        header = record.decode(view, self._life, offset) if 0 < size <= view.size else None
        if header is None or offset + header.length > self._limit or not self._take(header, view):
            return None
        return header

    def _take(self, header: RecordHeader, view: Bytes) -> bool:
        if header.kind is Kind.BLOCK:
            self._blocks += view[: RECORD.size].data
        elif header.kind is Kind.TOMBSTONE:
            self._kills.append(record.stored_kills(view, header))
        else:
            namespace = record.stored_namespace(view, header)
            if namespace is None:
                return False
            self._found.namespaces[header.namespace] = namespace
        self._found.last_sequence = max(self._found.last_sequence, header.sequence)
        self._visit(header, view)
        return True

    def _claims_at(self, offset: int) -> int:
        """1 where a page says it is a header of this life, though it is damaged; 0 where it says nothing."""
        view = self._pages_at(offset, PAGE_BYTES, PAGE_BYTES)
        claims = int(self._claims(view[:PAGE_BYTES]).size)
        if claims:
            self._found.damaged.append(offset)
        return claims

    def _claims(self, view: Bytes) -> npt.NDArray[np.intp]:
        """Numbers of the pages that say they are a header of this life."""
        heads = view[: view.size // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)[:, : RECORD.size]
        fields = np.ascontiguousarray(heads).view(RECORD_DTYPE)
        ours = (fields["magic"] == RECORD_MAGIC) & (fields["generation"] == self._life.generation)
        return np.flatnonzero(ours)

    def _search(self, bad: int) -> int:
        """The next offset behind `bad` where a page says it is a header, or the end of the segment."""
        offset = bad + PAGE_BYTES
        while offset < self._limit and len(self._bad_pages) <= MAX_BAD_PAGES:
            view = self._pages_at(offset, PAGE_BYTES, SEARCH_BYTES)
            if not view.size:
                offset += PAGE_BYTES
                continue
            pages = self._claims(view)
            if pages.size:
                return offset + int(pages[0]) * PAGE_BYTES
            offset += view.size
        return self._limit

    def _pages_at(self, offset: int, wanted: int, ahead: int) -> Bytes:
        """Whole pages from an offset; one page where more cannot be read, and none, counted, where not even that."""
        for size in (ahead, wanted) if offset not in self._bad_pages else ():
            try:
                return self._window.at(offset, wanted, size)
            except OSError:
                continue
        self._bad_pages.add(offset)
        return self._window.nothing
