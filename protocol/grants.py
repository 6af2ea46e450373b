"""What Reserve and Acquire gave, as a client holds it, and how their replies are read (protocol/SPEC.md §8)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.errors import KvtierdError
from kvtierd.core.geometry import Geometry
from kvtierd.core.token_spans import of_tokens
from kvtierd.protocol.arena import MappedChunk
from kvtierd.protocol.messages import SLOT_DTYPE, SPAN_DTYPE, Acquire, AcquirePart, AnyRequest, Reserve
from kvtierd.protocol.results import NO_MASKS, Codecs, Masks

Slots = np.ndarray[Any, np.dtype[np.void]]
"""Slot descriptors: [n] of SLOT_DTYPE."""


Spans = np.ndarray[Any, np.dtype[np.void]]
"""Spans: [n] of SPAN_DTYPE."""

Build = Callable[[list[int]], AnyRequest]
"""Makes a request from the number of its namespace."""


def reserve_request(numbers: list[int]) -> AnyRequest:
    """Reserve in this namespace."""
    return Reserve(id=0, namespace=numbers[0])


def acquire_request(*, ttl_ms: int = 0, verify: bool = False) -> Build:
    """Acquire with these options."""
    return lambda numbers: Acquire(id=0, namespace=numbers[0], ttl_ms=ttl_ms, verify=verify)


def part_request(begin: int, end: int, *, ttl_ms: int = 0) -> Build:
    """AcquirePart of these tokens."""
    return lambda numbers: AcquirePart(id=0, namespace=numbers[0], begin=begin, end=end, ttl_ms=ttl_ms)


@dataclasses.dataclass(slots=True)
class Granted:
    """What Reserve gave: a status a key ([n] uint8), and for each granted one its view in slot form."""

    number: int
    session_no: int
    status: Masks
    views: list[Bytes | None]


@dataclasses.dataclass(slots=True)
class Leased:
    """What Acquire gave: `count` blocks in slots, with all that is needed to copy and verify them."""

    number: int
    session_no: int
    count: int
    slots: Slots
    views: list[Bytes]
    chunks: list[MappedChunk]
    sums: Sums
    spans: Spans | None = None
    """Of a lease on parts: what is to be read from each extent. Then `count`, `views` and `sums` are of extents."""
    codecs: Codecs = dataclasses.field(default_factory=lambda: NO_MASKS)
    """What each block (or extent) has been through, as in Hit."""

    @property
    def sources(self) -> Masks:
        """Where each block was found: [count] uint8 masks."""
        return np.asarray(self.slots["source"], np.uint8)

    def unchanged(self) -> int:
        """How many leading blocks are still what the lease said, by their slots' generations.

        Read after a copy: the copy is then whole, because a slot's generation changes before its bytes do.
        """
        for i, chunk in enumerate(self.chunks):
            slot = int(self.slots["offset"][i]) // chunk.slot_bytes
            if chunk.generations[slot] != self.slots["generation"][i]:
                return i
        return self.count


def descriptors(frames: Sequence[memoryview], count: int) -> Slots:
    """Slot descriptors [count] in the first frame. Raises KvtierdError when they are not there."""
    if not frames or frames[0].nbytes != count * SLOT_DTYPE.itemsize:
        raise KvtierdError(f"the daemon sent no {count} slot descriptors")
    return np.frombuffer(frames[0], SLOT_DTYPE)


def sums_of(frames: Sequence[memoryview], position: int, count: int, layers: int) -> Sums:
    """Layer sums [count, layers] in a frame. Raises KvtierdError when they are not there."""
    if len(frames) <= position or frames[position].nbytes != count * layers * 8:
        raise KvtierdError(f"the daemon sent no layer sums of {count} blocks with {layers} layers")
    return np.frombuffer(frames[position], "<u8").reshape(count, layers)


def spans_of(frames: Sequence[memoryview], count: int) -> Spans | None:
    """Spans [count] of a lease on parts in the third frame, None where there is none. Raises KvtierdError for a length
    that is wrong."""
    if len(frames) < 3:
        return None
    if frames[2].nbytes != count * SPAN_DTYPE.itemsize:
        raise KvtierdError(f"the daemon sent {frames[2].nbytes} bytes of spans of {count} extents")
    return np.frombuffer(frames[2], SPAN_DTYPE)


def sizes_of(spans: Spans | None, geometry: Geometry, count: int) -> list[int]:
    """Bytes of the slot of each extent. Raises KvtierdError for a span that is not within its extent."""
    if spans is None:
        return [geometry.slot_bytes] * count
    wrong = spans["first"].astype(np.int64) + spans["count"] > spans["tokens"]
    if wrong.any():
        raise KvtierdError(f"the daemon sent a span outside its extent: {spans[wrong][0]}")
    return [of_tokens(geometry, tokens).slot_bytes for tokens in spans["tokens"].tolist()]


def leading(got: Sums, wanted: Sums) -> int:
    """How many leading rows are equal."""
    equal = (got == wanted).all(axis=1)
    return len(equal) if equal.all() else int(np.argmin(equal))


def granted_views(grant: Granted, index: Sequence[int]) -> list[Bytes]:
    """The views of these blocks; ValueError naming one that was not granted."""
    views = []
    for i in index:
        view = grant.views[i] if 0 <= i < len(grant.views) else None
        if view is None:
            raise ValueError(f"block {i} of the reservation was not granted, or is committed already")
        views.append(view)
    return views


def ascends(index: Sequence[int]) -> bool:
    """Whether each number is larger than the one before."""
    return all(here < behind for here, behind in itertools.pairwise(index))
