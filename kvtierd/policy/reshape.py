"""When blocks should lie in extents of other sizes: pure decisions from how often each part was read.

A block is split where its uses are concentrated in a part of it: the rest can then go when room is short, and the part
stays. Blocks that follow each other are merged where all of them are always used together: one extent is one
descriptor, one sum and one copy for a reader. Either is undone when that is no longer so. Uses are forgotten with each
change, so that the next one needs as much evidence as the last: that is the hysteresis.

Extents have a power of two of granules and begin at a multiple of their size, as in a buddy allocator: so there are
four sizes of them, and memory that is cut for one is soon used by another.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.index.hybrid import EXTENT_GRANULES_MAX

Uses = npt.NDArray[np.uint32]


class Shape(enum.IntEnum):
    """How a block lies."""

    WHOLE = 0
    """In a slot of its own."""
    SPLIT = 1
    MERGED = 2
    """In one extent with others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """What it takes."""

    uses_min: int = 16
    """Uses of its busiest granule before anything is decided about a block."""
    concentrated: float = 0.9
    """Share of a block's uses that must lie in half of it or less."""
    even: float = 0.9
    """Least uses of a granule over the most, where all are used together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Have so many blocks, the first ones of those asked about, lie in extents of these lengths in granules."""

    blocks: int
    parts: tuple[int, ...]


def decide(uses: Uses, shapes: Sequence[Shape], evidence: Evidence | None = None) -> Decision | None:
    """What should become of a block and those that follow it; None for nothing.

    `uses` [blocks, granules of a block] since they were last forgotten, `shapes` [blocks] how they lie now. The first
    one is decided about, and those behind it for a merge with it; of a merged extent all its blocks are given.
    """
    need, granules = evidence or Evidence(), uses.shape[1]
    if int(uses.max() if shapes[0] is Shape.MERGED else uses[0].max()) < need.uses_min:
        return None
    if shapes[0] is Shape.MERGED:
        return None if _even(uses.ravel(), need) else Decision(len(uses), (granules,) * len(uses))
    if shapes[0] is Shape.SPLIT:
        return Decision(1, (granules,)) if _even(uses[0], need) else None
    if not _even(uses[0], need):
        hot = _hot_part(uses[0], need)
        return None if hot is None else Decision(1, _around(*hot, granules))
    count = _together(uses, shapes, need)
    return Decision(count, (count * granules,)) if count > 1 else None


def _even(uses: Uses, need: Evidence) -> bool:
    return float(uses.min()) >= need.even * float(uses.max())


def _hot_part(uses: Uses, need: Evidence) -> tuple[int, int] | None:
    """(first, granules) of the smallest extent that has enough of the uses, if it is half of the block at most."""
    total, size = float(uses.sum()), 1
    while size <= uses.size // 2:
        for first in range(0, uses.size - size + 1, size):
            if float(uses[first : first + size].sum()) >= need.concentrated * total:
                return first, size
        size *= 2
    return None


def _around(first: int, size: int, granules: int) -> tuple[int, ...]:
    """Extents of a block one of which is given; the others as large as they can be."""
    return (*_aligned(0, first), size, *_aligned(first + size, granules))


def _aligned(begin: int, end: int) -> Sequence[int]:
    parts = []
    while begin < end:
        size = begin & -begin if begin else EXTENT_GRANULES_MAX
        while size > end - begin:
            size //= 2
        parts.append(size)
        begin += size
    return parts


def _together(uses: Uses, shapes: Sequence[Shape], need: Evidence) -> int:
    """How many blocks from the first on are used together and fit an extent: a power of two, 1 for none."""
    count, granules = 1, uses.shape[1]
    while 2 * count <= len(uses) and 2 * count * granules <= EXTENT_GRANULES_MAX:
        if any(shape is not Shape.WHOLE for shape in shapes[: 2 * count]) or not _even(uses[: 2 * count].ravel(), need):
            break
        count *= 2
    return count
