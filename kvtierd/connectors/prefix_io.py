"""A prefix between an engine's cache arrays and the daemon: found, copied out, copied in. No engine in here.

Nothing in here waits for the daemon beyond the client's deadlines, and trouble with it is a miss or a refused block,
counted, and logged once a kind: an engine goes on without us.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.connectors.kv_layout import LayerKv, SlotView, check_cache
from kvtierd.core.errors import KvtierdError
from kvtierd.core.keys import Keys, block_keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client
from kvtierd.protocol.holds import Lease, Reservation
from kvtierd.protocol.messages import SLOT_BUSY, SLOT_EXISTS, TIER_HOST, Tier
from kvtierd.protocol.results import NO_MASKS, Masks

_log = logging.getLogger(__name__)

BATCH_BYTES = 64 * MIB
"""Bytes leased or reserved at a time: a prefix larger than the host tier goes through it in such pieces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """What became of the whole blocks of a cache: `stored` now, there before (`existed`), or `refused` for want of
    room, of a daemon, or of time. `payload_bytes` is what was written."""

    stored: int = 0
    existed: int = 0
    refused: int = 0
    payload_bytes: int = 0


@dataclasses.dataclass(slots=True)
class Counters:
    """Since the store was made. `failures` are exchanges with the daemon that raised an error."""

    restores: int = 0
    restored_tokens: int = 0
    stored_blocks: int = 0
    refused_blocks: int = 0
    corrupt_blocks: int = 0
    failures: int = 0


class PrefixIo:
    """One namespace through one client. Raises RequestError when the daemon refuses the namespace."""

    def __init__(self, client: Client, namespace: Namespace, counters: Counters) -> None:
        self.namespace = namespace
        self._client = client
        self._counters = counters
        self._handle = client.register(namespace)
        self._batch_blocks = max(1, BATCH_BYTES // namespace.geometry.slot_bytes)
        self._complained: set[str] = set()

    def keys(self, tokens: npt.NDArray[np.integer]) -> Keys:
        """Keys of the whole blocks of these tokens, [n, 32]."""
        return block_keys(self._handle.digest, tokens, self.namespace.geometry.block_size)

    def lookup(self, keys: Keys) -> Masks:
        """Residency masks of the stored prefix, one byte a block."""
        if not len(keys):
            return NO_MASKS
        try:
            return self._client.lookup(self._handle, keys).tiers
        except KvtierdError as error:
            self._failed("looking up a prefix", error)
            return NO_MASKS

    def read(self, keys: Keys, found: Masks, arrays: Sequence[LayerKv]) -> int:
        """Copy the blocks that `lookup` found into arrays from token 0 on; how many leading ones arrived whole."""
        done = 0
        try:
            while done < len(found):
                end = min(done + self._batch_blocks, len(found))
                with self._client.acquire(self._handle, keys[done:end]) as lease:
                    self._prefetch(keys[end : end + self._batch_blocks], found[end : end + self._batch_blocks])
                    good = self._copy_out(lease, keys[done:end], done, arrays)
                done += good
                if done < end:
                    break
        except KvtierdError as error:
            self._failed("restoring a prefix", error)
        return done

    def write(self, keys: Keys, arrays_of: Callable[[int, int], Sequence[LayerKv]]) -> Stored:
        """Store the blocks that the daemon does not have. `arrays_of(begin, end)` gives the KV of a range of tokens.

        The first block that is refused ends it: what follows a hole in a prefix can never be found. Raises ValueError
        when the arrays are not of the namespace's shape; nothing of that batch is stored then.
        """
        stored = existed = 0
        try:
            for begin in range(0, len(keys), self._batch_blocks):
                batch = keys[begin : begin + self._batch_blocks]
                with self._client.reserve(self._handle, batch) as slots:
                    new, old = self._copy_in(slots, begin, arrays_of)
                stored, existed = stored + new, existed + old
                if new + old < len(batch):
                    break
        except KvtierdError as error:
            self._failed("storing a prefix", error)
        refused = len(keys) - stored - existed
        self._counters.stored_blocks += stored
        self._counters.refused_blocks += refused
        return Stored(stored, existed, refused, stored * self.namespace.geometry.block_bytes)

    def prefetch(self, keys: Keys, tier: Tier) -> int:
        """Bring the stored prefix to a tier and wait for it; how many blocks."""
        return self._client.prefetch(self._handle, keys, tier=tier, wait=True)

    def drop(self, tiers: Sequence[Tier]) -> int:
        """Drop the namespace's copies in `tiers` where another remains. Raises Unavailable without a daemon."""
        if not tiers:
            raise ValueError("tiers is empty, which would purge the namespace: name the tiers")
        return self._client.purge(self._handle, tiers=tiers)

    def _prefetch(self, keys: Keys, found: Masks) -> None:
        """Have what lies on the disk on its way while the batch before it is copied."""
        if not (found & TIER_HOST).all():
            self._client.prefetch(self._handle, keys)

    def _copy_out(self, lease: Lease, keys: Keys, first: int, arrays: Sequence[LayerKv]) -> int:
        shape = self.namespace.geometry
        good = 0
        while good < lease.count:
            slot = SlotView(lease.views[good], shape)
            if not slot.read(arrays, (first + good) * shape.block_size, lease.sums[good]):
                break
            good += 1
        whole = lease.unchanged()  # a slot may have changed hands if the lease ran out: then its bytes are not at fault
        if good < min(whole, lease.count):
            self._counters.corrupt_blocks += 1
            _log.error("a block of %s does not match its checksum and is deleted", self.namespace.model)
            self._client.delete(self._handle, keys[good : good + 1])
        return min(good, whole)

    def _copy_in(
        self, slots: Reservation, first: int, arrays_of: Callable[[int, int], Sequence[LayerKv]]
    ) -> tuple[int, int]:
        """How many blocks of a reservation are stored now, and were before, up to the first that is refused."""
        shape = self.namespace.geometry
        busy = np.flatnonzero(slots.status == SLOT_BUSY)
        usable = int(busy[0]) if len(busy) else len(slots.status)
        granted = [i for i in range(usable) if slots.views[i] is not None]
        existed = int(np.count_nonzero(slots.status[:usable] == SLOT_EXISTS))
        if not granted:
            return 0, existed
        begin, end = granted[0], granted[-1] + 1
        arrays = arrays_of((first + begin) * shape.block_size, (first + end) * shape.block_size)
        check_cache(arrays, shape, (end - begin) * shape.block_size)
        sums = np.empty((len(granted), shape.layers), np.uint64)
        for row, i in enumerate(granted):
            view = slots.views[i]
            assert view is not None
            SlotView(view, shape).fill(arrays, (i - begin) * shape.block_size, sums[row])
        return slots.commit(granted, sums=sums), existed

    def _failed(self, what: str, error: KvtierdError) -> None:
        self._counters.failures += 1
        level = logging.DEBUG if what in self._complained else logging.WARNING
        self._complained.add(what)
        _log.log(level, "%s failed, generation goes on without it: %s", what, error)
