"""Time to live: blocks that nobody stored or read for as long as their namespace allows are misses, and then gone.

A namespace's time is the shortest of what its clients named when they registered it and of the setting for all. Ages
are counted from the last use in this life of the daemon, or from its start.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtierd.core.clock import Clock
from kvtierd.tiers.blocks import PIECE_ROWS, VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry

SECOND_NS = 1_000_000_000

Forget = Callable[[NamespaceEntry, Rows], None]


class Expiry:
    """Forgets what is over its time: what a request meets at once, the rest piece by piece. All on the loop."""

    def __init__(self, copies: Copies, clock: Clock, forget: Forget, default_s: int) -> None:
        self._blocks = copies.blocks
        self._namespaces = copies.namespaces
        self._counters = copies.counters
        self._clock = clock
        self._forget = forget
        self._born_s = self._now_s()
        self._ttl_s: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """By namespace number, 0 for none."""
        self._default_s = 0
        self._hand = 0
        self.apply(default_s)
        self._namespaces.on_change.append(lambda _entry: self._changed())

    def apply(self, default_s: int) -> None:
        """Take over the setting; call it again when a namespace came or changed."""
        self._default_s = default_s
        entries = self._namespaces.entries
        self._ttl_s = np.array([self._time_of(entry) for entry in entries], np.int64)
        self._blocks.limits = dict.fromkeys(np.flatnonzero(self._ttl_s).tolist(), self._leading_live)

    def _changed(self) -> None:
        """A namespace came, or has other terms."""
        if self._default_s or any(entry.ttl_s for entry in self._namespaces.entries):
            self.apply(self._default_s)

    def step(self) -> None:
        """Forget what has expired in the next piece of the block table; call it every so often."""
        table = self._blocks.table
        if not self._blocks.limits or not table.used_rows:
            return
        begin = self._hand if self._hand < table.used_rows else 0
        self._hand = end = min(begin + PIECE_ROWS, table.used_rows)
        piece = slice(begin, end)
        numbers = table.namespace[piece]
        known = (numbers < self._ttl_s.size) & ((table.flags[piece] & VISIBLE) != 0)
        rows = (np.flatnonzero(known) + begin).astype(np.int32)
        rows = rows[self._expired(rows)]
        for number in np.unique(table.namespace[rows]).tolist():
            self._drop(self._namespaces[number], rows[table.namespace[rows] == number])

    def ages_s(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Seconds since these blocks were last used, [n]."""
        used_s = np.maximum(self._blocks.table.last_access_s[rows].astype(np.int64), self._born_s)
        ages: npt.NDArray[np.int64] = np.maximum(self._now_s() - used_s, 0)
        return ages

    def _leading_live(self, rows: Rows) -> Rows:
        """The leading ones of a prefix that have not expired; those that have are forgotten."""
        expired = self._expired(rows)
        if not np.count_nonzero(expired):
            return rows
        end = int(expired.argmax())
        entry = self._namespaces[int(self._blocks.table.namespace[rows[end]])]
        self._drop(entry, rows[expired])
        return rows[:end]

    def _expired(self, rows: Rows) -> npt.NDArray[np.bool_]:
        table = self._blocks.table
        ttl_s = self._ttl_s[table.namespace[rows]]
        over: npt.NDArray[np.bool_] = (ttl_s > 0) & (self.ages_s(rows) >= ttl_s) & (table.pins[rows] == 0)
        return over

    def _drop(self, entry: NamespaceEntry, rows: Rows) -> None:
        self._counters["expired_blocks"] += rows.size
        self._forget(entry, np.unique(rows))

    def _time_of(self, entry: NamespaceEntry) -> int:
        return min((time for time in (entry.ttl_s, self._default_s) if time), default=0)

    def _now_s(self) -> int:
        return self._clock.now_ns() // SECOND_NS
