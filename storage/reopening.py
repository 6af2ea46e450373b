"""What a start makes of index and segments: which parts are scanned, which blocks live, where writing goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.facts import Facts, Head
from kvtierd.storage.index_load import Loaded
from kvtierd.storage.interface import Recovered
from kvtierd.storage.layout import FIRST_RECORD, SEQUENCE_BITS
from kvtierd.storage.pool import IoPool
from kvtierd.storage.record import Kill, Life
from kvtierd.storage.recovery import Live, as_recovered, live_blocks
from kvtierd.storage.ring import Ring, Sequences
from kvtierd.storage.scan import Scan, Scanner
from kvtierd.storage.segment import Rows, Segment


class Reopening:
    """One start. `recover` fills the ring; what scans found is for the journal once its segments are synced."""

    def __init__(self, ring: Ring, pool: IoPool, loaded: Loaded) -> None:
        self._ring = ring
        self._pool = pool
        self._loaded = loaded
        self._facts = loaded.facts
        self._scans: list[Scan] = []
        self._sizes: dict[int, int] = {}
        self.unjournaled = Facts()
        """What scans found: to be journaled when the segments it lies in are synced."""

    async def recover(self, epoch: int) -> Recovered:
        """Find the live blocks and set up the ring's segments, its sequence numbers and where it goes on."""
        segments = {segment.number: segment for segment in self._ring if segment.life is not None}
        lives = {number: segment.life for number, segment in segments.items() if segment.life is not None}
        self._sizes = {number: segment.size_bytes for number, segment in segments.items()}
        live = await self._from_index(segments, lives) if self._loaded.usable else None
        if live is None:
            live = await self._from_scans(segments, lives)
        self._fill(live)
        self._ring.sequences = Sequences(max(epoch << SEQUENCE_BITS, self._last_sequence(lives) + 1))
        self._resume(segments)
        return self._as_recovered(live)

    async def _from_index(self, segments: dict[int, Segment], lives: dict[int, Life]) -> Live | None:
        """The index, and scans of what it does not cover; None where it contradicts the segments."""
        begins = {number: begin for number in segments if (begin := self._uncovered(lives[number])) is not None}
        await self._scan(segments, begins)
        try:
            return live_blocks(self._facts, lives, self._sizes)
        except ValueError as error:
            self._loaded.notes.append(f"the index is not used: {error}")
            self._loaded.usable = False
            return None

    async def _from_scans(self, segments: dict[int, Segment], lives: dict[int, Life]) -> Live:
        index, self._facts = self._facts, Facts()
        self._facts.add_kills_of(index)
        await self._scan(segments, dict.fromkeys(segments, FIRST_RECORD))
        return live_blocks(self._facts, lives, self._sizes)

    def _uncovered(self, life: Life) -> int | None:
        """Where the index ends in a segment; None where nothing can follow."""
        head = self._head(life)
        if head is None:
            return FIRST_RECORD
        return None if head.sealed or head.head >= life.end_bytes else head.head

    def _head(self, life: Life) -> Head | None:
        head = self._facts.heads.get(life.segment) if self._loaded.usable else None
        return head if head is not None and head.generation == life.generation else None

    async def _scan(self, segments: dict[int, Segment], begins: dict[int, int]) -> None:
        calls = (self._pool.submit(_scan_of(segments[number], begin)) for number, begin in begins.items())
        self._scans = list(await asyncio.gather(*calls))
        blocks, kills = self._facts.add_scans(self._scans)
        self.unjournaled.spaces = self._facts.spaces
        self.unjournaled.add_blocks(blocks)
        self.unjournaled.add_kills(kills)

    def _fill(self, live: Live) -> None:
        """Give the live blocks to their segments' columns."""
        rows, first = live.rows, self._facts.spaces.words()
        prints = rows["key"][:, 0] ^ first[rows["space"]] if len(rows) else np.empty(0, np.uint64)
        offsets = rows["page"].astype(np.uint64) * np.uint64(PAGE_BYTES)
        alive = [segment for segment in self._ring if segment.life is not None]
        ids = np.array([segment.number for segment in alive], np.uint32)
        begins, ends = (np.searchsorted(rows["segment"], ids, side).tolist() for side in ("left", "right"))
        for segment, begin, end in zip(alive, begins, ends, strict=True):
            assert segment.life is not None
            part = slice(begin, end)
            lengths = live.lengths[part]
            segment.rows = Rows.of(offsets[part], lengths.astype(np.uint64), rows["origin"][part], prints[part])
            segment.live_count, segment.live_bytes = lengths.size, int(lengths.sum())
            head = self._head(segment.life)
            segment.journaled = (head.head, head.sealed) if head is not None else None
            segment.head = head.head if head is not None and head.sealed else segment.life.end_bytes
        for scan in self._scans:
            scanned = self._ring.get(scan.life.segment)
            if scanned is not None:
                scanned.namespaces = set(scan.namespaces)
                # What a killed process wrote may be in a cache still: it is journaled when it is known to be on disk.
                scanned.unsynced.dirty = True
                scanned.unreadable = scan.unreadable > 0

    def _last_sequence(self, lives: dict[int, Life]) -> int:
        columns = (self._facts.blocks["sequence"], self._facts.kills["sequence"])
        seen = [int(column.max()) for column in columns if column.size]
        seen += [life.generation for life in lives.values()]
        return max((*seen, *(scan.last_sequence for scan in self._scans)), default=0)

    def _resume(self, segments: dict[int, Segment]) -> None:
        """Go on in the newest segment, if every page of what was scanned could be read: what could not may hold a
        header. A segment of an older format is not written any more."""
        newest = max(segments.values(), key=_generation, default=None)
        if newest is None or newest.life is None or newest.life.version == 1:
            return
        scan = next((scan for scan in self._scans if scan.life is newest.life), None)
        head = self._head(newest.life)
        if scan is None and head is not None:
            self._ring.resume(head.head)
        elif scan is not None and scan.unreadable == 0:
            self._ring.resume(scan.end)

    @property
    def dropped(self) -> list[Kill]:
        """Blocks that were left out though their records are whole."""
        return self._facts.mismatched

    def facts_at_once(self) -> Facts:
        """What the journal must know before anything is written: that the segment that goes on is not sealed."""
        facts = Facts()
        active = self._ring.active
        if active is not None and active.life is not None and active.journaled == (active.head, True):
            facts.heads[active.number] = Head(active.life.generation, active.head, sealed=False)
            active.journaled = active.head, False
        return facts

    def _as_recovered(self, live: Live) -> Recovered:
        recovered = as_recovered(live, self._facts)
        recovered.notes += self._loaded.notes
        for scan in self._scans:
            if scan.dropped:
                recovered.notes.append(f"segment {scan.life.segment}: {scan.dropped} torn or damaged records dropped")
            if scan.unreadable:
                recovered.notes.append(f"segment {scan.life.segment}: {scan.unreadable} pages could not be read")
        unknown = live.unknown + len(self._facts.mismatched)
        if unknown:
            recovered.notes.append(f"{unknown} blocks dropped whose namespace is not known or has another geometry")
        if live.cut_off:
            recovered.notes.append(f"{live.cut_off} blocks dropped behind the end of their segment's file")
        recovered.dropped = sum(scan.dropped for scan in self._scans) + unknown + live.cut_off
        scanned = f"{len(self._scans)} segments scanned"
        recovered.source = f"index, {scanned}" if self._loaded.usable else scanned
        return recovered


def _scan_of(segment: Segment, begin: int) -> Callable[[Scratch], Scan]:
    life = segment.life
    assert life is not None
    return lambda scratch: Scanner(segment.file, life, scratch).scan(begin)


def _generation(segment: Segment) -> int:
    return segment.life.generation if segment.life is not None else 0
