"""What a round of syncs made durable, as facts for the journal: always data first, then the journal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtierd.core.namespace import Namespace
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.facts import Facts, Head
from kvtierd.storage.index_frames import ENTRY_DTYPE, KILL_ENTRY_DTYPE, Rows
from kvtierd.storage.index_log import IndexLog
from kvtierd.storage.record import Kill
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import Segment, Unsynced


class Journaling:
    """Collects facts whose data is on stable storage and appends them; what could not be appended is kept.

    `recovered` are facts of a start's scans: they wait until all segments that were scanned are synced.
    """

    def __init__(
        self,
        ring: Ring,
        index: IndexLog,
        namespaces: dict[bytes, Namespace],
        recovered: Facts,
    ) -> None:
        self._ring = ring
        self._index = index
        self._namespaces = namespaces
        self._recovered = recovered
        self._scanned = {segment.number for segment in ring if segment.unsynced.dirty}
        self._waiting = Facts()

    @property
    def is_complete(self) -> bool:
        """Whether no segment waits to be entered as far as it is filled."""
        return not self._scanned and not self._recovered and not any(segment.unreadable for segment in self._ring)

    def synced(self, segment: Segment, unsynced: Unsynced, head: int, *, sealed: bool) -> None:
        """A segment was synced: what is in it up to `head` is on stable storage."""
        waiting = self._waiting
        if unsynced.blocks:
            waiting.add_blocks(self._entries(segment, unsynced))
        if unsynced.kills:
            waiting.add_kills(self._kills(unsynced.kills))
        self._scanned.discard(segment.number)
        self.note_head(segment, head, sealed=sealed)

    def note_head(self, segment: Segment, head: int, *, sealed: bool) -> None:
        """Up to `head` nothing of a segment is outside the index, with what waits here."""
        known = segment.number in self._scanned or segment.unreadable
        if segment.life is None or known or segment.journaled == (head, sealed):
            return
        self._waiting.heads[segment.number] = Head(segment.life.generation, head, sealed)
        segment.journaled = head, sealed

    async def append(self) -> None:
        """Put what waits into the journal. Raises OSError; it then waits on."""
        self._scanned = {number for number in self._scanned if self._ring.get(number) is not None}
        if not self._scanned and self._recovered:
            taken, self._recovered = self._recovered, Facts()
            self._adopt(taken)
        facts, self._waiting = self._waiting, Facts()
        if not facts:
            return
        try:
            await self._index.append(facts)
        except OSError:
            later, self._waiting = self._waiting, facts
            self._adopt(later)
            raise

    def _adopt(self, other: Facts) -> None:
        """Take in facts with other numbers of namespaces."""
        numbers = [self._number(digest) for digest in other.spaces.digests]
        table = np.array(numbers, np.uint32)
        for rows, add in ((other.blocks, self._waiting.add_blocks), (other.kills, self._waiting.add_kills)):
            if len(rows):
                mine = rows.copy()
                mine["space"] = table[rows["space"]]
                add(mine)
        self._waiting.heads.update(other.heads)

    def _number(self, digest: bytes) -> int:
        return self._waiting.spaces.number(digest, self._namespaces.get(digest))

    def _entries(self, segment: Segment, unsynced: Unsynced) -> Rows:
        entries = np.zeros(len(unsynced.blocks), ENTRY_DTYPE)
        kills = [kill for _, kill in unsynced.blocks]
        _identify(entries, kills, [self._number(digest) for digest, _, _ in kills])
        offsets = np.array([segment.rows.offsets[row] for row, _ in unsynced.blocks], np.uint64)
        entries["page"] = offsets // PAGE_BYTES
        entries["segment"] = segment.number
        entries["origin"] = entries["sequence"]
        entries["sequence"], entries["block_sum"], entries["codec"] = zip(*unsynced.placed, strict=True)
        return entries

    def _kills(self, kills: Sequence[Kill]) -> Rows:
        rows = np.zeros(len(kills), KILL_ENTRY_DTYPE)
        _identify(rows, kills, [self._number(digest) for digest, _, _ in kills])
        return rows


def _identify(rows: Rows, kills: Sequence[Kill], spaces: list[int]) -> None:
    rows["key"] = np.frombuffer(b"".join(key for _, key, _ in kills), "<u8").reshape(-1, 4)
    rows["sequence"] = [sequence for _, _, sequence in kills]
    rows["space"] = spaces
