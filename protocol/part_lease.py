"""What a client reads of a lease on parts of blocks: tokens, wherever blocks and extents begin and end (SPEC.md §4)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from kvtierd.core.checksum import Bytes, layer_sums
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys
from kvtierd.core.token_spans import copy_tokens, of_tokens
from kvtierd.protocol.asking import Plan, Work
from kvtierd.protocol.grants import Leased, Spans, part_request
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.protocol.slots import SlotPlans


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Tokens `begin` to `begin + tokens` - 1 of a prefix, counted from the first key that was asked for.

    `data` is [layers, layer_bytes] uint8: the packed form of a block of so many tokens, K then V of each layer. It has
    no layers where nothing was found. `codec` is 0 for exact bytes, 2 where any of them have been through FP8.
    """

    begin: int
    tokens: int
    data: Bytes
    codec: int = 0


def fetch_part(
    plans: SlotPlans, handle: NamespaceHandle, keys: Keys, begin: int, end: int, *, verify: bool, deadline_ns: int
) -> Plan[Part]:
    """Lease, copy, release."""
    leased = yield from plans.acquire(handle, keys, part_request(begin, end), deadline_ns)
    try:
        part: Part = yield Work(functools.partial(read_part, leased, handle.geometry, begin, end, verify=verify))
        return dataclasses.replace(part, codec=int(leased.codecs.max(initial=0)))
    finally:
        plans.end(leased)


def read_part(lease: Leased, geometry: Geometry, begin: int, end: int, *, verify: bool) -> Part:
    """Copy the tokens begin..end-1 of what was leased, as far as it is good: whole in its slots, as its sums say."""
    spans = lease.spans
    nothing = Part(begin, 0, np.empty((0, 0), np.uint8))
    if spans is None or not lease.count:
        return nothing
    tokens = min(end, int(spans["begin"][-1]) + int(spans["count"][-1])) - begin
    if tokens <= 0:
        return nothing
    slot, shape = _memory(geometry, tokens)
    for view, span in zip(lease.views, spans, strict=True):
        _copy(view, span, geometry, slot, shape, begin)
    good = lease.unchanged() if not verify else min(_matching(lease, geometry), lease.unchanged())
    if good < lease.count:
        kept = int(spans["begin"][good]) - begin
        return nothing if kept <= 0 else _shortened(slot, shape, begin, kept)
    return _part(slot, shape, begin)


def _memory(geometry: Geometry, tokens: int) -> tuple[Bytes, Geometry]:
    shape = of_tokens(geometry, tokens)
    return np.empty(shape.slot_bytes, np.uint8), shape


def _copy(view: Bytes, span: Spans, geometry: Geometry, slot: Bytes, shape: Geometry, begin: int) -> None:
    """Copy what an extent has of the tokens from `begin` on."""
    at, count, first = int(span["begin"]) - begin, int(span["count"]), int(span["first"])
    skipped = max(0, -at)
    count = min(count - skipped, shape.block_size - at - skipped)
    if count > 0:
        of = of_tokens(geometry, int(span["tokens"]))
        copy_tokens(view, of, first + skipped, slot, shape, at + skipped, count)


def _matching(lease: Leased, geometry: Geometry) -> int:
    """How many leading extents match their sums."""
    assert lease.spans is not None
    for i, (view, tokens) in enumerate(zip(lease.views, lease.spans["tokens"].tolist(), strict=True)):
        if (layer_sums(view, of_tokens(geometry, tokens)) != lease.sums[i]).any():
            return i
    return lease.count


def _shortened(slot: Bytes, shape: Geometry, begin: int, tokens: int) -> Part:
    less, of = _memory(shape, tokens)
    copy_tokens(slot, shape, 0, less, of, 0, tokens)
    return _part(less, of, begin)


def _part(slot: Bytes, shape: Geometry, begin: int) -> Part:
    parts = slot.reshape(shape.layers, shape.layer_stride)
    return Part(begin, shape.block_size, np.ascontiguousarray(parts[:, : shape.layer_bytes]))
