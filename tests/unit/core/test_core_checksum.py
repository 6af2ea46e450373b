"""Checksums: however a block is moved, its layer sums are the same."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvtierd.core.checksum import PIECE_BYTES, block_sum, block_sums, copy_and_sum, fill_and_sum, layer_sums
from kvtierd.core.geometry import Geometry

SHAPES = {
    "padded": Geometry(block_size=3, layers=4, kv_heads=2, k_dim=5, v_dim=7),
    "one page": Geometry(block_size=8, layers=2, kv_heads=2, k_dim=64, v_dim=64),
    "groups of three": Geometry(block_size=40, layers=7, kv_heads=4, k_dim=128, v_dim=128),
    "one piece": Geometry(block_size=64, layers=2, kv_heads=8, k_dim=128, v_dim=128),
    "pieces and a rest": Geometry(block_size=65, layers=2, kv_heads=12, k_dim=128, v_dim=127),
    "latent": Geometry(block_size=64, layers=2, kv_heads=1, k_dim=576, v_dim=0),
}


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Geometry:
    return SHAPES[request.param]


def random_bytes(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def pack(slot: np.ndarray, shape: Geometry) -> np.ndarray:
    parts = slot.reshape(shape.layers, shape.layer_stride)[:, : shape.layer_bytes]
    return np.ascontiguousarray(parts).reshape(-1)


def expected_sums(slot: np.ndarray, shape: Geometry) -> list[int]:
    parts = pack(slot, shape).reshape(shape.layers, shape.layer_bytes)
    return [xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts]


def test_the_shapes_cover_small_whole_and_piecewise_parts() -> None:
    sizes = [shape.layer_bytes for shape in SHAPES.values()]
    assert min(sizes) < PIECE_BYTES < max(sizes)
    assert PIECE_BYTES in sizes
    assert any(size % PIECE_BYTES for size in sizes if size > PIECE_BYTES)
    grouped = SHAPES["groups of three"]
    assert PIECE_BYTES // grouped.layer_bytes == 3
    assert grouped.layers % 3


def test_layer_sums_are_hashes_of_the_parts_without_padding(shape: Geometry) -> None:
    slot = random_bytes(shape.slot_bytes)
    assert layer_sums(slot, shape).tolist() == expected_sums(slot, shape)


@pytest.mark.parametrize(("count", "layers"), [(0, 3), (1, 1), (5, 32)])
def test_sums_of_many_blocks_are_those_of_each(count: int, layers: int) -> None:
    sums = np.random.default_rng(2).integers(0, 2**64, (count, 2 * layers), np.uint64)[:, ::2]
    assert block_sums(sums).tolist() == [block_sum(row) for row in sums]


def test_layer_sums_fill_the_array_they_are_given() -> None:
    shape = SHAPES["padded"]
    out = np.zeros(shape.layers, np.uint64)
    assert layer_sums(random_bytes(shape.slot_bytes), shape, out) is out
    assert out.all()


def test_padding_is_not_part_of_any_sum() -> None:
    shape = SHAPES["padded"]
    slot = random_bytes(shape.slot_bytes)
    before = layer_sums(slot, shape)
    slot.reshape(shape.layers, -1)[:, shape.layer_bytes :] ^= 0xFF
    assert (layer_sums(slot, shape) == before).all()


def test_a_flipped_bit_changes_the_sum_of_its_layer_only(shape: Geometry) -> None:
    slot = random_bytes(shape.slot_bytes)
    before = layer_sums(slot, shape)
    slot[shape.layer_stride + shape.layer_bytes - 1] ^= 1
    assert (layer_sums(slot, shape) != before).nonzero()[0].tolist() == [1]


def test_a_copy_carries_bytes_and_sums(shape: Geometry) -> None:
    slot, out = random_bytes(shape.slot_bytes), np.zeros(shape.layers, np.uint64)
    target = np.zeros(shape.slot_bytes, np.uint8)
    copy_and_sum(slot, target, shape, out)
    assert (pack(target, shape) == pack(slot, shape)).all()
    assert out.tolist() == expected_sums(slot, shape)


def test_a_packed_copy_leaves_the_padding_out(shape: Geometry) -> None:
    slot, out = random_bytes(shape.slot_bytes), np.zeros(shape.layers, np.uint64)
    target = np.zeros(shape.block_bytes, np.uint8)
    copy_and_sum(slot, target, shape, out, packed=True)
    assert (target == pack(slot, shape)).all()
    assert out.tolist() == expected_sums(slot, shape)


def test_the_sums_vouch_for_the_copy_and_not_for_the_source() -> None:
    """A source and a target that are one memory: what is hashed is what the caller holds afterwards."""
    shape = SHAPES["one page"]
    memory = random_bytes(shape.slot_bytes)
    out = np.zeros(shape.layers, np.uint64)
    copy_and_sum(memory, memory, shape, out)
    assert (out == layer_sums(memory, shape)).all()


def test_filling_a_slot_zeroes_the_padding(shape: Geometry) -> None:
    packed, out = random_bytes(shape.block_bytes), np.zeros(shape.layers, np.uint64)
    slot = np.full(shape.slot_bytes, 0xEE, np.uint8)
    fill_and_sum(packed, slot, shape, out)
    assert (pack(slot, shape) == packed).all()
    assert not slot.reshape(shape.layers, -1)[:, shape.layer_bytes :].any()
    assert (out == layer_sums(slot, shape)).all()


def test_the_block_sum_is_the_hash_of_the_layer_sums() -> None:
    sums = np.array([1, 2**64 - 1], np.uint64)
    raw = (1).to_bytes(8, "little") + b"\xff" * 8
    assert block_sum(sums) == xxhash.xxh3_64_intdigest(raw)
    assert block_sum(sums.astype(">u8")) == block_sum(sums)
    assert block_sum(sums[::-1]) != block_sum(sums)


@pytest.mark.parametrize("size", [0, 1, -1, -4096])
def test_memory_of_the_wrong_size_is_refused(size: int) -> None:
    shape = SHAPES["padded"]
    short = np.zeros(size if size >= 0 else shape.slot_bytes + size, np.uint8)
    slot, out = np.zeros(shape.slot_bytes, np.uint8), np.zeros(shape.layers, np.uint64)
    with pytest.raises(ValueError, match=f"{short.size} bytes"):
        layer_sums(short, shape)
    with pytest.raises(ValueError, match=f"{short.size} bytes"):
        copy_and_sum(short, slot, shape, out)
    with pytest.raises(ValueError, match=f"{short.size} bytes"):
        copy_and_sum(slot, short, shape, out)
    with pytest.raises(ValueError, match=f"{short.size} bytes"):
        fill_and_sum(np.zeros(shape.block_bytes, np.uint8), short, shape, out)
    if short.size < shape.block_bytes:
        with pytest.raises(ValueError, match=f"{short.size} bytes"):
            fill_and_sum(short, slot, shape, out)
