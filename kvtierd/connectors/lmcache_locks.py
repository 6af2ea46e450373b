"""Locks of LMCache's lookups as pins: what was found stays in the daemon until it is loaded.

A block that has a copy in nvme needs none, since eviction from host loses nothing then. Pins are bounded by the daemon;
beyond that an object is found without a lock, and one that goes before it is loaded is a load that fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtierd.core.errors import KvtierdError
from kvtierd.core.keys import as_keys
from kvtierd.protocol.client import Client
from kvtierd.protocol.messages import TIER_NVME
from kvtierd.protocol.results import Masks, NamespaceHandle


@dataclasses.dataclass(slots=True)
class _Lock:
    handle: NamespaceHandle
    key: bytes
    count: int


class Locks:
    """Counted pins by ObjectKey. For one thread; `len` says how many objects are pinned."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._locks: dict[Any, _Lock] = {}
        self._stray: dict[bytes, NamespaceHandle] = {}
        """Pins that the daemon did not confirm to have ended; their session may still hold them."""

    def __len__(self) -> int:
        return len(self._locks)

    def lock(self, handle: NamespaceHandle, keys: Sequence[Any], names: np.ndarray[Any, Any], masks: Masks) -> None:
        """Pin the found ones of `keys`, whose block keys are `names` ([n, 32] uint8) and which lie in `masks`."""
        fresh = []
        for i in np.flatnonzero((masks > 0) & (masks & TIER_NVME == 0)).tolist():
            lock = self._locks.get(keys[i])
            if lock is not None and lock.handle is handle:
                lock.count += 1
            else:
                fresh.append(i)
        if not fresh:
            return
        try:
            pinned = self._client.pin(handle, np.ascontiguousarray(names[fresh]))
        except KvtierdError:  # over the daemon's limit of pins: see above
            return
        if pinned:
            for i in fresh:
                self._locks[keys[i]] = _Lock(handle, names[i].tobytes(), 1)
                self._stray.pop(names[i].tobytes(), None)

    def unlock(self, keys: Sequence[Any]) -> None:
        """Take one lock of each back; those that have none are passed over."""
        ended = self._stray
        for key in keys:
            lock = self._locks.get(key)
            if lock is None:
                continue
            lock.count -= 1
            if not lock.count:
                del self._locks[key]
                ended[lock.key] = lock.handle
        self._stray = self._unpin(ended)

    def _unpin(self, ended: dict[bytes, NamespaceHandle]) -> dict[bytes, NamespaceHandle]:
        """Unpin; which of them the daemon did not answer for."""
        unavailable = self._client.counters["requests_unavailable"]
        for handle in set(ended.values()):
            self._client.unpin(handle, as_keys(b"".join(key for key, of in ended.items() if of is handle)))
        return ended if self._client.counters["requests_unavailable"] > unavailable else {}
