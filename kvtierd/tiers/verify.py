"""Bytes of whole blocks against their sums, in worker threads: what comes in, what goes out, what rests in host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums, block_sum, block_sums, copy_and_sum, fill_and_sum, layer_sums
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index.xxh3 import SHORTEST, first_other
from kvtierd.protocol.messages import MAX_BATCH
from kvtierd.tiers.host_tier import HostTier
from kvtierd.tiers.leases import Reservation


def whole_blocks(host: HostTier, cls: SlotClass, slots: Slots, sums: Sums, geometry: Geometry) -> int:
    """How many leading slots hold the bytes of their layer sums ([n, layers] u64)."""
    for i, slot in enumerate(slots.tolist()):
        if (layer_sums(host.view(cls, slot), geometry) != sums[i]).any():
            return i
    return int(slots.size)


def copy_whole(
    host: HostTier, cls: SlotClass, slots: Slots, sums: Sums, geometry: Geometry, payload: npt.NDArray[np.uint8]
) -> int:
    """Copy blocks into `payload` [n, block_bytes]; how many leading ones match their sums."""
    seen = np.empty(geometry.layers, np.uint64)
    for i, slot in enumerate(slots.tolist()):
        copy_and_sum(host.view(cls, slot), payload[i], geometry, seen, packed=True)
        if (seen != sums[i]).any():
            return i
    return int(slots.size)


def fill(host: HostTier, reservation: Reservation, payloads: Sequence[memoryview], totals: Sums) -> Sums:
    """Copy payloads into the slots of a reservation: their layer sums. RequestError when one does not match its sum."""
    shape = reservation.entry.geometry
    sums = np.empty((reservation.slots.size, shape.layers), np.uint64)
    for i, (slot, position) in enumerate(zip(reservation.slots.tolist(), reservation.position.tolist(), strict=True)):
        packed = np.frombuffer(payloads[position], np.uint8)
        fill_and_sum(packed, host.view(reservation.cls, slot), shape, sums[i])
        if block_sum(sums[i]) != int(totals[position]):
            raise RequestError(ErrorCode.CHECKSUM_MISMATCH, f"block {position} does not match its block sum")
    return sums


def check_totals(which: npt.NDArray[np.intp], sums: Sums, totals: Sums) -> None:
    """RequestError naming the first block whose layer sums do not hash to its block sum."""
    bad = _first_wrong(sums, totals)
    if bad >= 0:
        message = f"block {int(which[bad])}: its layer sums do not hash to its block sum"
        raise RequestError(ErrorCode.CHECKSUM_MISMATCH, message)


def _first_wrong(sums: Sums, totals: Sums) -> int:
    """The first block whose sum is another, or -1: all at once where layers are enough for the hash's long form."""
    if sums.shape[1] * sums.itemsize >= SHORTEST and sums.flags.c_contiguous:
        return first_other(sums, totals)
    wrong = block_sums(sums) != totals
    return int(wrong.argmax()) if wrong.any() else -1


def places_of(reservation: Reservation, index: list[int] | None) -> npt.NDArray[np.intp]:
    """Places within the reservation of the blocks that a Commit names by their position in the keys.

    RequestError for a block that it did not grant, or that is named twice.
    """
    if index is None:
        return np.arange(reservation.position.size)
    if max(index, default=0) > MAX_BATCH:  # might not fit the array's type either
        raise RequestError(ErrorCode.BAD_ARGUMENT, f"block {max(index)} was not granted by this reservation")
    wanted = np.array(index, np.int64)
    places = np.searchsorted(reservation.position, wanted)
    places[places >= reservation.position.size] = 0
    wrong = reservation.position[places] != wanted
    if wrong.any():
        bad = int(wanted[wrong][0])
        raise RequestError(ErrorCode.BAD_ARGUMENT, f"block {bad} was not granted by this reservation, or is committed")
    if np.bincount(places, minlength=1).max() > 1:
        raise RequestError(ErrorCode.BAD_ARGUMENT, "a commit names a block twice")
    return places
