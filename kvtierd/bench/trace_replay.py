"""Replay of a trace through an eviction policy as tiers use it: slots, requests, victims."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.bench.trace_file import Trace
from kvtierd.policy.eviction import EvictionPolicy
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import ReturnModel, Usage

SEED = 0x6B767469
"""Of the model's hash and of the blocks' keys: a replay gives the same figures each time."""
_CLASS = 0
_NO_SLOT = -1

Slots = npt.NDArray[np.int32]


def block_keys64(unique: int) -> npt.NDArray[np.uint64]:
    """A key for each block, as evenly spread as hashes are, [unique] uint64."""
    return np.random.default_rng(SEED).integers(0, 1 << 64, unique, np.uint64)


class Cache:
    """A tier of `capacity` blocks without bytes. As in the other replays the blocks of a request are candidates too."""

    def __init__(self, trace: Trace, capacity: int, policy: EvictionPolicy) -> None:
        longest = int(np.diff(trace.starts).max())
        self._capacity = capacity
        self._policy = policy
        self._slot_of = np.full(trace.unique, _NO_SLOT, np.int32)
        self._block_of = np.zeros(capacity + longest, np.int32)
        self._free = list(range(capacity + longest - 1, -1, -1))
        self._holds = np.zeros(capacity + longest, np.int32)
        self.used = 0

    def hits(self, blocks: Slots) -> int:
        """Length of the leading run of resident blocks."""
        missing = np.flatnonzero(self._slot_of[blocks] < 0)
        return int(missing[0]) if missing.size else int(blocks.size)

    def present(self, blocks: Slots) -> npt.NDArray[np.bool_]:
        """Which blocks are resident, [n]."""
        mask: npt.NDArray[np.bool_] = self._slot_of[blocks] >= 0
        return mask

    def request(self, blocks: Slots, usage: Usage) -> Slots:
        """Use and insert all blocks of a request, evict what is too much, and return the blocks that went."""
        slots = self._slot_of[blocks]
        missing = np.flatnonzero(slots < 0)
        if missing.size:
            taken = np.array(self._free[-missing.size :], np.int32)
            del self._free[-missing.size :]
            slots[missing] = taken
            self._slot_of[blocks[missing]] = taken
            self._block_of[taken] = blocks[missing]
            self.used += missing.size
        self._policy.used(_CLASS, slots, usage)
        return self._evict() if self.used > self._capacity else blocks[:0]

    def copied(self, blocks: Slots) -> None:
        """Another tier has copies of these blocks."""
        slots = self._slot_of[blocks]
        self._policy.copied(_CLASS, slots[slots >= 0])

    def _evict(self) -> Slots:
        gone = []
        while self.used > self._capacity:
            victims = self._policy.victims(_CLASS, self._holds, self.used - self._capacity, 1 << 20)
            self._policy.removed(_CLASS, victims)
            gone.append(self._block_of[victims])
            self._slot_of[gone[-1]] = _NO_SLOT
            self._free.extend(victims.tolist())
            self.used -= victims.size
        return np.concatenate(gone)


def return_hits(trace: Trace, capacity: int) -> int:
    """Hits of the default policy."""
    longest = int(np.diff(trace.starts).max())
    model = ReturnModel(capacity, SEED)
    cache = Cache(trace, capacity, ReturnEviction(capacity + longest, model, 1))
    return replay(trace, cache, model)


def replay(trace: Trace, cache: Cache, model: ReturnModel) -> int:
    """Pass all requests through a cache; how many hits there were."""
    keys = block_keys64(trace.unique)[trace.blocks]
    bounds = trace.starts.tolist()
    hits = 0
    for begin, end, now_ns in zip(bounds[:-1], bounds[1:], trace.time_ns.tolist(), strict=True):
        blocks = trace.blocks[begin:end]
        found = cache.hits(blocks)
        hits += found
        cache.request(blocks, model.observe(keys[begin:end], found, now_ns))
    return hits
