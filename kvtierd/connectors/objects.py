"""Many objects between an engine's memory and the daemon, a batch at a time, through one client. No engine in here.

An object is one block with one checksum (`opaque_geometry`); its bytes may lie in several places. Nothing waits for the
daemon beyond the deadlines given; trouble with it is an object that is not loaded, or not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd.connectors.pieces import Pieces, gather, scatter
from kvtierd.core.keys import Keys
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client
from kvtierd.protocol.copying import Copier, default_threads
from kvtierd.protocol.grants import leading
from kvtierd.protocol.holds import Lease, Reservation
from kvtierd.protocol.messages import SLOT_BUSY, SLOT_EXISTS
from kvtierd.protocol.results import Masks, NamespaceHandle

_log = logging.getLogger("kvtierd")

BATCH_BYTES = 32 * MIB
"""Bytes leased or reserved at a time: the daemon's deadline holds for one such piece."""
STORED: Final = 1
EXISTED: Final = 2
DROPPED: Final = 0

Flags = npt.NDArray[np.bool_]
Outcomes = npt.NDArray[np.uint8]


class Objects:
    """Stores, loads and looks up objects of one size a namespace. Thread-safe, as the client is; `close` is not."""

    def __init__(
        self, client: Client, *, load_timeout_s: float, store_timeout_s: float, copy_threads: int | None = None
    ) -> None:
        self._client = client
        self._load_timeout_s = load_timeout_s
        self._store_timeout_s = store_timeout_s
        threads = copy_threads or default_threads()
        # A store and a load at the same time do not wait for each other's copies.
        self._filler, self._drainer = Copier(threads), Copier(threads)

    def present(self, handle: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> Masks:
        """Where each object lies: [n] uint8 residency masks, 0 for none."""
        masks = np.zeros(len(keys), np.uint8)
        hit = self._client.lookup(handle, keys, timeout_s=timeout_s)
        masks[: hit.count] = hit.tiers
        # Behind the first that is missing each is a sequence of its own; the first itself was just answered.
        rest = range(hit.count + 1, len(keys))
        if rest:
            answers = self._client.lookup_many(handle, [keys[i : i + 1] for i in rest], timeout_s=timeout_s)
            for i, answer in zip(rest, answers, strict=True):
                masks[i] = answer.tiers[0] if answer.count else 0
        return masks

    def store(self, handle: NamespaceHandle, keys: Keys, sources: Sequence[Pieces], parent: bytes = b"") -> Outcomes:
        """Store objects; what became of each ([n] uint8: STORED, EXISTED or DROPPED). `parent` is the key before the
        first, where that is not the beginning of a prefix.

        Raises KvtierdError where the daemon refuses the namespace.
        """
        outcomes, done = np.full(len(keys), DROPPED, np.uint8), 0
        slots = self._client.reservations(
            handle, keys, batch=self._batch(handle), parent=parent, timeout_s=self._store_timeout_s
        )
        for reserved in slots:
            end = done + len(reserved.views)
            outcomes[done:end] = self._fill(reserved, keys[done:end], sources[done:end])
            if (reserved.status == SLOT_BUSY).all():
                break  # no daemon, or no room: what follows would fare alike
            done = end
        return outcomes

    def _fill(self, reserved: Reservation, keys: Keys, sources: Sequence[Pieces]) -> Outcomes:
        handle = reserved.namespace
        outcomes = np.where(reserved.status == SLOT_EXISTS, EXISTED, DROPPED).astype(np.uint8)
        index = [i for i, view in enumerate(reserved.views) if view is not None]
        if not index:
            return outcomes
        views = [view for view in reserved.views if view is not None]
        sums = np.empty((len(index), 1), np.uint64)

        def fill(at: int) -> None:
            sums[at] = gather(sources[index[at]], views[at])

        self._filler.spread(fill, len(index), handle.geometry)
        if reserved.commit(index, sums=sums, timeout_s=self._store_timeout_s) == len(index):
            outcomes[index] = STORED
        else:  # some were refused, or the answer stayed out: only the daemon knows which are there
            outcomes[index] = np.where(self.present(handle, keys)[index] > 0, STORED, DROPPED)
        return outcomes

    def load(self, handle: NamespaceHandle, keys: Keys, targets: Sequence[Pieces]) -> Flags:
        """Copy objects into `targets`; which arrived whole, as their checksums say.

        The bytes of others are of no use. Raises KvtierdError where the daemon refuses the namespace.
        """
        loaded = np.zeros(len(keys), np.bool_)
        left = np.arange(len(keys))
        while left.size:
            count = self._run(handle, keys[left], [targets[i] for i in left.tolist()])
            loaded[left[:count]] = True
            # A run ends with one that is missing or damaged. What is present of the rest is a run of its own.
            left = left[count + 1 :]
            if left.size:
                left = left[self.present(handle, keys[left]) > 0]
        return loaded

    def _run(self, handle: NamespaceHandle, keys: Keys, targets: Sequence[Pieces]) -> int:
        """Load the leading run; how many arrived."""
        done = 0
        leases = self._client.leases(handle, keys, batch=self._batch(handle), timeout_s=self._load_timeout_s)
        for lease in leases:
            good = self._drain(lease, keys[done:], targets[done : done + lease.count])
            done += good
            if good < lease.count:
                break
        return done

    def _drain(self, lease: Lease, keys: Keys, targets: Sequence[Pieces]) -> int:
        """How many leading objects of a lease arrived. A damaged one is deleted, so that it is made anew."""
        sums = np.empty((lease.count, 1), np.uint64)

        def drain(at: int) -> None:
            sums[at] = scatter(lease.views[at], targets[at])

        self._drainer.spread(drain, lease.count, lease.namespace.geometry)
        whole, matching = lease.unchanged(), leading(sums, lease.sums)
        if matching < whole:
            _log.error("kvtierd: an object does not match its checksum and is deleted")
            self._client.delete(lease.namespace, keys[matching : matching + 1])
        return min(whole, matching)

    def close(self) -> None:
        """End the copying threads."""
        self._filler.close()
        self._drainer.close()

    @staticmethod
    def _batch(handle: NamespaceHandle) -> int:
        return max(1, BATCH_BYTES // handle.geometry.slot_bytes)
