"""Blocks that vLLM's KV events have told of, and which of them the daemon no longer has. No engine in here."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence

from kvtierd.core.keys import Keys

LIMIT = 1 << 17
"""Blocks that are remembered. The oldest are told of as gone beyond that: then nobody is sent here for them in vain."""
LATELY = 1 << 16
"""Keys of removed blocks that are remembered for those whose storing is told of late."""


class Announced:
    """Blocks by the names that the engine's events give them, and by their keys, one a rank. Thread-safe.

    The daemon's events and the engine's own come from two threads, in whatever order: a block whose removal was heard
    before it was told of is gone at once.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._keys: dict[Hashable, tuple[bytes, ...]] = {}
        self._names: dict[bytes, Hashable] = {}
        self._lately: dict[bytes, None] = {}
        self._gone: dict[Hashable, None] = {}

    def tell(self, names: Sequence[Hashable], keys: Sequence[Keys]) -> None:
        """These blocks are told of: `names[i]` is that of `keys[rank][i]`, each [n, 32] uint8."""
        with self._lock:
            for i, name in enumerate(names):
                mine = tuple(own[i].tobytes() for own in keys)
                self._forget(name)
                self._gone.pop(name, None)
                if any(key in self._lately for key in mine):
                    self._gone[name] = None
                else:
                    self._remember(name, mine)

    def known(self, keys: Keys) -> int:
        """How many leading blocks of one rank were told of and are there."""
        with self._lock:
            return next((i for i, key in enumerate(keys) if key.tobytes() not in self._names), len(keys))

    def stored(self, keys: Iterable[bytes]) -> None:
        """The daemon has these now."""
        with self._lock:
            for key in keys:
                self._lately.pop(key, None)

    def removed(self, keys: Iterable[bytes]) -> None:
        """The daemon no longer has these; a block is gone when it is on one rank."""
        with self._lock:
            for key in keys:
                self._lately[key] = None
                if (name := self._names.get(key)) is not None:
                    self._lose(name)
            while len(self._lately) > LATELY:
                del self._lately[next(iter(self._lately))]

    def doubt(self) -> None:
        """Nobody knows what the daemon has: all that was told of counts as gone, until it is found again."""
        with self._lock:
            self._gone.update(dict.fromkeys(self._keys))
            for known in (self._keys, self._names, self._lately):
                known.clear()

    def take(self) -> list[Hashable]:
        """Names of blocks that are gone since the last call."""
        with self._lock:
            gone, self._gone = self._gone, {}
        return list(gone)

    def _remember(self, name: Hashable, keys: tuple[bytes, ...]) -> None:
        if len(self._keys) >= self._limit:
            self._lose(next(iter(self._keys)))
        for key in keys:
            if (other := self._names.get(key)) is not None:
                self._lose(other)
            self._names[key] = name
        self._keys[name] = keys

    def _lose(self, name: Hashable) -> None:
        self._forget(name)
        self._gone[name] = None

    def _forget(self, name: Hashable) -> None:
        for key in self._keys.pop(name, ()):
            self._names.pop(key, None)
