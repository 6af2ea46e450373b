"""End-to-end checksums: xxh3-64 of each layer's part, and of these sums for the block.

One hash per layer, so that a reader of one layer can verify what it read; the block's checksum is the xxh3-64 of
its layer sums as u64 LE. The library releases no GIL for a one-shot hash, so parts are hashed piecewise, just
after they were copied and are still in the cache: the copy bounds the speed, not the hash.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from kvtierd.core.geometry import Geometry

Sums = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
_LITTLE_U64 = np.dtype("<u8")

PIECE_BYTES = 64 << 10
"""How much is copied before it is hashed: fits a core's L2 cache twice over, and bounds how long the GIL is held."""


def layer_sums(block: Bytes, geometry: Geometry, out: Sums | None = None) -> Sums:
    """Hash each layer part of a block in slot form (`[slot_bytes]` uint8; padding is left out).

    Raises ValueError for memory that is shorter than the block, as the other functions here do: a slice past its
    end would be cut silently, and the sum of half a part would vouch for it.
    """
    _check_size("block", block, geometry.slot_bytes)
    sums = np.empty(geometry.layers, np.uint64) if out is None else out
    size, stride = geometry.layer_bytes, geometry.layer_stride
    for layer in range(geometry.layers):
        sums[layer] = _hash_part(block[layer * stride : layer * stride + size])
    return sums


def copy_and_sum(source: Bytes, target: Bytes, geometry: Geometry, out: Sums, *, packed: bool = False) -> None:
    """Copy a block in slot form and hash what arrived, part by part; `packed` leaves the padding out of target.

    What is hashed is the copy, so the sums vouch for the bytes the caller holds.
    """
    _check_size("source", source, geometry.slot_bytes)
    _check_size("target", target, geometry.block_bytes if packed else geometry.slot_bytes)
    size, stride = geometry.layer_bytes, geometry.layer_stride
    step = size if packed else stride
    for layer in range(geometry.layers):
        begin, at = layer * stride, layer * step
        out[layer] = _copy_part(source[begin : begin + size], target[at : at + size])


def fill_and_sum(packed: Bytes, slot: Bytes, geometry: Geometry, out: Sums) -> None:
    """Copy a packed block into slot form, zero the padding, and hash each part as it lands."""
    _check_size("packed", packed, geometry.block_bytes)
    _check_size("slot", slot, geometry.slot_bytes)
    size, stride = geometry.layer_bytes, geometry.layer_stride
    for layer in range(geometry.layers):
        begin, at = layer * size, layer * stride
        out[layer] = _copy_part(packed[begin : begin + size], slot[at : at + size])
        slot[at + size : at + stride] = 0


def block_sum(sums: Sums) -> int:
    """The block's checksum: xxh3-64 over its layer sums as u64 LE."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(sums, _LITTLE_U64).data)


def _check_size(name: str, memory: Bytes, size: int) -> None:
    if memory.size < size:
        raise ValueError(f"{name} has {memory.size} bytes; {size} are wanted")


def _hash_part(part: Bytes) -> int:
    if part.size <= PIECE_BYTES:
        return xxhash.xxh3_64_intdigest(part.data)
    state = xxhash.xxh3_64()
    for begin in range(0, part.size, PIECE_BYTES):
        state.update(part[begin : begin + PIECE_BYTES].data)
    return state.intdigest()


def _copy_part(source: Bytes, target: Bytes) -> int:
    if source.size <= PIECE_BYTES:
        target[:] = source
        return xxhash.xxh3_64_intdigest(target.data)
    state = xxhash.xxh3_64()
    for begin in range(0, source.size, PIECE_BYTES):
        piece = target[begin : begin + PIECE_BYTES]
        piece[:] = source[begin : begin + PIECE_BYTES]
        state.update(piece.data)
    return state.intdigest()
