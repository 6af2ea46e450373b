"""End-to-end checksums: xxh3-64 of each layer's part, and of these sums for the block.

One hash per layer, so that a reader of one layer can verify what it read; the block's checksum is the xxh3-64 of
its layer sums as u64 LE. The library releases no GIL for a one-shot hash, so parts are hashed piecewise, just
after they were copied and are still in the cache: the copy bounds the speed, not the hash.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Form

Sums = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
CopyParts = Callable[[Bytes, int, Bytes, int, Geometry, Sums | None], None]
"""Another way than `copy_parts`, to the same bytes and sums; threads call it at the same time."""
_LITTLE_U64 = np.dtype("<u8")

PIECE_BYTES = 256 << 10
"""How much is copied before it is hashed: source and copy fit a core's L2 cache, one wait for the GIL serves several
layer parts, and it is held for some ten microseconds at most."""


def layer_sums(block: Bytes, geometry: Form, out: Sums | None = None) -> Sums:
    """Hash each layer part of a block in slot form (`[slot_bytes]` uint8; padding is left out), exact or encoded.

    Raises ValueError for memory that is shorter than the block, as the other functions here do: a slice past its
    end would be cut silently, and the sum of half a part would vouch for it.
    """
    _check_size("block", block, geometry.slot_bytes)
    sums = np.empty(geometry.layers, np.uint64) if out is None else out
    _hash_parts(block, geometry.layer_stride, geometry.layer_bytes, 0, geometry.layers, sums)
    return sums


def layer_sum(part: Bytes) -> int:
    """Hash one layer part, without its padding."""
    sums = np.empty(1, np.uint64)
    _hash_parts(part, part.size, part.size, 0, 1, sums)
    return int(sums[0])


def packed_sums(packed: Bytes, geometry: Geometry, out: Sums) -> None:
    """Hash each layer part of a packed block (`[block_bytes]` uint8)."""
    _check_size("packed", packed, geometry.block_bytes)
    _hash_parts(packed, geometry.layer_bytes, geometry.layer_bytes, 0, geometry.layers, out)


def copy_and_sum(
    source: Bytes,
    target: Bytes,
    geometry: Geometry,
    out: Sums,
    *,
    packed: bool = False,
    copies: CopyParts | None = None,
) -> None:
    """Copy a block in slot form and hash what arrived, part by part; `packed` leaves the padding out of target.

    What is hashed is the copy, so the sums vouch for the bytes the caller holds.
    """
    _check_size("source", source, geometry.slot_bytes)
    _check_size("target", target, geometry.block_bytes if packed else geometry.slot_bytes)
    step = geometry.layer_bytes if packed else geometry.layer_stride
    (copies or copy_parts)(source, geometry.layer_stride, target, step, geometry, out)


def unpack(slot: Bytes, packed: Bytes, geometry: Geometry, copies: CopyParts | None = None) -> None:
    """Copy a block in slot form without its padding, and look at no byte."""
    _check_size("slot", slot, geometry.slot_bytes)
    _check_size("packed", packed, geometry.block_bytes)
    (copies or copy_parts)(slot, geometry.layer_stride, packed, geometry.layer_bytes, geometry, None)


def fill_and_sum(packed: Bytes, slot: Bytes, geometry: Geometry, out: Sums, copies: CopyParts | None = None) -> None:
    """Copy a packed block into slot form, zero the padding, and hash each part as it lands."""
    _check_size("packed", packed, geometry.block_bytes)
    _check_size("slot", slot, geometry.slot_bytes)
    (copies or copy_parts)(packed, geometry.layer_bytes, slot, geometry.layer_stride, geometry, out)
    if geometry.layer_stride != geometry.layer_bytes:
        _rows(slot, geometry.layer_stride, geometry.layers)[:, geometry.layer_bytes :] = 0


def block_sum(sums: Sums) -> int:
    """The block's checksum: xxh3-64 over its layer sums as u64 LE."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(sums, _LITTLE_U64).data)


def block_sums(sums: Sums) -> Sums:
    """Checksums of many blocks, [n] u64, from their layer sums [n, layers]."""
    count, nbytes = sums.shape[0], sums.shape[1] * 8
    data, digest = np.ascontiguousarray(sums, _LITTLE_U64).reshape(-1).view(np.uint8).data, xxhash.xxh3_64_intdigest
    return np.array([digest(data[at : at + nbytes]) for at in range(0, count * nbytes, nbytes)], np.uint64)


def _check_size(name: str, memory: Bytes, size: int) -> None:
    """Raise ValueError for memory that is shorter than `size` bytes."""
    if memory.size < size:
        raise ValueError(f"{name} has {memory.size} bytes; {size} are wanted")


def _rows(memory: Bytes, step: int, layers: int) -> Bytes:
    return memory[: layers * step].reshape(layers, step)


def copy_parts(
    source: Bytes, source_step: int, target: Bytes, target_step: int, geometry: Geometry, out: Sums | None
) -> None:
    """Copy the layer parts that begin every `step` bytes; with `out`, a few at a time, and hash each as it landed."""
    size, layers = geometry.layer_bytes, geometry.layers
    if out is None:
        if source_step == target_step == size:
            target[: layers * size] = source[: layers * size]
        else:
            _rows(target, target_step, layers)[:, :size] = _rows(source, source_step, layers)[:, :size]
        return
    if size > PIECE_BYTES:
        for layer in range(layers):
            begin, at = layer * source_step, layer * target_step
            out[layer] = _copy_part(source[begin : begin + size], target[at : at + size])
        return
    group = max(1, PIECE_BYTES // size)
    sources, targets = _rows(source, source_step, layers), _rows(target, target_step, layers)
    for layer in range(0, layers, group):
        end = min(layer + group, layers)
        targets[layer:end, :size] = sources[layer:end, :size]
        _hash_parts(target, target_step, size, layer, end, out)


def _hash_parts(memory: Bytes, step: int, size: int, first: int, end: int, out: Sums) -> None:
    """Hash parts `first` to `end` of `size` bytes that begin every `step` bytes."""
    data = memory.data
    for layer in range(first, end):
        begin = layer * step
        if size <= PIECE_BYTES:
            out[layer] = xxhash.xxh3_64_intdigest(data[begin : begin + size])
            continue
        state = xxhash.xxh3_64()
        for at in range(begin, begin + size, PIECE_BYTES):
            state.update(data[at : min(at + PIECE_BYTES, begin + size)])
        out[layer] = state.intdigest()


def _copy_part(source: Bytes, target: Bytes) -> int:
    state = xxhash.xxh3_64()
    for begin in range(0, source.size, PIECE_BYTES):
        piece = target[begin : begin + PIECE_BYTES]
        piece[:] = source[begin : begin + PIECE_BYTES]
        state.update(piece.data)
    return state.intdigest()
