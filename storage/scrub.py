"""Scrubbing: what is stored and not read is read now and then, so that damage is found while there may be other copies.

Record after record, at a set rate, behind every request of clients. A block that is damaged is announced as gone and
struck out; one that the disk does not give is counted, and tried again in the next pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator

from kvtierd.storage.buffers import Scratch, page_buffer
from kvtierd.storage.io import read_exact
from kvtierd.storage.payloads import record_problem
from kvtierd.storage.pool import IoPool
from kvtierd.storage.record import RecordHeader
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import NO_TAG, Segment, fingerprint
from kvtierd.storage.write_path import WritePath

_log = logging.getLogger(__name__)

START_S = 10.0
"""Pause before the first record, and between two passes: a start has other things to read."""


class Scrubber:
    """Goes round the live blocks for ever. `rate_bytes` a second are read at most; 0 is not at all."""

    def __init__(self, ring: Ring, pool: IoPool, writes: WritePath, counters: Counter[str], rate_bytes: int) -> None:
        self._ring = ring
        self._pool = pool
        self._writes = writes
        self._counters = counters
        self._rate_bytes = rate_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._step: asyncio.Task[None] | None = None
        self._places = self._round()

    def start(self) -> None:
        """Begin, after a pause."""
        if self._rate_bytes:
            self._wait(START_S)

    async def close(self) -> None:
        """Stop; a read under way is waited for."""
        self._rate_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        if self._step is not None:
            await asyncio.wait([self._step])

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._step = asyncio.create_task(self._next(), name="nvme-scrub")

    async def _next(self) -> None:
        place = next(self._places, None)
        pause_s = START_S
        if place is None:
            self._counters["scrub_passes"] += 1
            self._places = self._round()
        else:
            segment, row = place
            pause_s = segment.rows.lengths[row] / max(self._rate_bytes, 1)
            await self._verify(segment, row)
        if self._rate_bytes:
            self._wait(pause_s)

    def _round(self) -> Iterator[tuple[Segment, int]]:
        """Live blocks of the segments as they are when their turn comes."""
        for number in sorted(segment.number for segment in self._ring):
            segment = self._ring.get(number)
            life = segment.life if segment is not None else None
            for row in list(segment.rows.live()) if segment is not None else ():
                if segment is None or segment.life is not life or segment.retiring:
                    break
                if segment.is_live(row):
                    yield segment, row

    async def _verify(self, segment: Segment, row: int) -> None:
        extent, life, print_ = segment.extent(row), segment.life, segment.rows.prints[row]
        assert life is not None
        memory = page_buffer(extent.length)
        header: RecordHeader | None = None
        problem = ""

        def verify(_: Scratch) -> None:
            nonlocal header, problem
            header, problem = record_problem(memory, life, extent.offset)

        segment.pin()
        try:
            await self._pool.read_patiently(
                lambda scratch: read_exact(segment.file, [memory], extent.offset, scratch), verify
            )
        except OSError as error:
            self._counters["scrub_unreadable"] += 1
            _log.warning("nvme scrub: %s at %d cannot be read: %s", segment.path, extent.offset, error)
            return
        finally:
            segment.unpin()
        self._counters["scrubbed_bytes"] += extent.length
        if header is not None and fingerprint(header.namespace, header.key) != print_:
            header, problem = None, "another block lies here"
        if problem and segment.life is life and segment.is_live(row):
            self._give_up(segment, row, header, problem)

    def _give_up(self, segment: Segment, row: int, header: RecordHeader | None, problem: str) -> None:
        """Damaged: nobody is served these bytes; whoever has the block elsewhere keeps it there."""
        extent, tag = segment.extent(row), segment.rows.tags[row]
        _log.error("nvme scrub: %s at %d: %s; the block is dropped", segment.path, extent.offset, problem)
        self._counters["scrub_corrupt"] += 1
        segment.set_dead(row)
        if header is not None:
            self._writes.owe([(header.namespace, header.key, header.origin)])
        if tag != NO_TAG:
            self._ring.tell([(tag, extent)])
