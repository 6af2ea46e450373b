"""Extents of other sizes over a restart: which parts of which blocks lie in a slot, as the snapshot tells it.

A block comes back only if all of it is there: the parts that it was split into, or the extent that it was merged into.
Layer sums of extents come with the snapshot, and are what a part is verified against, as in the life before.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import numpy as np

from kvtierd.core.checksum import Sums
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.protocol.messages import TIER_HOST
from kvtierd.tiers.blocks import RESIDENT, VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.shapes import Shapes
from kvtierd.tiers.warm_host import WarmHostTier
from kvtierd.tiers.warm_snapshot import Extent

Find = Callable[[np.ndarray[tuple[int], np.dtype[np.int64]], Sums], Slots]


def extents_of(copies: Copies, places: Sequence[int], rows: Rows, slots: Slots, cls: SlotClass) -> list[Extent]:
    """Those of these rows of extents that are whole; `places` are those of their slots."""
    found = []
    for place, row, slot in zip(places, rows.tolist(), slots.tolist(), strict=True):
        blocks, tokens = copies.shapes.blocks_in(row), int(copies.blocks.table.extent_page[row])
        if not blocks.size:
            continue
        number = int(copies.blocks.table.namespace[blocks[0]])
        size = copies.namespaces[number].geometry.block_size
        if max(size, tokens) != size * blocks.size:
            continue  # one of its blocks lies elsewhere by now
        sums = copies.host.sums_of(cls, np.array([slot], np.int32))
        found.append(
            Extent(
                place=place,
                generation=int(copies.host.generation[slot]),
                namespace=number,
                first=_first_token(copies.shapes, int(blocks[0]), row, size) if tokens < size else 0,
                tokens=tokens,
                keys=copies.blocks.table.key[blocks].tobytes(),
                block_sums=copies.blocks.table.block_sum[blocks].tobytes(),
                sums=sums.tobytes(),
            )
        )
    return found


def _first_token(shapes: Shapes, block: int, extent: int, size: int) -> int:
    pieces = shapes.pieces(np.array([block], np.int32), size, 0, size)
    return int(pieces[pieces[:, 2] == extent, 0].min())


def recall_extents(copies: Copies, host: WarmHostTier, extents: Sequence[Extent], find: Find) -> list[Slots]:
    """Blocks of the life before lie in extents of other sizes again; the slots of these. `find` gives the slots at
    places with generations, -1 where there is none any more."""
    places = np.array([extent.place for extent in extents], np.int64)
    slots = find(places, np.array([extent.generation for extent in extents], np.uint64))
    there = [(extent, slot) for extent, slot in zip(extents, slots.tolist(), strict=True) if slot >= 0]
    taken = [_enter(copies, host, group) for group in _whole(copies, there)]
    return [np.array(some, np.int32) for some in taken if some]


def _whole(copies: Copies, there: list[tuple[Extent, int]]) -> list[list[tuple[Extent, int]]]:
    """Extents by what is entered at once: one of several blocks alone, the parts of one block together."""
    parts: dict[tuple[int, bytes], list[tuple[Extent, int]]] = collections.defaultdict(list)
    groups = []
    for extent, slot in there:
        if extent.namespace >= len(copies.namespaces):
            continue
        if extent.tokens < copies.namespaces[extent.namespace].geometry.block_size:
            parts[extent.namespace, extent.keys].append((extent, slot))
        else:
            groups.append([(extent, slot)])
    for (number, _), mine in parts.items():
        mine.sort(key=lambda one: one[0].first)
        ends = np.cumsum([extent.tokens for extent, _ in mine])
        firsts = [extent.first for extent, _ in mine]
        if firsts == [0, *ends[:-1].tolist()] and ends[-1] == copies.namespaces[number].geometry.block_size:
            groups.append(mine)
    return groups


def _enter(copies: Copies, host: WarmHostTier, group: list[tuple[Extent, int]]) -> list[int]:
    entry, table = copies.namespaces[group[0][0].namespace], copies.blocks.table
    keys = np.frombuffer(group[0][0].keys, np.uint8).reshape(-1, table.key.shape[1])
    sums = np.frombuffer(group[0][0].block_sums, "<u8")
    fresh, position, rows = copies.blocks.add(keys, entry.number, VISIBLE)
    table.block_sum[fresh] = sums[position]
    if not _fits(copies, entry, rows, sums, group):
        copies.blocks.drop(fresh[(table.flags[fresh] & RESIDENT) == 0])
        return []
    places = copies.shapes.rows_for(len(group))
    if places.size < len(group):
        copies.shapes.give_rows(places)
        copies.blocks.drop(fresh)
        return []
    copies.blocks.mark(rows, TIER_HOST)
    for (extent, slot), place in zip(group, places.tolist(), strict=True):
        cls, one = host.pool.class_of(slot), np.array([slot], np.int32)
        host.take(cls, one)
        host.set_sums(cls, one, np.frombuffer(extent.sums, "<u8").reshape(1, cls.layers))
        copies.shapes.place(place, cls, rows, slot, extent.tokens, extent.first)
        host.release(cls, one)
    return [slot for _, slot in group]


def _fits(copies: Copies, entry: NamespaceEntry, rows: Rows, sums: Sums, group: list[tuple[Extent, int]]) -> bool:
    """Whether these blocks may lie in these slots: nowhere else in host, and with the bytes that were stored."""
    table, size = copies.blocks.table, entry.geometry.block_size
    if (rows < 0).any() or np.unique(rows).size < rows.size or not copies.shapes.can_know(size):
        return False
    if ((table.flags[rows] & TIER_HOST) != 0).any() or (table.block_sum[rows] != sums).any():
        return False
    for extent, slot in group:
        cls = copies.host.pool.class_of(slot)
        if cls.tenant != entry.tenant or len(extent.sums) != cls.layers * 8:
            return False
    copies.shapes.know(rows, size)
    return copies.shapes.knows(rows)
