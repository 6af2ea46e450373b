"""Least-recently-used lists over slot numbers: doubly linked through two int32 columns, one list per class.

A list is circular through a sentinel of its class, so that linking has no special cases. A link is stored as its node
plus one: zeroed memory says that a slot is on no list, and is not touched before it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.layout import ROW_NUMBERS, Rows
from kvtierd.index.memory import reserve

_LINKS = types.int32[:, ::1]
Links = npt.NDArray[np.int32]
Slots = Rows
_COLDER, _HOTTER = 0, 1
SLOTS_MAX = 1 << 30


@helper
def _unlink(links: Links, node: Word) -> None:
    colder, hotter = links[node, _COLDER] - 1, links[node, _HOTTER] - 1
    links[colder, _HOTTER] = hotter + 1
    links[hotter, _COLDER] = colder + 1
    links[node, _COLDER] = links[node, _HOTTER] = 0


@helper
def _link_hottest(links: Links, sentinel: Word, node: Word) -> None:
    if links[sentinel, _COLDER] == 0:
        links[sentinel, _COLDER] = links[sentinel, _HOTTER] = sentinel + 1
    hottest = links[sentinel, _COLDER] - 1
    links[node, _COLDER], links[node, _HOTTER] = hottest + 1, sentinel + 1
    links[hottest, _HOTTER] = links[sentinel, _COLDER] = node + 1


@compiled(types.int64(_LINKS, types.int64, ROW_NUMBERS))
def _push(links: Links, sentinel: int, slots: Slots) -> int:
    added = 0
    for index in range(slots.size - 1, -1, -1):
        if links[slots[index], _COLDER] == 0:
            added += 1
        else:
            _unlink(links, slots[index])
        _link_hottest(links, sentinel, slots[index])
    return added


@compiled(types.int64(_LINKS, types.int64, ROW_NUMBERS))
def _touch(links: Links, sentinel: int, slots: Slots) -> int:
    touched = 0
    for index in range(slots.size - 1, -1, -1):
        if links[slots[index], _COLDER] != 0:
            _unlink(links, slots[index])
            _link_hottest(links, sentinel, slots[index])
            touched += 1
    return touched


@compiled(types.int64(_LINKS, ROW_NUMBERS))
def _remove(links: Links, slots: Slots) -> int:
    removed = 0
    for slot in slots:
        if links[slot, _COLDER] != 0:
            _unlink(links, slot)
            removed += 1
    return removed


def _victims_of(holds: Any) -> Any:
    return types.int64(_LINKS, types.int64, holds, types.int64, ROW_NUMBERS)


@compiled(_victims_of(types.int32[::1]), _victims_of(types.uint16[::1]))
def _victims(links: Links, sentinel: int, holds: npt.NDArray[Any], scan_max: int, out: Slots) -> int:
    found, node, hottest = 0, links[sentinel, _HOTTER] - 1, links[sentinel, _COLDER] - 1
    for _ in range(scan_max):
        if node < 0 or node == sentinel or found == out.size:
            break
        hotter = links[node, _HOTTER] - 1
        if holds[node] == 0:
            out[found] = node
            found += 1
        else:
            _unlink(links, node)
            _link_hottest(links, sentinel, node)
        if node == hottest:  # Beyond it come the held ones that this search has moved there.
            break
        node = hotter
    return found


class LruLists:
    """Recency of up to `slots_max` slots (0..slots_max-1), each on at most one of `classes_max` lists.

    Arguments `slots` are [n] int32 in the order of their prefix, and are walked from the tail: the head of a prefix
    ends up hottest and its tail is evicted first, because a prefix without its head is worth nothing. A slot must be
    named with the class whose list it is on; that, and numbers in range, is the caller's part.
    Raises ValueError when a limit or a class is out of range.
    """

    def __init__(self, slots_max: int, classes_max: int) -> None:
        if not 1 <= slots_max <= SLOTS_MAX or not 1 <= classes_max <= SLOTS_MAX:
            raise ValueError(f"slots_max {slots_max} and classes_max {classes_max} must be in 1..{SLOTS_MAX}")
        self._slots_max, self._classes_max = slots_max, classes_max
        self._links: Links = reserve((slots_max + classes_max, 2), np.int32, huge=False)
        self._lengths: npt.NDArray[np.int64] = reserve((classes_max,), np.int64, huge=False)

    def push(self, cls: int, slots: Slots) -> None:
        """Put slots on the hot end; one that is there already is moved."""
        added = _push(self._links, self._sentinel(cls), slots)
        self._lengths[cls] += added

    def touch(self, cls: int, slots: Slots) -> int:
        """Move slots to the hot end; those on no list stay so. Returns how many were moved."""
        return _touch(self._links, self._sentinel(cls), slots)

    def listed(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which slots are on a list, [n]."""
        mask: npt.NDArray[np.bool_] = self._links[slots, _COLDER] != 0
        return mask

    def remove(self, cls: int, slots: Slots) -> int:
        """Take slots off their list; those on none are left alone. Returns how many were removed."""
        self._sentinel(cls)
        removed = _remove(self._links, slots)
        self._lengths[cls] -= removed
        return removed

    def victims(self, cls: int, holds: npt.NDArray[Any], out_max: int, scan_max: int) -> Slots:
        """Up to `out_max` unheld slots, coldest first; they stay on their list. Looks at `scan_max` slots at most.

        `holds` is an int32 or uint16 column over slots, 0 for one that may go. A held slot on the way is moved to the
        hot end: it is in use, and would be in the way of every later search.
        """
        out = np.empty(max(0, out_max), np.int32)
        return out[: _victims(self._links, self._sentinel(cls), holds, scan_max, out)]

    def length(self, cls: int) -> int:
        """Slots on a list."""
        self._sentinel(cls)
        return int(self._lengths[cls])

    def _sentinel(self, cls: int) -> int:
        if not 0 <= cls < self._classes_max:
            raise ValueError(f"class {cls} is not in 0..{self._classes_max - 1}")
        return self._slots_max + cls
