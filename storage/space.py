"""How much of a disk the store takes: a pure plan from the setting and the file system."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import GIB, KIB, PAGE_BYTES, format_bytes

METADATA_BYTES = 64 * KIB
"""Set aside for the superblock, the lock and the directory itself."""
INDEX_BYTES_PLANNED = METADATA_BYTES // 2
"""What of that is for journal and checkpoints; where they take more, there are fewer segments."""
SEGMENT_OVERHEAD_BYTES = 16 * KIB
"""Set aside per segment for what a file system keeps about a file: extent tree, directory entry."""
MIN_SEGMENT_BYTES = 64 * KIB
MIN_SEGMENTS = 2
"""With one segment every turn would drop the whole store."""
MANY_SEGMENTS = 8
MAX_DEFAULT_BYTES = 64 * GIB
MAX_RESERVE_BYTES = GIB
KEPT_SHARE = 8
"""A default that is lower by up to this part of what is stored changes nothing: a log file that grew beside the store
would else cost its oldest segment at each start, of two small ones half of everything."""


@runtime_checkable
class Punchable(Protocol):
    """A segment's file whose pages can be given back while it keeps its size and its claim on the space."""

    def punch(self, offset: int, length: int) -> None:
        """Make pages read as zeros and tell the device that nobody wants them. Raises OSError where that is unknown."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """`segments` new segments of `segment_bytes` fit in `capacity_bytes`, overhead counted."""

    capacity_bytes: int
    segment_bytes: int
    segments: int
    reserve_bytes: int

    def footprint(self, sizes: int, count: int) -> int:
        """What `count` segments of `sizes` bytes together take, everything counted."""
        return METADATA_BYTES + sizes + count * SEGMENT_OVERHEAD_BYTES


def plan(capacity: int, segment_bytes: int, free_bytes: int, total_bytes: int, own_bytes: int) -> Plan:
    """Decide the capacity, and the size of segments that divides it.

    `capacity` 0 takes half of what is free (with what is already ours), at most 64 GiB. The reserve, a twentieth of the
    file system and at most 1 GiB, stays free. Where half is a little less than
    what is ours, it is what is ours. Raises StartupError: 78 for bad settings, 74 for a full disk.
    """
    reserve = min(total_bytes // 20, MAX_RESERVE_BYTES)
    smallest = METADATA_BYTES + MIN_SEGMENTS * (MIN_SEGMENT_BYTES + SEGMENT_OVERHEAD_BYTES)
    if segment_bytes < MIN_SEGMENT_BYTES:
        raise StartupError(
            ExitCode.CONFIG, f"nvme.segment_bytes is {segment_bytes}; it must be at least {MIN_SEGMENT_BYTES}"
        )
    if capacity and capacity < smallest:
        raise StartupError(ExitCode.CONFIG, f"nvme.capacity is {capacity}; the least is {smallest} bytes")
    chosen = capacity or min((free_bytes + own_bytes) // 2, MAX_DEFAULT_BYTES)
    if not capacity and chosen < own_bytes <= min(chosen + chosen // KEPT_SHARE, MAX_DEFAULT_BYTES):
        chosen = own_bytes
    if chosen < smallest:
        raise StartupError(ExitCode.IO, f"the disk is full: {format_bytes(free_bytes)} free, {smallest} bytes needed")
    count, size = _divide(chosen - METADATA_BYTES, segment_bytes)
    return Plan(chosen, size, count, reserve)


def _divide(usable: int, segment_bytes: int) -> tuple[int, int]:
    """Number and size of segments. Few segments are made a little smaller, so that the remainder is not wasted; many
    keep their size, because segments of the same size can be recycled in place when the capacity changes."""
    count = usable // (segment_bytes + SEGMENT_OVERHEAD_BYTES)
    if count >= MANY_SEGMENTS:
        return count, segment_bytes // PAGE_BYTES * PAGE_BYTES
    count = max(MIN_SEGMENTS, -(-usable // (segment_bytes + SEGMENT_OVERHEAD_BYTES)))
    return count, (usable // count - SEGMENT_OVERHEAD_BYTES) // PAGE_BYTES * PAGE_BYTES
