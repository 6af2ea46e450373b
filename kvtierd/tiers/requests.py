"""The last requests of a client, and which of them a store belongs to.

The protocol has no word for it. What the tiers see is keys that are chained over their prefix: a request that stores
what it has just read, with more blocks behind, is the same request, and is to be counted once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.policy.returns import Usage

REQUESTS_KEPT = 64
"""Requests of a session that a store may belong to: about as many as an engine works on at once."""
REQUEST_NS_MAX = 60 * 1_000_000_000
"""A store that comes later than this after its request began is taken for the next turn, whose read was not seen."""

Keys64 = npt.NDArray[np.uint64]


class Requests:
    """The last requests of a session, found by what a later one has in common with them."""

    def __init__(self) -> None:
        self._sizes = np.zeros(REQUESTS_KEPT, np.int64)
        self._last_keys = np.zeros(REQUESTS_KEPT, np.uint64)
        self._began_ns = [0] * REQUESTS_KEPT
        self._usages: list[Usage | None] = [None] * REQUESTS_KEPT
        self._newest = 0

    def add(self, usage: Usage, began_ns: int) -> None:
        """Remember a request; the oldest is forgotten."""
        self._newest = (self._newest + 1) % REQUESTS_KEPT
        self._put(self._newest, usage, began_ns)

    def find(self, keys: Keys64, now_ns: int) -> int:
        """Number of the longest young request whose blocks `keys` begin with, or -1."""
        if self._fits(self._newest, keys, now_ns):
            return self._newest
        if not keys.size:  # a request about no blocks, which is one of its own
            return -1
        ends = np.minimum(self._sizes, keys.size) - 1
        same = np.flatnonzero((self._sizes > 0) & (self._sizes <= keys.size) & (keys[ends] == self._last_keys))
        young = [number for number in same.tolist() if now_ns - self._began_ns[number] <= REQUEST_NS_MAX]
        return max(young, key=self._sizes.__getitem__, default=-1)

    def usage(self, number: int) -> Usage:
        """What is known of a request that was found."""
        usage = self._usages[number]
        assert usage is not None
        return usage

    def extend(self, number: int, usage: Usage) -> None:
        """A request has more blocks now."""
        self._put(number, usage, self._began_ns[number])

    def _put(self, number: int, usage: Usage, began_ns: int) -> None:
        self._sizes[number], self._last_keys[number] = usage.size, usage.last_key
        self._began_ns[number], self._usages[number] = began_ns, usage

    def _fits(self, number: int, keys: Keys64, now_ns: int) -> bool:
        size = self._sizes.item(number)
        return (
            0 < size <= keys.size
            and keys.item(size - 1) == self._last_keys.item(number)
            and now_ns - self._began_ns[number] <= REQUEST_NS_MAX
        )
