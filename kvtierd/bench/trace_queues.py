"""Replays of FIFO, LRU, SIEVE and S3-FIFO, block by block, as published.

Every replay here and beside goes request by request: the leading run of resident blocks counts as hits, then all blocks
of the request are touched or inserted from the tail to the head, so that heads outlive tails. Arguments are `blocks`,
`starts` and `unique` of a Trace and a capacity in blocks of at least 1; the result is the number of hits.
"""

from __future__ import annotations

import numpy as np
from numba import types

from kvtierd.bench.trace_file import Blocks, Positions
from kvtierd.index.jit import Word, compiled, helper
from kvtierd.policy.links import leading_run, make_list, pop_back, push_front, unlink

REPLAY = types.int64(types.int32[::1], types.int64[::1], types.int64, types.int64)
"""Signature of a replay."""

_SMALL, _MAIN, _GHOST = 1, 2, 3
_COUNT_MAX = 3
"""Two bits of access count a block, as in S3-FIFO."""


@compiled(REPLAY)
def fifo_hits(blocks: Blocks, starts: Positions, unique: int, capacity: int) -> int:
    """First in, first out: a ring of the resident blocks."""
    place = np.zeros(unique, np.int8)
    ring = np.full(capacity, -1, np.int32)
    hits = inserted = 0
    for request in range(starts.size - 1):
        begin, end = starts[request], starts[request + 1]
        hits += leading_run(place, blocks, begin, end, 1)
        for index in range(end - 1, begin - 1, -1):
            block = blocks[index]
            if place[block] == 0:
                slot = inserted % capacity
                if ring[slot] >= 0:
                    place[ring[slot]] = 0
                ring[slot], place[block] = block, 1
                inserted += 1
    return hits


@compiled(REPLAY)
def lru_hits(blocks: Blocks, starts: Positions, unique: int, capacity: int) -> int:
    """Least recently used."""
    after, before = np.empty(unique + 1, np.int32), np.empty(unique + 1, np.int32)
    place = np.zeros(unique, np.int8)
    make_list(after, before, unique)
    hits = size = 0
    for request in range(starts.size - 1):
        begin, end = starts[request], starts[request + 1]
        hits += leading_run(place, blocks, begin, end, 1)
        for index in range(end - 1, begin - 1, -1):
            block = blocks[index]
            if place[block]:
                unlink(after, before, block)
            elif size == capacity:
                place[pop_back(after, before, unique)] = 0
            else:
                size += 1
            place[block] = 1
            push_front(after, before, unique, block)
    return hits


@compiled(REPLAY)
def sieve_hits(blocks: Blocks, starts: Positions, unique: int, capacity: int) -> int:
    """SIEVE (Y. Zhang et al., NSDI'24): a queue in order of insertion and a hand that spares visited blocks."""
    after, before = np.empty(unique + 1, np.int32), np.empty(unique + 1, np.int32)
    place, visited = np.zeros(unique, np.int8), np.zeros(unique, np.bool_)
    make_list(after, before, unique)
    hits, size, hand = 0, 0, unique
    for request in range(starts.size - 1):
        begin, end = starts[request], starts[request + 1]
        hits += leading_run(place, blocks, begin, end, 1)
        for index in range(end - 1, begin - 1, -1):
            block = blocks[index]
            if place[block]:
                visited[block] = True
                continue
            if size == capacity:
                victim = hand if hand != unique else before[unique]
                while visited[victim]:
                    visited[victim] = False
                    victim = before[victim] if before[victim] != unique else before[unique]
                hand = before[victim]
                unlink(after, before, victim)
                place[victim] = 0
            else:
                size += 1
            place[block], visited[block] = 1, False
            push_front(after, before, unique, block)
    return hits


@helper
def _from_small(after: Word, before: Word, first: Word, place: Word, count: Word, size: Word, ghosts_max: Word) -> None:
    """Take the oldest block of the small queue to the main one if it was used again, else to the ghosts."""
    victim = pop_back(after, before, first + _SMALL)
    size[_SMALL] -= 1
    moved = _MAIN if count[victim] > 1 else _GHOST
    if moved == _GHOST and size[_GHOST] > 0 and size[_GHOST] >= ghosts_max:
        place[pop_back(after, before, first + _GHOST)] = 0
        size[_GHOST] -= 1
    if moved == _MAIN:
        count[victim] = 0
    push_front(after, before, first + moved, victim)
    place[victim] = moved
    size[moved] += 1


@helper
def _from_main(after: Word, before: Word, first: Word, place: Word, count: Word, size: Word) -> None:
    """Evict the oldest block of the main queue, or let it go round once more for each access it had."""
    victim = pop_back(after, before, first + _MAIN)
    if count[victim] > 0:
        count[victim] -= 1
        push_front(after, before, first + _MAIN, victim)
    else:
        place[victim] = 0
        size[_MAIN] -= 1


@compiled(REPLAY)
def s3fifo_hits(blocks: Blocks, starts: Positions, unique: int, capacity: int) -> int:
    """S3-FIFO (J. Yang et al., SOSP'23): a small queue of a tenth, a main queue, and ghosts of the small one.

    A block moves from small to main at its second access there, and there are as many ghosts as the main queue has
    blocks; both are as the table of shared/traces was made.
    """
    after, before = np.empty(unique + 4, np.int32), np.empty(unique + 4, np.int32)
    for sentinel in range(unique, unique + 4):
        make_list(after, before, sentinel)
    place, count, size = np.zeros(unique, np.int8), np.zeros(unique, np.int8), np.zeros(4, np.int64)
    small_max = max(1, capacity // 10)
    hits = 0
    for request in range(starts.size - 1):
        begin, end = starts[request], starts[request + 1]
        hits += leading_run(place, blocks, begin, end, _MAIN)
        for index in range(end - 1, begin - 1, -1):
            block = blocks[index]
            if place[block] == _SMALL or place[block] == _MAIN:
                count[block] = min(_COUNT_MAX, count[block] + 1)
                continue
            while size[_SMALL] + size[_MAIN] >= capacity:
                if size[_SMALL] >= small_max or size[_MAIN] == 0:
                    _from_small(after, before, unique, place, count, size, capacity - small_max)
                else:
                    _from_main(after, before, unique, place, count, size)
            target = _SMALL
            if place[block] == _GHOST:
                unlink(after, before, block)
                size[_GHOST] -= 1
                target = _MAIN
            push_front(after, before, unique + target, block)
            place[block], count[block] = target, 0
            size[target] += 1
    return hits
