"""Where records go: one behind the other at the head of the newest segment, in the order they were given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import StorageError
from kvtierd.core.namespace import Namespace
from kvtierd.storage.layout import DIGEST_ZERO, MAX_KILLS
from kvtierd.storage.record import Kill, Kind, kill_body, namespace_body
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import Segment, fingerprint
from kvtierd.storage.writer import Draft, Run, header_draft

BREATH = 64
"""After placing so many records the loop gets a turn: that many take well under a millisecond."""


class Appender:
    """Places drafts and hands out full requests; one batch at a time, so that a batch lies together."""

    def __init__(self, ring: Ring, namespaces: dict[bytes, Namespace]) -> None:
        self._ring = ring
        self._namespaces = namespaces
        self._bodies: dict[bytes, Bytes] = {}
        self._sizes: dict[bytes, int] = {}
        self._lock = asyncio.Lock()
        self._run: Run | None = None

    async def append(self, drafts: Sequence[Draft], submit: Callable[[Run], None]) -> None:
        """Give every draft its place, or an error; `submit` is called with each request as soon as it is full.

        A request is submitted before another segment is waited for, because that one may be free only when
        this batch's own requests are done.
        """
        async with self._lock:
            try:
                failure: StorageError | None = None
                for number, draft in enumerate(drafts):
                    if number % BREATH == BREATH - 1:
                        await asyncio.sleep(0)
                    draft.error = draft.error or failure
                    if draft.error is None:
                        failure = await self._place(draft, submit)
            finally:
                self._close_run(submit)

    async def alone(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something that changes the order of segments, while no batch is placed."""
        async with self._lock:
            await work()

    async def _place(self, draft: Draft, submit: Callable[[Run], None]) -> StorageError | None:
        """Place one draft. A returned error says that there is no room, so for the rest of the batch neither."""
        needed = draft.length + self._namespace_bytes(draft, None)
        if needed > self._ring.largest_record:
            limit = self._ring.largest_record
            draft.error = StorageError(f"a record of {needed} bytes does not fit a segment with room for {limit}")
            return None
        segment = self._ring.active
        if segment is None or draft.length + self._namespace_bytes(draft, segment) > segment.room_bytes:
            self._close_run(submit)
            try:
                segment = await self._ring.advance()
            except StorageError as error:
                draft.error = error
                return error
        if self._namespace_bytes(draft, segment):
            self._put(self.namespace_draft(draft.namespace), segment, submit)
            segment.namespaces.add(draft.namespace)
        self._put(draft, segment, submit)
        return None

    def namespace_draft(self, digest: bytes) -> Draft:
        """A registered namespace's record."""
        body = self._bodies.get(digest)
        if body is None:
            body = self._bodies[digest] = namespace_body(self._namespaces[digest])
        return header_draft(Kind.NAMESPACE, digest, body, body.size)

    def _namespace_bytes(self, draft: Draft, segment: Segment | None) -> int:
        """What the namespace's record takes, if this draft needs one in front of it."""
        if draft.kind is not Kind.BLOCK or (segment is not None and draft.namespace in segment.namespaces):
            return 0
        size = self._sizes.get(draft.namespace)
        if size is None:
            size = self._sizes[draft.namespace] = self.namespace_draft(draft.namespace).header_bytes
        return size

    def _put(self, draft: Draft, segment: Segment, submit: Callable[[Run], None]) -> None:
        if self._run is None or self._run.segment is not segment or not self._run.takes(draft):
            self._close_run(submit)
            assert segment.life is not None
            self._run = Run(segment, segment.life)
        draft.segment, draft.life, draft.offset = segment.number, segment.life, segment.head
        draft.sequence = self._ring.sequences.take()
        draft.origin = draft.origin or draft.sequence
        segment.head += draft.length
        if draft.item is not None:
            item = draft.item
            print_ = fingerprint(item.namespace, item.key)
            draft.row = segment.rows.add(draft.offset, draft.length, draft.origin, print_, item.tag)
        self._run.add(draft)

    def _close_run(self, submit: Callable[[Run], None]) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.segment.begin_run(run.drafts[0].offset)
            submit(run)


def tombstone_drafts(kills: list[Kill]) -> list[Draft]:
    """Tombstones for any number of kills."""
    drafts = []
    for begin in range(0, len(kills), MAX_KILLS):
        part = kills[begin : begin + MAX_KILLS]
        drafts.append(header_draft(Kind.TOMBSTONE, DIGEST_ZERO, kill_body(part), len(part), part))
    return drafts
