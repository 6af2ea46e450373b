"""Ingest: blocks are generated straight into the arena and committed, no faster than the disk takes them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtierd.core.keys import Keys
from kvtierd.protocol.messages import SLOT_BUSY
from kvtierd.stress.content import BlockId

if TYPE_CHECKING:
    from kvtierd.protocol.holds import Reservation
    from kvtierd.stress.worker import Tools

BUSY_S = 0.005
"""Between two tries where there is no room."""
LOOK_S = 0.05
"""Between two looks at the queue: statistics cost the daemon's loop as much as a batch, and every client asks."""
PATIENCE_S = 120.0
"""Without a single block taken for so long, the daemon is stuck."""


class StuckError(RuntimeError):
    """Nothing gets on."""


def generate(tools: Tools, command: Mapping[str, Any]) -> dict[str, float]:
    """The generator alone: fill the same few blocks again and again."""
    room = np.empty((4, tools.content.geometry.slot_bytes), np.uint8)
    room[:] = 0
    begin_s = time.perf_counter()
    for i in range(command["blocks"]):
        tools.content.fill(BlockId(0, i), room[i % 4])
    return {"seconds": time.perf_counter() - begin_s, "bytes": command["blocks"] * tools.content.geometry.block_bytes}


def ingest(tools: Tools, command: Mapping[str, Any]) -> dict[str, float]:
    """Store blocks begin..end-1 of the context, `batch` at a time.

    A daemon that is handed more than its queue to the disk takes keeps the rest in host only, and may lose it: a cache
    may. Here nothing may be lost, so a client waits while more than `queue_bytes` are on their way to the disk, and
    looks again after `unseen` batches.
    """
    begin, end, batch, unseen = command["begin"], command["end"], command["batch"], command["unseen"]
    keys = tools.keys[begin:end]
    begin_s, waited_s = time.perf_counter(), 0.0
    at = begin
    for number, reservation in enumerate(tools.client.reservations(tools.handle, keys, batch=batch)):
        if number % unseen == 0:
            waited_s += _wait_for_the_disk(tools, command["queue_bytes"])
        names = [BlockId(0, at + i) for i in range(len(reservation.status))]
        _fill(tools, reservation, names, command["plants"])
        _again(tools, tools.keys[at : at + len(names)], names, np.flatnonzero(reservation.status == SLOT_BUSY))
        at += len(names)
        tools.tell(progress=len(names))
    tools.client.ping()  # requests are taken up in order: when this is answered, the last commit has been
    return {"blocks": at - begin, "seconds": time.perf_counter() - begin_s, "waited_s": waited_s}


def _fill(tools: Tools, reservation: Reservation, names: list[BlockId], plants: Sequence[Mapping[str, Any]]) -> None:
    for name, view in zip(names, reservation.views, strict=True):
        if view is not None:
            tools.content.fill(name, view)
            for plant in plants:
                if name.index in plant["blocks"]:
                    _plant(tools, plant, name, view)
    if any(view is not None for view in reservation.views):
        reservation.commit(wait=False)


def _again(tools: Tools, keys: Keys, names: list[BlockId], missing: Any) -> None:
    """Store those that had no room, until all are there."""
    deadline_s = time.monotonic() + PATIENCE_S
    while missing.size:
        if time.monotonic() > deadline_s:
            raise StuckError(f"{missing.size} blocks found no room in {PATIENCE_S:.0f} s")
        time.sleep(BUSY_S)
        with tools.client.reserve(tools.handle, keys[missing]) as reservation:
            _fill(tools, reservation, [names[i] for i in missing], ())
            missing = missing[np.asarray(reservation.status) == SLOT_BUSY]


def _wait_for_the_disk(tools: Tools, queue_bytes: int) -> float:
    begin_s = time.monotonic()
    while tools.client.stats()["write_queue_bytes"] > queue_bytes:
        if time.monotonic() - begin_s > PATIENCE_S:
            raise StuckError(f"more than {queue_bytes} bytes wait for the disk since {PATIENCE_S:.0f} s")
        time.sleep(LOOK_S)
    return time.monotonic() - begin_s


def _plant(tools: Tools, plant: Mapping[str, Any], name: BlockId, block: Any) -> None:
    """Store something wrong on purpose: the tests of the checks look for it."""
    shape = tools.content.geometry
    match plant["kind"]:
        case "flipped bit":
            block[plant["offset"]] ^= 1 << plant["bit"]
        case "swapped block":
            first, second = plant["blocks"]
            tools.content.fill(BlockId(0, second if name.index == first else first), block)
        case "dropped layer":
            begin = plant["layer"] * shape.layer_stride
            block[begin : begin + shape.layer_bytes] = 0
        case "stale scale":
            # As if a head's codes met the scale of the block before: every value twice as large.
            begin = plant["layer"] * shape.layer_stride
            k = block[begin : begin + shape.k_bytes].view(np.uint16)
            head = k.reshape(shape.block_size, shape.kv_heads, shape.k_dim)[:, plant["head"]]
            head[head & 0x7F80 != 0] += 0x80
        case kind:
            raise ValueError(f"{kind!r} is nothing that can be planted")
