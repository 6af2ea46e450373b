"""Blocks of one running generation in the daemon: stored, read back, forgotten. No engine in here.

Their keys are random, so nobody else finds them. A block counts as kept only once it lies in nvme, or, where nvme does
not take it, is pinned in host: until then the caller has the only copy that is sure to stay.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

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
from kvtierd.protocol.messages import TIER_NVME
from kvtierd.protocol.results import NamespaceHandle

_log = logging.getLogger(__name__)

T = TypeVar("T")
BATCH_BYTES = 16 * MIB
"""Stored at a time."""
PAUSE_S = 0.02
"""Between two tries of what the daemon could not do just now."""

_Left = collections.deque[tuple[NamespaceHandle, dict[int, bytes]]]

_left: weakref.WeakKeyDictionary[Client, _Left] = weakref.WeakKeyDictionary()
"""Blocks of caches that were dropped and not closed, until another one has a reason to talk to the daemon: a finaliser
must not, for it may run in the midst of another request of the same client."""


class OffloadError(KvtierdError):
    """The past of a generation cannot be reached or kept: nothing was computed from a part of it."""


class NewBlock(NamedTuple):
    """A block to store: its number, that of the block before it in its row, and its KV, which is asked for when there
    is a place for it: an array of [heads, block_size, dim] for each layer."""

    number: int
    parent: int | None
    arrays: Callable[[], Sequence[LayerKv]]


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
        """Numbers for new blocks; they are stored by `store`, or given back by `forget`."""
        numbers = np.arange(self._next, self._next + count)
        self._next += count
        for number in numbers.tolist():
            self._keys[number] = blake3.blake3(self._secret + number.to_bytes(8, "little")).digest()
        return numbers

    def store(self, fresh: Sequence[NewBlock]) -> None:
        """Store new blocks and return when they are on stable storage, or pinned in host.

        They go in batches, each of which is on stable storage before the next one: more than the daemon can hold back
        for its disk would be evicted before it is written. What was, is written again. Raises OffloadError where a
        batch does not get there in `timeout_s`, or blocks can neither be written to nvme nor pinned.
        """
        self._bury()
        batch = max(1, BATCH_BYTES // self.geometry.slot_bytes)
        for begin in range(0, len(fresh), batch):
            missing = fresh[begin : begin + batch]
            deadline_s = time.monotonic() + self.timeout_s
            while missing:
                self._write(missing)
                missing = self._confirm(missing)
                if missing and time.monotonic() > deadline_s:
                    raise OffloadError(
                        f"{self._where()} has had no room in host for {len(missing)} blocks of "
                        f"{self.geometry.slot_bytes} bytes for {self.timeout_s} s; raise host.capacity"
                    )
                if missing:
                    time.sleep(PAUSE_S)

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

    def _write(self, fresh: Sequence[NewBlock]) -> None:
        """Store what the daemon has room for now, each run of blocks that follow each other in one go."""
        ends = [i for i in range(1, len(fresh)) if fresh[i].parent != fresh[i - 1].number]
        for begin, end in itertools.pairwise([0, *ends, len(fresh)]):
            run = fresh[begin:end]
            keys = self.keys(item.number for item in run)
            parent = b"" if run[0].parent is None else self._keys[run[0].parent]
            try:
                for slots in self.client.reservations(
                    self.handle, keys, batch=len(keys), parent=parent, timeout_s=self.timeout_s
                ):
                    self._fill(slots, run)
            except Unavailable as error:
                _log.debug("a store is tried again: %s", error)

    def _fill(self, slots: Reservation, run: Sequence[NewBlock]) -> None:
        granted = [i for i, view in enumerate(slots.views) if view is not None]
        if not granted:
            return
        sums = np.empty((len(granted), self.geometry.layers), np.uint64)
        for row, i in enumerate(granted):
            view = slots.views[i]
            assert view is not None
            SlotView(view, self.geometry).fill(run[i].arrays(), 0, sums[row])
        slots.commit(granted, sums=sums, timeout_s=self.timeout_s)

    def _confirm(self, fresh: Sequence[NewBlock]) -> list[NewBlock]:
        """Which of these blocks are not there; those that are lie on stable storage, or are pinned in host now."""
        tiers = self.patiently(lambda: self._settled(self.keys(item.number for item in fresh)))
        loose = [item.number for item, mask in zip(fresh, tiers, strict=True) if mask and not mask & TIER_NVME]
        if loose:
            self._pin(loose)
        return [item for item, mask in zip(fresh, tiers, strict=True) if not mask]

    def _settled(self, keys: Keys) -> list[int]:
        """Where each block lies when all that can be written is, 0 for nowhere. Raises Unavailable where the daemon is
        away: a lookup alone calls that a miss, and a flush calls it so where there is no nvme tier."""
        try:
            self.client.flush(timeout_s=self.timeout_s)
        except Unavailable:
            self.client.ping(timeout_s=self.timeout_s)
        hits = self.client.lookup_many(
            self.handle, [keys[i : i + 1] for i in range(len(keys))], timeout_s=self.timeout_s
        )
        if not all(hit.count for hit in hits):
            self.client.ping(timeout_s=self.timeout_s)
        return [int(hit.tiers[0]) if hit.count else 0 for hit in hits]

    def _pin(self, numbers: list[int]) -> None:
        pinned, reason = 0, ""
        self._pinned.update(numbers)
        try:
            pinned = self.client.pin(self.handle, self.keys(numbers), timeout_s=self.timeout_s)
        except RequestError as error:
            reason = f" ({error})"
        if pinned < len(numbers):
            raise OffloadError(
                f"{self._where()} keeps {len(numbers) - pinned} blocks of the past neither in nvme nor pinned in host"
                f"{reason}: raise nvme.capacity (nvme.admission must be `all`, without a daily budget that is spent), "
                "or leases.max_pinned_share"
            )

    def _bury(self) -> None:
        """Delete what caches left behind that were dropped without `close`."""
        while self._left:
            handle, keys = self._left.popleft()
            if keys:
                self.client.delete(handle, np.frombuffer(b"".join(keys.values()), np.uint8).reshape(-1, 32))

    def _where(self) -> str:
        return f"kvtierd at {self.client.endpoint}"
