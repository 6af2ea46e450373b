"""Who goes first when a tier needs room."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.index.lru import LruLists
from kvtierd.policy.returns import Usage

Slots = npt.NDArray[np.int32]

CLASSES_MAX = 1 << 16


class EvictionPolicy(Protocol):
    """What a tier tells about its slots, and what it asks. `slots` are [n] int32 in the order of their prefix.

    `cls` is the class of the slots (their size and owner): room for one class can only come from slots of that class.
    Only `victims` decides, from nothing but what was told before; a policy evicts nothing itself.
    """

    def inserted(self, cls: int, slots: Slots) -> None:
        """The slots hold blocks now. Of those that a request was told to use this is known already."""
        ...

    def used(self, cls: int, slots: Slots, usage: Usage, first: int = 0, before: int = -1) -> None:
        """A request used or stored its blocks `first`, `first` + 1 and so on, which lie in these slots.

        A slot is -1 where the block is not in this tier; those that held no block until now hold one. `before` is the
        slot of block `first` - 1, or -1. Each slot is named once.
        """
        ...

    def accessed(self, cls: int, slots: Slots) -> None:
        """A request used the blocks in these slots; slots that hold no block are ignored."""
        ...

    def chained(self, cls: int, slots: Slots, before: Slots) -> None:
        """The block in slot i, of one prefix all, comes right after the one in slot `before[i]` (-1: not in this tier).

        It is no use of them.
        """
        ...

    def copied(self, cls: int, slots: Slots, *, elsewhere: bool = True) -> None:
        """Another tier has a copy of the blocks in these slots now, or has none any more; slots without are ignored."""
        ...

    def removed(self, cls: int, slots: Slots) -> None:
        """The slots hold no blocks any more; those that held none are ignored."""
        ...

    def victims(self, cls: int, holds: npt.NDArray[Any], out_max: int, scan_max: int) -> Slots:
        """Up to `out_max` slots whose blocks should go, in that order, none of them held.

        `holds` is a column over all slots (int32 or uint16), 0 where nobody holds the slot. The search looks at
        `scan_max` slots at most, so that its time is bounded whatever is held.
        """
        ...


class LruEviction:
    """The least recently used block goes first; of blocks used together, the tail of the prefix before its head."""

    def __init__(self, slots_max: int, classes_max: int = CLASSES_MAX) -> None:
        self._lists = LruLists(slots_max, classes_max)

    def inserted(self, cls: int, slots: Slots) -> None:
        """See EvictionPolicy."""
        self._lists.push(cls, slots[~self._lists.listed(slots)])

    def used(self, cls: int, slots: Slots, usage: Usage, first: int = 0, before: int = -1) -> None:  # noqa: ARG002
        """See EvictionPolicy."""
        self._lists.push(cls, slots[slots >= 0])

    def accessed(self, cls: int, slots: Slots) -> None:
        """See EvictionPolicy."""
        self._lists.touch(cls, slots)

    def chained(self, cls: int, slots: Slots, before: Slots) -> None:  # noqa: ARG002
        """See EvictionPolicy. Blocks that came in out of order get the order in which they should go."""
        self._lists.touch(cls, slots)

    def copied(self, cls: int, slots: Slots, *, elsewhere: bool = True) -> None:
        """See EvictionPolicy."""

    def removed(self, cls: int, slots: Slots) -> None:
        """See EvictionPolicy."""
        self._lists.remove(cls, slots)

    def victims(self, cls: int, holds: npt.NDArray[Any], out_max: int, scan_max: int) -> Slots:
        """See EvictionPolicy."""
        return self._lists.victims(cls, holds, out_max, scan_max)
