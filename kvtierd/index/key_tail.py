"""The keys of one sequence from some position on: added at either end, dropped from the front."""

from __future__ import annotations

import numpy as np

from kvtierd.core.keys import KEY_BYTES
from kvtierd.core.units import PAGE_BYTES, align_up
from kvtierd.index.layout import Keys
from kvtierd.index.memory import reserve

SHORT_KEYS = 1024
"""Up to so many are in an array that doubles as it fills; more are in memory reserved for the longest sequence, so that
its growth copies nothing."""
_FIRST_KEYS = 16


class KeyTail:
    """Keys of positions begin..end-1, below `positions_max`."""

    def __init__(self, positions_max: int) -> None:
        self.begin = self.end = 0
        self._positions_max = positions_max
        self._keys: Keys = np.empty((0, KEY_BYTES), np.uint8)
        self._base = 0
        """Position of the first key in the array."""

    def append(self, keys: Keys) -> None:
        """Add keys behind the last one."""
        if self.end + len(keys) - self._base > len(self._keys):
            self._make_room(self.begin, len(keys))
        self._keys[self.end - self._base : self.end - self._base + len(keys)] = keys
        self.end += len(keys)

    def prepend(self, keys: Keys) -> None:
        """Add keys before the first one."""
        if self.begin - len(keys) < self._base:
            self._make_room(0, 0)
        self._keys[self.begin - self._base - len(keys) : self.begin - self._base] = keys
        self.begin -= len(keys)

    def drop(self, count: int) -> None:
        """Forget the first `count` keys."""
        self.begin += count
        if self.begin == self.end:
            self._keys, self._base = np.empty((0, KEY_BYTES), np.uint8), self.begin

    def between(self, begin: int, end: int) -> Keys:
        """Keys of positions begin..end-1, a view."""
        return self._keys[begin - self._base : end - self._base]

    def at(self, positions: np.ndarray) -> Keys:
        """Keys of some positions, in their order, a copy."""
        found: Keys = self._keys[positions - self._base]
        return found

    def nbytes(self) -> int:
        """RAM that they take."""
        held = (self.end - self.begin) * KEY_BYTES
        return self._keys.nbytes if len(self._keys) <= SHORT_KEYS else align_up(held, PAGE_BYTES)

    def _make_room(self, base: int, more: int) -> None:
        """Move the keys to an array that begins with position `base` and has room for more behind them."""
        wanted = self.end + more - base
        if wanted <= SHORT_KEYS:
            room: Keys = np.empty((max(_FIRST_KEYS, 1 << (wanted - 1).bit_length()), KEY_BYTES), np.uint8)
        else:
            room, base = reserve((self._positions_max, KEY_BYTES), np.uint8, huge=False), 0
        room[self.begin - base : self.end - base] = self.between(self.begin, self.end)
        self._keys, self._base = room, base
