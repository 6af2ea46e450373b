"""Lookups of very long prefixes by their keys, answered by the adaptive front where that pays.

A client comes with keys, and the front knows sequences by number. Keys are chained, so one of them, LONG_KEYS from the
beginning, names the sequence that a request is most probably about; whether it is, is found out by comparing all keys,
which costs a quarter of what probing the page table for them does. What was not in the sequence is probed. So the
answer is that of the page table in every case, whole keys compared, also where keys are not chained at all.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from kvtierd.index.block_table import BlockTable
from kvtierd.index.crossover import MEASURED
from kvtierd.index.front import AdaptiveFront
from kvtierd.index.layout import Keys, Rows
from kvtierd.index.page_table import PageTable
from kvtierd.index.sequence import POSITIONS_MAX

LONG_KEYS = MEASURED.positions_min
"""Keys from which on a sequence may be worth tracking: a shorter lookup goes straight to the page table."""
MATCH_NS = 7.0
"""To compare one key: that much less is saved than by who asks by number. An estimate; `bench index` shows what is left
of the gain."""
SEQUENCES_MAX = 64
"""Sequences known at a time; the one that was asked about longest ago makes room."""
SEEN_MAX = 1024
"""Names of sequences that were asked about once: what comes but once is not worth a copy of its keys."""

Name = tuple[int, bytes]


class LongLookups:
    """`prefix` answers as `PageTable.prefix`; blocks must come and go through `front`."""

    def __init__(self, blocks: BlockTable, pages: PageTable) -> None:
        costs = dataclasses.replace(MEASURED, probe_ns=MEASURED.probe_ns - MATCH_NS)
        self.front = AdaptiveFront(blocks, pages, costs=costs)
        self._pages = pages
        self._numbers: collections.OrderedDict[Name, int] = collections.OrderedDict()
        self._seen: collections.OrderedDict[Name, None] = collections.OrderedDict()
        self._asked = 0
        self._answered_positions = 0

    def prefix(self, keys: Keys, namespace: int) -> Rows:
        """Rows of the leading run of present keys ([n, 32] uint8, at least LONG_KEYS of them): [hit] int32."""
        self._asked += 1
        name = (namespace, keys[LONG_KEYS - 1].tobytes())
        number = self._numbers.get(name)
        if number is None:
            hit, rows = self._pages.prefix(keys, namespace)
            if hit >= LONG_KEYS:
                self._note(name, keys)
            return rows
        self._numbers.move_to_end(name)
        same = self.front.matching(number, keys)
        if same == self.front.length(number) < len(keys):
            same += self._extend(number, keys, same)
        rows = self.front.leading(number, same)
        self._answered_positions += rows.size
        if rows.size < same or same == len(keys):
            return rows
        _, more = self._pages.prefix(keys[same:], namespace)
        return np.concatenate([rows, more])

    def stats(self) -> dict[str, int]:
        """Gauges and counters by name."""
        mine = {"long_lookups": self._asked, "long_lookup_positions": self._answered_positions}
        return {f"front_{name}": value for name, value in (self.front.stats() | mine).items()}

    def _extend(self, number: int, keys: Keys, length: int) -> int:
        """The sequence has grown: take its new keys; how many."""
        more = keys[length:POSITIONS_MAX]
        self.front.append(number, more)
        return len(more)

    def _note(self, name: Name, keys: Keys) -> None:
        """A sequence is asked about that is not known: the second time it becomes known."""
        if name not in self._seen:
            self._seen[name] = None
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)
            return
        del self._seen[name]
        if len(self._numbers) >= SEQUENCES_MAX:
            self.front.close(self._numbers.popitem(last=False)[1])
        self._numbers[name] = self.front.open(name[0], 1, keys[:POSITIONS_MAX])
