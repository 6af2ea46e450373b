"""A client forbids loss for a namespace of which there are blocks in FP8: these copies go before it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME
from kvtierd.protocol.service import Answer
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.write_behind import WriteBehind


def registered(
    copies: Copies, entry: NamespaceEntry, answer: Answer, write_behind: WriteBehind | None
) -> Answer | Awaitable[Answer]:
    """A client has registered a namespace: the answer, after what it does not allow is gone."""
    if entry.allow_loss or not copies.shapes.forms.is_lossy(entry.number):
        return answer
    return forget_lossy(copies, entry, answer, write_behind.kick if write_behind else None)


async def forget_lossy(
    copies: Copies, entry: NamespaceEntry, answer: Answer, bury: Callable[[], None] | None
) -> Answer:
    """Drop every copy of the namespace's blocks that has been through FP8, piece by piece; then the answer.

    `bury` is told that extents wait for their tombstones.

    Whoever leases one keeps it, and was told. Nothing new comes: the namespace does not allow loss any more, and what
    is on its way is dropped where it lands.
    """
    for rows in copies.blocks.of_namespace(entry.number):
        _drop(copies, entry, rows)
        await asyncio.sleep(0)
    copies.shapes.forms.spaces.discard(entry.number)
    if bury is not None:
        bury()
    return answer


def _drop(copies: Copies, entry: NamespaceEntry, rows: Rows) -> None:
    forms, table = copies.shapes.forms, copies.blocks.table
    copies.blocks.begin_move(rows)
    lossy = {tier: _here(copies, rows, tier) for tier in (TIER_NVME, TIER_GPU, TIER_HOST)}
    on_disk = lossy[TIER_NVME]
    for row in on_disk.tolist():
        copies.dead_extents.append((entry.stored_digest, table.key[row].tobytes(), copies.extent(row, entry)))
    if on_disk.size:
        copies.drop_nvme(on_disk)
    if lossy[TIER_GPU].size:
        copies.drop_gpu(copies.gpu_class(entry), lossy[TIER_GPU])
    in_host = lossy[TIER_HOST]
    whole = in_host[table.host_slot[in_host] >= 0]
    if whole.size:
        copies.drop_host(copies.host_class(entry), whole)
    scattered = in_host[copies.shapes.scattered(in_host)]
    if scattered.size:
        copies.drop_scattered(scattered)
    forms.lossy[rows] = 0
    copies.blocks.end_move(rows)


def _here(copies: Copies, rows: Rows, tier: int) -> Rows:
    """Those of these blocks whose copy in a tier is there and has been through FP8."""
    there = (copies.blocks.residency(rows) & tier) != 0
    found: Rows = rows[there & copies.shapes.forms.in_tier(rows, tier)]
    return found
