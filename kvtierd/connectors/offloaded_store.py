"""Blocks of one running generation in the daemon: written, confirmed, read back, forgotten. No engine in here.

Their keys are random, so nobody else finds them. A block counts as kept only once it lies in nvme, or, where nvme does
not take it, is pinned in host: until then the caller has the only copy that is sure to stay.
"""

from __future__ import annotations

import collections
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import blake3
import numpy as np

from kvtierd.connectors.kv_layout import LayerKv, SlotView, carrier
from kvtierd.connectors.offloaded_table import Numbers
from kvtierd.core.errors import ErrorCode, KvtierdError, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.holds import Reservation
from kvtierd.protocol.messages import SLOT_EXISTS, TIER_NVME
from kvtierd.protocol.results import Masks, NamespaceHandle

_log = logging.getLogger(__name__)

T = TypeVar("T")
ArraysOf = Callable[[int], Sequence[LayerKv]]
"""The KV of one new block, by its place among them: an array of [heads, block_size, dim] for each layer."""

BATCH_BYTES = 32 * MIB
"""Reserved at a time: a chunk of a prefill that is larger than the host tier goes through it in such pieces."""
PAUSE_S = 0.02
"""Between two tries of what the daemon could not do just now."""

_Left = collections.deque[tuple[NamespaceHandle, dict[int, bytes]]]

_left: weakref.WeakKeyDictionary[Client, _Left] = weakref.WeakKeyDictionary()
"""Blocks of caches that were dropped and not closed, until another one has a reason to talk to the daemon: a finaliser
must not, for it may run in the midst of another request of the same client."""


class OffloadError(KvtierdError):
    """The past of a generation cannot be reached or kept: nothing was computed from a part of it."""


class OffloadedBlocks:
    """Private blocks of one namespace through one client.

    What the daemon cannot do now is tried again for `timeout_s`. Blocks that a killed process leaves behind are
    forgotten `ttl_s` seconds after their last use.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        geometry: Geometry,
        *,
        timeout_s: float,
        ttl_s: int,
        allow_loss: bool = False,
    ) -> None:
        self.client = client
        self.geometry = geometry
        self.timeout_s = timeout_s
        namespace = Namespace(model=model, geometry=geometry, revision="offloaded attention")
        self.handle = client.register(namespace, allow_loss=allow_loss, ttl_s=ttl_s)
        self._secret = os.urandom(32)
        self._next = 0
        self._keys: dict[int, bytes] = {}
        self._pinned: set[int] = set()
        self._left = _left.setdefault(client, collections.deque())
        weakref.finalize(self, self._left.append, (self.handle, self._keys))

    @property
    def count(self) -> int:
        """Blocks that are stored."""
        return len(self._keys)

    @property
    def pinned(self) -> int:
        """How many of them are in host only, and pinned there."""
        return len(self._pinned)

    def keys(self, blocks: Iterable[int]) -> Keys:
        """Keys of stored blocks by their numbers, [n, 32]."""
        return np.frombuffer(b"".join(self._keys[int(block)] for block in blocks), np.uint8).reshape(-1, 32)

    def new(self, count: int) -> Numbers:
        """Numbers for new blocks; they are stored by `write`, or given back by `forget`."""
        numbers = np.arange(self._next, self._next + count)
        self._next += count
        for number in numbers.tolist():
            self._keys[number] = blake3.blake3(self._secret + number.to_bytes(8, "little")).digest()
        return numbers

    def write(self, blocks: Numbers, parent: int | None, arrays_of: ArraysOf) -> None:
        """Store new blocks that follow each other behind `parent`. Raises OffloadError where there is no room in time.

        They are not sure to stay before `confirm`.
        """
        self._bury()
        keys, deadline_s, done = self.keys(blocks), time.monotonic() + self.timeout_s, 0
        while True:
            before = self._keys[int(blocks[done - 1])] if done else self._keys[parent] if parent is not None else b""
            done += self._write_some(keys[done:], before, _from(arrays_of, done))
            if done == len(keys):
                return
            if time.monotonic() > deadline_s:
                raise OffloadError(
                    f"{self._where()} has had no room in host for {len(keys) - done} blocks of "
                    f"{self.geometry.slot_bytes} bytes for {self.timeout_s} s; raise host.capacity"
                )
            time.sleep(PAUSE_S)

    def confirm(self, blocks: Numbers) -> None:
        """Return when these blocks are on stable storage, or pinned in host. Raises OffloadError where neither is."""
        keys = self.keys(blocks)
        tiers = self.patiently(lambda: self._settled(keys))
        if len(tiers) < len(keys):
            raise OffloadError(f"{self._where()} lost {len(keys) - len(tiers)} blocks that it had just stored")
        loose = np.flatnonzero((tiers & TIER_NVME) == 0)
        if not loose.size:
            return
        pinned, reason = 0, ""
        try:
            self._pinned.update(blocks[loose].tolist())
            pinned = self.client.pin(self.handle, keys[loose], timeout_s=self.timeout_s)
        except RequestError as error:
            reason = f" ({error})"
        if pinned < loose.size:
            raise OffloadError(
                f"{self._where()} keeps {loose.size - pinned} of {len(keys)} blocks neither in nvme nor pinned in host"
                f"{reason}: raise nvme.capacity (nvme.admission must be `all`, without a daily budget that is spent), "
                "or leases.max_pinned_share"
            )

    def read(self, block: int) -> list[LayerKv]:
        """The KV of a block, [heads, block_size, dim] for each layer. Raises OffloadError where it is lost."""
        found = self.client.fetch(self.handle, self.keys([block]), timeout_s=self.timeout_s)
        if not found.count:
            raise OffloadError(f"{self._where()} does not give back block {block} of the past")
        shape, element = self.geometry, carrier(self.geometry.dtype)
        layers = found.blocks[0].reshape(shape.layers, shape.layer_bytes)
        sizes = (shape.block_size, shape.kv_heads)
        k = layers[:, : shape.k_bytes].view(element).reshape(shape.layers, *sizes, shape.k_dim)
        v = layers[:, shape.k_bytes :].view(element).reshape(shape.layers, *sizes, shape.v_dim)
        return [LayerKv(k[layer].swapaxes(0, 1), v[layer].swapaxes(0, 1)) for layer in range(shape.layers)]

    def forget(self, blocks: Iterable[int]) -> None:
        """Delete blocks. Where the daemon is away their time to live ends them."""
        numbers = [int(block) for block in blocks]
        if not numbers:
            return
        keys = self.keys(numbers)
        held = [number for number in numbers if number in self._pinned]
        try:
            if held:
                self.client.unpin(self.handle, self.keys(held))
            self.client.delete(self.handle, keys)
        except KvtierdError as error:
            _log.warning("%d blocks of an offloaded generation are left to their time to live: %s", len(keys), error)
        self._pinned.difference_update(held)
        for number in numbers:
            del self._keys[number]

    def retain(self, live: Numbers) -> None:
        """Delete all blocks but these."""
        if len(live) < len(self._keys):
            self.forget(sorted(set(self._keys).difference(live.tolist())))

    def patiently(self, call: Callable[[], T]) -> T:
        """Call until the daemon can, for at most `timeout_s`. Raises OffloadError where it cannot, or lost a block."""
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return call()
            except Unavailable as error:
                if time.monotonic() > deadline_s:
                    raise OffloadError(
                        f"{self._where()} cannot be reached; the past of this generation is there: {error}"
                    ) from error
            except RequestError as error:
                if error.code != ErrorCode.BUSY or time.monotonic() > deadline_s:
                    raise OffloadError(f"{self._where()} refused: {error}") from error
            time.sleep(PAUSE_S)

    def _settled(self, keys: Keys) -> Masks:
        """Where the leading run lies when all that can be written is. Raises Unavailable where the daemon is away:
        a lookup alone calls that a miss, and a flush calls it so where there is no nvme tier."""
        try:
            self.client.flush(timeout_s=self.timeout_s)
        except Unavailable:
            self.client.ping(timeout_s=self.timeout_s)
        tiers = self.client.lookup(self.handle, keys, timeout_s=self.timeout_s).tiers
        if len(tiers) < len(keys):
            self.client.ping(timeout_s=self.timeout_s)
            tiers = self.client.lookup(self.handle, keys, timeout_s=self.timeout_s).tiers
        return tiers

    def _write_some(self, keys: Keys, parent: bytes, arrays_of: ArraysOf) -> int:
        """How many leading blocks are stored now."""
        done = 0
        batch = max(1, BATCH_BYTES // self.geometry.slot_bytes)
        try:
            for slots in self.client.reservations(
                self.handle, keys, batch=batch, parent=parent, timeout_s=self.timeout_s
            ):
                good = self._fill(slots, done, arrays_of)
                done += good
                if good < len(slots.views):
                    break
        except Unavailable as error:
            _log.debug("a store is tried again: %s", error)
        return done

    def _fill(self, slots: Reservation, first: int, arrays_of: ArraysOf) -> int:
        """Write the leading blocks that were granted, or are there from a try whose answer did not come."""
        fresh, good = [], 0
        for view, status in zip(slots.views, slots.status.tolist(), strict=True):
            if view is None and status != SLOT_EXISTS:
                break
            if view is not None:
                fresh.append(good)
            good += 1
        if not fresh:
            return good
        sums = np.empty((len(fresh), self.geometry.layers), np.uint64)
        for row, i in enumerate(fresh):
            view = slots.views[i]
            assert view is not None
            SlotView(view, self.geometry).fill(arrays_of(first + i), 0, sums[row])
        committed = slots.commit(fresh, sums=sums, timeout_s=self.timeout_s)
        return good if committed == len(fresh) else 0

    def _bury(self) -> None:
        """Delete what caches left behind that were dropped without `close`."""
        while self._left:
            handle, keys = self._left.popleft()
            if keys:
                self.client.delete(handle, np.frombuffer(b"".join(keys.values()), np.uint8).reshape(-1, 32))

    def _where(self) -> str:
        return f"kvtierd at {self.client.endpoint}"


def _from(arrays_of: ArraysOf, first: int) -> ArraysOf:
    return lambda i: arrays_of(first + i)
