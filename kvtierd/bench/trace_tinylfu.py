"""Replay of W-TinyLFU (G. Einziger, R. Friedman and B. Manes, 2017), block by block, as Caffeine has it.

A window of 1% LRU, a segmented main LRU with 80% protected, and a count-min sketch of four rows of 4-bit counters that
are halved after ten times the capacity of accesses; what leaves the window replaces the main region's victim where the
sketch knows it as used more often. The sketch here is wide enough that collisions play no part, as in the table of
shared/traces; with Caffeine's width it does worse on that trace at every capacity.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.bench.trace_file import Blocks, Positions
from kvtierd.bench.trace_queues import REPLAY
from kvtierd.index.jit import Word, compiled, helper
from kvtierd.policy.links import leading_run, make_list, pop_back, push_front, unlink

_WINDOW, _PROBATION, _PROTECTED = 1, 2, 3
_ROWS, _COUNTER_MAX = 4, 15
_COUNTERS_A_BLOCK = 64
_SAMPLES_A_BLOCK = 10
Sketch = npt.NDArray[np.uint8]
U64 = np.uint64


@helper
def _spread(value: Word) -> Word:
    """The finaliser of splitmix64 (S. Vigna)."""
    value = (value ^ (value >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> U64(27))) * U64(0x94D049BB133111EB)
    return value ^ (value >> U64(31))


@helper
def _cell(sketch: Sketch, block: Word, row: Word) -> Word:
    seed = U64(0x9E3779B97F4A7C15)
    return _spread(_spread(U64(block) + seed) + U64(row) * seed) & U64(sketch.shape[1] - 1)


@helper
def _frequency(sketch: Sketch, block: Word) -> Word:
    count = _COUNTER_MAX
    for row in range(_ROWS):
        count = min(count, sketch[row, _cell(sketch, block, row)])
    return count


@helper
def _count(sketch: Sketch, block: Word) -> None:
    for row in range(_ROWS):
        cell = _cell(sketch, block, row)
        sketch[row, cell] = min(_COUNTER_MAX, sketch[row, cell] + 1)


@helper
def _put(after: Word, before: Word, first: Word, place: Word, size: Word, region: Word, block: Word) -> None:
    push_front(after, before, first + region, block)
    place[block] = region
    size[region] += 1


@helper
def _pop(after: Word, before: Word, first: Word, place: Word, size: Word, region: Word) -> Word:
    block = pop_back(after, before, first + region)
    place[block] = 0
    size[region] -= 1
    return block


@compiled(REPLAY)
def tinylfu_hits(blocks: Blocks, starts: Positions, unique: int, capacity: int) -> int:
    """Hits of W-TinyLFU; arguments as in trace_queues."""
    after, before = np.empty(unique + 4, np.int32), np.empty(unique + 4, np.int32)
    for sentinel in range(unique, unique + 4):
        make_list(after, before, sentinel)
    place, size = np.zeros(unique, np.int8), np.zeros(4, np.int64)
    window_max = max(1, capacity // 100)
    main_max = capacity - window_max
    width = 1
    while width < _COUNTERS_A_BLOCK * capacity:
        width *= 2
    sketch = np.zeros((_ROWS, width), np.uint8)
    hits = samples = 0
    for request in range(starts.size - 1):
        begin, end = starts[request], starts[request + 1]
        hits += leading_run(place, blocks, begin, end, _PROTECTED)
        for index in range(end - 1, begin - 1, -1):
            block = blocks[index]
            _count(sketch, block)
            samples += 1
            if samples >= _SAMPLES_A_BLOCK * capacity:
                sketch >>= np.uint8(1)
                samples //= 2
            known = place[block]
            if known:
                unlink(after, before, block)
                size[known] -= 1
            _put(after, before, unique, place, size, _PROTECTED if known >= _PROBATION else _WINDOW, block)
            if size[_PROTECTED] > main_max * 4 // 5:
                demoted = _pop(after, before, unique, place, size, _PROTECTED)
                _put(after, before, unique, place, size, _PROBATION, demoted)
            if size[_WINDOW] <= window_max:
                continue
            leaving = _pop(after, before, unique, place, size, _WINDOW)
            if size[_PROBATION] + size[_PROTECTED] >= main_max:
                region = _PROBATION if size[_PROBATION] else _PROTECTED
                if size[region] == 0:
                    continue  # A capacity of one block is all window.
                if _frequency(sketch, leaving) <= _frequency(sketch, before[unique + region]):
                    continue
                _pop(after, before, unique, place, size, region)
            _put(after, before, unique, place, size, _PROBATION, leaving)
    return hits
