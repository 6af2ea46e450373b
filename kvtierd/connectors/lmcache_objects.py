"""Store, look up, load and delete LMCache's objects: from its keys and memory to ours. No engine in here.

One thread for each of the three kinds of task; the accounts are shared by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvtierd.connectors.lmcache_locks import Locks
from kvtierd.connectors.lmcache_names import Kind, Names, block_keys_of, by_kind
from kvtierd.connectors.lmcache_residents import Resident, Residents
from kvtierd.connectors.objects import DROPPED, STORED, Flags, Objects
from kvtierd.core.checksum import Bytes
from kvtierd.core.keys import Keys
from kvtierd.protocol.client import Client
from kvtierd.protocol.results import NamespaceHandle


class Listener(Protocol):
    """Who keeps LMCache's accounts: told once of each object that came and went."""

    def came(self, items: Sequence[Resident]) -> None:
        """Objects are in the daemon now, or were found there for the first time."""

    def went(self, items: Sequence[Resident]) -> None:
        """Objects are gone."""


class CachedObjects:
    """What the adapter does, task by task, for keys and buffers in the caller's order."""

    def __init__(
        self, client: Client, objects: Objects, names: Names, listener: Listener, lookup_timeout_s: float
    ) -> None:
        self._client = client
        self._objects = objects
        self._names = names
        self._listener = listener
        self._lookup_timeout_s = lookup_timeout_s
        self._locks = Locks(client)
        self.residents = Residents()
        self._swept = 0

    @property
    def locked(self) -> int:
        """Objects that are pinned."""
        return len(self._locks)

    def store(self, keys: Sequence[Any], buffers: Sequence[Bytes]) -> tuple[bool, int]:
        """Whether all are stored now, and how many bytes were for it. Sizes that cannot be stored raise ValueError."""
        whole, nbytes = True, 0
        for places, handle in self._groups(keys, buffers):
            mine = [keys[i] for i in places]
            names = block_keys_of(handle, mine)
            outcomes = self._objects.store(handle, names, [[buffers[i]] for i in places])
            nbytes += int(np.count_nonzero(outcomes == STORED)) * handle.geometry.block_bytes
            whole &= bool((outcomes != DROPPED).all())
            self._note(handle, mine, names, outcomes != DROPPED)
        return whole, nbytes

    def find(self, keys: Sequence[Any], sizes: Mapping[int, int]) -> Flags:
        """Which are there; these are locked. `sizes` are bytes of an object by object group, where they are known."""
        found = np.zeros(len(keys), np.bool_)
        for kind, places in by_kind(keys).items():
            left = np.array(places)
            for nbytes in self._sizes(kind, sizes):
                left = left[~found[left]]
                if left.size:
                    self._find(self._names.handle(kind, nbytes), keys, left, found)
        return found

    def _sizes(self, kind: Kind, sizes: Mapping[int, int]) -> list[int]:
        if nbytes := sizes.get(kind[2]):
            self._names.met(kind, nbytes)
            return [nbytes]
        return self._names.sizes(kind)

    def _find(self, handle: NamespaceHandle, keys: Sequence[Any], places: np.ndarray[Any, Any], found: Flags) -> None:
        mine = [keys[i] for i in places]
        names = block_keys_of(handle, mine)
        masks = self._objects.present(handle, names, timeout_s=self._lookup_timeout_s)
        self._locks.lock(handle, mine, names, masks)
        found[places] = masks > 0
        self._note(handle, mine, names, masks > 0)
        if not masks.all():
            self.check(self.residents.known([names[i].tobytes() for i in np.flatnonzero(masks == 0).tolist()]))

    def unlock(self, keys: Sequence[Any]) -> None:
        """Take back one lock of each key."""
        self._locks.unlock(keys)

    def load(self, keys: Sequence[Any], buffers: Sequence[Bytes]) -> Flags:
        """Which objects arrived whole in their buffers."""
        loaded = np.zeros(len(keys), np.bool_)
        for places, handle in self._groups(keys, buffers):
            names = block_keys_of(handle, [keys[i] for i in places])
            loaded[places] = self._objects.load(handle, names, [[buffers[i]] for i in places])
        return loaded

    def delete(self, keys: Sequence[Any]) -> None:
        """Forget objects, in whatever size they are there."""
        for kind, places in by_kind(keys).items():
            for nbytes in self._names.sizes(kind):
                handle = self._names.handle(kind, nbytes)
                names = block_keys_of(handle, [keys[i] for i in places])
                self._client.delete(handle, names)
                self.check(self.residents.known([name.tobytes() for name in names]))

    def sweep(self, count: int) -> None:
        """Check the next `count` objects, in turn all of them."""
        page, after = self.residents.page(self._swept, count, None)
        self._swept = after or 0
        self.check(page)

    def check(self, items: Sequence[Resident]) -> None:
        """Ask which of these are still there, and tell of those that are not."""
        for handle in {item.handle for item in items}:
            mine = [item for item in items if item.handle is handle]
            names = np.frombuffer(b"".join(item.name for item in mine), np.uint8).reshape(len(mine), -1)
            gone = self._gone(handle, names)
            if went := self.residents.remove([mine[i].name for i in np.flatnonzero(gone).tolist()]):
                self._listener.went(went)

    def _gone(self, handle: NamespaceHandle, names: Keys) -> Flags:
        """Which are not there; none where the daemon did not say so."""
        before = self._client.counters["lookups_missed_unavailable"]
        masks = self._objects.present(handle, names, timeout_s=self._lookup_timeout_s)
        if self._client.counters["lookups_missed_unavailable"] > before:
            return np.zeros(len(names), np.bool_)
        return np.asarray(masks == 0)

    def _note(self, handle: NamespaceHandle, keys: Sequence[Any], names: Keys, there: Flags) -> None:
        items = [Resident(keys[i], handle, names[i].tobytes()) for i in np.flatnonzero(there).tolist()]
        fresh, forgotten = self.residents.add(items)
        if forgotten:
            self._listener.went(forgotten)
        if fresh:
            self._listener.came(fresh)

    def _groups(self, keys: Sequence[Any], buffers: Sequence[Bytes]) -> list[tuple[list[int], NamespaceHandle]]:
        """Positions of what belongs to one namespace, each in the caller's order."""
        groups: dict[tuple[Kind, int], list[int]] = {}
        for kind, places in by_kind(keys).items():
            for i in places:
                groups.setdefault((kind, buffers[i].size), []).append(i)
        for kind, nbytes in groups:
            self._names.met(kind, nbytes)
        return [(places, self._names.handle(kind, nbytes)) for (kind, nbytes), places in groups.items()]
