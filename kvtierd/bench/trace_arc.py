"""Replay of ARC (N. Megiddo and D. Modha, FAST'03), block by block.

The four lists and the target p are the paper's: T1 and T2 hold blocks seen once and more often, B1 and B2 remember
blocks that left them, and a hit among the remembered moves p, the size that T1 should have.
"""

from __future__ import annotations

import numpy as np

from kvtierd.bench.trace_file import Blocks, Positions
from kvtierd.bench.trace_queues import REPLAY
from kvtierd.index.jit import compiled
from kvtierd.policy.links import leading_run, make_list, pop_back, push_front, unlink

_T1, _T2, _B1, _B2 = 1, 2, 3, 4


@compiled(REPLAY)
def arc_hits(blocks: Blocks, starts: Positions, unique: int, capacity: int) -> int:
    """Hits of ARC; arguments as in trace_queues."""
    after, before = np.empty(unique + 5, np.int32), np.empty(unique + 5, np.int32)
    for sentinel in range(unique, unique + 5):
        make_list(after, before, sentinel)
    place = np.zeros(unique, np.int8)
    size = np.zeros(5, np.int64)
    hits, target = 0, 0.0
    for request in range(starts.size - 1):
        begin, end = starts[request], starts[request + 1]
        hits += leading_run(place, blocks, begin, end, _T2)
        for index in range(end - 1, begin - 1, -1):
            block = blocks[index]
            known = place[block]
            replace = False
            if known == _B1:
                target = min(float(capacity), target + max(size[_B2] / size[_B1], 1.0))
                replace = True
            elif known == _B2:
                target = max(0.0, target - max(size[_B1] / size[_B2], 1.0))
                replace = True
            elif known == 0 and size[_T1] + size[_B1] == capacity:
                replace = size[_T1] < capacity
                oldest = _B1 if replace else _T1
                place[pop_back(after, before, unique + oldest)] = 0
                size[oldest] -= 1
            elif known == 0 and size.sum() >= capacity:
                replace = True
                if size.sum() == 2 * capacity:
                    place[pop_back(after, before, unique + _B2)] = 0
                    size[_B2] -= 1
            if replace and size[_T1] + size[_T2] >= capacity:
                first = size[_T1] > 0 and (size[_T1] > target or (known == _B2 and size[_T1] == target))
                source, ghost = (_T1, _B1) if first else (_T2, _B2)
                victim = pop_back(after, before, unique + source)
                push_front(after, before, unique + ghost, victim)
                place[victim] = ghost
                size[source] -= 1
                size[ghost] += 1
            if known:
                unlink(after, before, block)
                size[known] -= 1
            place[block] = _T2 if known else _T1
            size[place[block]] += 1
            push_front(after, before, unique + place[block], block)
    return hits
