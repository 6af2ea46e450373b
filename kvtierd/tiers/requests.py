"""The last requests of a client, and which of them a store belongs to.

The protocol has no word for it. What the tiers see is keys that are chained over their prefix: a request that stores
what it has just read, with more blocks behind, is the same request, and is to be counted once.
"""

from __future__ import annotations

import numpy as np

from kvtierd.index.layout import Keys
from kvtierd.policy.returns import Usage
from kvtierd.tiers.steps.beginnings import begun_by

REQUESTS_KEPT = 64
"""Requests of a session that a store may belong to: about as many as an engine works on at once."""
REQUEST_NS_MAX = 60 * 1_000_000_000
"""A store that comes later than this after its request began is taken for the next turn, whose read was not seen."""


class Requests:
    """The last requests of a session, found by what a later one has in common with them."""

    def __init__(self) -> None:
        self._sizes = np.zeros(REQUESTS_KEPT, np.int64)
        self._last_keys = np.zeros(REQUESTS_KEPT, np.uint64)
        self._began_ns = np.zeros(REQUESTS_KEPT, np.int64)
        self._usages: list[Usage | None] = [None] * REQUESTS_KEPT
        self._newest = 0

    def add(self, usage: Usage, began_ns: int) -> None:
        """Remember a request; the oldest is forgotten."""
        self._newest = (self._newest + 1) % REQUESTS_KEPT
        self._put(self._newest, usage, began_ns)

    def find(self, keys: Keys, now_ns: int) -> int:
        """Number of the newest request, or else of the longest young one, whose blocks `keys` ([n, 32]) begin with, or
        -1."""
        young_ns = now_ns - REQUEST_NS_MAX
        return begun_by(self._sizes, self._last_keys, self._began_ns, self._newest, keys, young_ns)

    def usage(self, number: int) -> Usage:
        """What is known of a request that was found."""
        usage = self._usages[number]
        assert usage is not None
        return usage

    def extend(self, number: int, usage: Usage) -> None:
        """A request has more blocks now."""
        self._put(number, usage, int(self._began_ns[number]))

    def _put(self, number: int, usage: Usage, began_ns: int) -> None:
        self._sizes[number], self._last_keys[number] = usage.size, usage.last_key
        self._began_ns[number], self._usages[number] = began_ns, usage
