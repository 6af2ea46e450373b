"""The compiled copies do what the plain ones do, to the bit, wherever memory begins and whatever its shape is."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.core.checksum import Bytes, CopyParts, copy_and_sum, copy_parts, fill_and_sum, layer_sums, unpack
from kvtierd.core.geometry import Geometry
from kvtierd.index.streaming import copy_streaming
from kvtierd.protocol.copying import Copier

SHAPES = {
    "whole pages": Geometry(block_size=64, layers=3, kv_heads=2, k_dim=128, v_dim=128),
    "padded": Geometry(block_size=64, layers=3, kv_heads=2, k_dim=128, v_dim=96),
    "not whole blocks of the hash": Geometry(block_size=16, layers=2, kv_heads=1, k_dim=20, v_dim=20),
    "parts that begin within a cache line": Geometry(block_size=1, layers=4, kv_heads=1, k_dim=100, v_dim=31),
    "parts too short for this way": Geometry(block_size=1, layers=2, kv_heads=1, k_dim=16, v_dim=16),
}


def memory(count: int, offset: int, value: int = 7) -> Bytes:
    """`count` bytes that begin `offset` bytes behind a cache line."""
    room = np.full(count + 128, value, np.uint8)
    return room[-room.ctypes.data % 64 + offset :][:count]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("offset", [0, 1, 32], ids=["at a line", "behind it", "half way"])
def test_blocks_and_sums_are_those_of_the_plain_way(shape: Geometry, offset: int) -> None:
    block = memory(shape.block_bytes, offset)
    block[:] = np.random.default_rng(1).integers(0, 256, block.size, np.uint8)
    slots, sums = [], []
    for copies in (copy_parts, copy_streaming):
        slot, filled = memory(shape.slot_bytes, offset), np.zeros(shape.layers, np.uint64)
        fill_and_sum(block, slot, shape, filled, copies)
        for verified in (True, False):
            out, seen = memory(shape.block_bytes, offset), np.zeros(shape.layers, np.uint64)
            if verified:
                copy_and_sum(slot, out, shape, seen, packed=True, copies=copies)
                assert seen.tolist() == filled.tolist()
            else:
                unpack(slot, out, shape, copies)
            assert np.array_equal(out, block)
        slots.append(slot)
        sums.append(filled.tolist())
        assert filled.tolist() == layer_sums(slot, shape).tolist()
    assert np.array_equal(slots[0], slots[1])
    assert sums[0] == sums[1]


def test_nothing_beyond_the_target_is_written() -> None:
    shape = SHAPES["not whole blocks of the hash"]
    room = memory(shape.block_bytes + 64, 0, value=9)
    slot = memory(shape.slot_bytes, 0)
    copy_and_sum(slot, room, shape, np.empty(shape.layers, np.uint64), packed=True, copies=copy_streaming)
    assert (room[shape.block_bytes :] == 9).all()


@pytest.mark.parametrize("copies", [copy_parts, copy_streaming], ids=["plain", "streaming"])
def test_memory_that_is_too_short_is_refused(copies: CopyParts) -> None:
    shape = SHAPES["padded"]
    slot, packed = memory(shape.slot_bytes - 1, 0), memory(shape.block_bytes - 1, 0)
    whole, sums = memory(shape.slot_bytes, 0), np.empty(shape.layers, np.uint64)
    with pytest.raises(ValueError, match=f"{shape.slot_bytes} are wanted"):
        fill_and_sum(whole, slot, shape, sums, copies)
    with pytest.raises(ValueError, match=f"{shape.block_bytes} are wanted"):
        unpack(whole, packed, shape, copies)


def test_a_copier_uses_what_it_was_given() -> None:
    shape = SHAPES["whole pages"]
    blocks = np.random.default_rng(2).integers(0, 256, (24, shape.block_bytes), np.uint8)
    slots = [memory(shape.slot_bytes, 0) for _ in blocks]
    copier = Copier(2, copy_streaming)
    try:
        sums = copier.fill(blocks, slots, shape)
        out = np.empty_like(blocks)
        assert np.array_equal(copier.copy_out_and_sum(slots, out, shape), sums)
    finally:
        copier.close()
    assert np.array_equal(out, blocks)
    assert sums.tolist() == [layer_sums(slot, shape).tolist() for slot in slots]
