"""Replay of MIN (L. Belady, 1966) for prefixes: what a cache that knows the future would hit.

Evicted is the block whose next request is furthest away; of those with the same next request the deepest in its
prefix, since the others are worth something without it.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import types

from kvtierd.bench.trace_file import Blocks, Positions
from kvtierd.bench.trace_queues import REPLAY
from kvtierd.index.jit import compiled
from kvtierd.policy.links import leading_run

_DEPTH_MAX = 1 << 20
_NEVER = 1 << 40


@compiled(types.int64[::1](types.int32[::1], types.int64[::1], types.int64))
def _next_requests(blocks: Blocks, starts: Positions, unique: int) -> Positions:
    """For every access the number of the next request that has its block, [accesses]."""
    following, seen = np.empty(blocks.size, np.int64), np.full(unique, _NEVER, np.int64)
    for request in range(starts.size - 2, -1, -1):
        for index in range(starts[request], starts[request + 1]):
            following[index] = seen[blocks[index]]
            seen[blocks[index]] = request
    return following


@compiled(REPLAY)
def bound_hits(blocks: Blocks, starts: Positions, unique: int, capacity: int) -> int:
    """Hits of MIN; arguments as in trace_queues."""
    following = _next_requests(blocks, starts, unique)
    place, rank = np.zeros(unique, np.int8), np.zeros(unique, np.int64)
    heap = [(np.int64(1), np.int64(0))]
    heap.clear()
    hits = size = 0
    for request in range(starts.size - 1):
        begin, end = starts[request], starts[request + 1]
        hits += leading_run(place, blocks, begin, end, 1)
        for index in range(end - 1, begin - 1, -1):
            block = blocks[index]
            size += place[block] == 0
            place[block] = 1
            rank[block] = -(following[index] * _DEPTH_MAX + index - begin)
            heapq.heappush(heap, (rank[block], np.int64(block)))
            while size > capacity:
                key, furthest = heapq.heappop(heap)
                # A block that was used since has a later entry.
                if place[furthest] and rank[furthest] == key:
                    place[furthest] = 0
                    size -= 1
    return hits
