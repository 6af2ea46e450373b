"""One object whose bytes lie in several places: copied into a slot one after the other, and back, with one checksum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import MIB

COPY_BYTES = MIB
"""Copied at a time, and then hashed out of the cache. The C library copies what is larger than a core's L2 with vector
moves, and less with one string instruction, which is a third slower on the processors that we have tried."""

Pieces = Sequence[Bytes]
"""The places of one object in their order, each a contiguous [nbytes] uint8."""


class _Place:
    """Memory of somebody else, for np.asarray; whoever names it keeps it alive."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


def memory_at(address: int, nbytes: int) -> Bytes:
    """Bytes at an address of this process, writable and without a copy."""
    return np.asarray(_Place(address, nbytes))


def gather(pieces: Pieces, slot: Bytes) -> int:
    """Copy an object into a slot ([slot_bytes] uint8), zero the rest of it, and hash what landed: its xxh3-64.

    Raises ValueError where the slot is too small.
    """
    state, at = xxhash.xxh3_64(), 0
    for piece in pieces:
        for begin in range(0, piece.size, COPY_BYTES):
            part = piece[begin : begin + COPY_BYTES]
            target = slot[at + begin : at + begin + part.size]
            target[:] = part
            state.update(target.data)
        at += piece.size
    slot[at:] = 0
    return state.intdigest()


def scatter(slot: Bytes, pieces: Pieces) -> int:
    """Copy an object out of a slot, and hash what arrived: its xxh3-64.

    Raises ValueError where the slot is too small.
    """
    state, at = xxhash.xxh3_64(), 0
    for piece in pieces:
        for begin in range(0, piece.size, COPY_BYTES):
            target = piece[begin : begin + COPY_BYTES]
            target[:] = slot[at + begin : at + begin + target.size]
            state.update(target.data)
        at += piece.size
    return state.intdigest()
