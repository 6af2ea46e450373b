"""Copies between an engine's cache and slots: every element in its place, whatever the shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.connectors.kv_layout import LayerKv, SlotView, carrier, check_cache
from kvtierd.core.checksum import layer_sums
from kvtierd.core.geometry import Geometry

GEOMETRIES = st.builds(
    Geometry,
    block_size=st.integers(1, 40),
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    k_dim=st.integers(1, 33),
    v_dim=st.integers(0, 20),
    dtype=st.sampled_from(["bf16", "fp16", "fp32", "fp8_e4m3"]),
)


def random_cache(geometry: Geometry, tokens: int, seed: int = 7) -> list[LayerKv]:
    rng = np.random.default_rng(seed)
    element = carrier(geometry.dtype)
    top = np.iinfo(element).max

    def array(dim: int) -> np.ndarray:
        return rng.integers(0, top, (geometry.kv_heads, tokens, dim), element, endpoint=True)

    return [LayerKv(array(geometry.k_dim), array(geometry.v_dim)) for _ in range(geometry.layers)]


def zeros_like(cache: list[LayerKv]) -> list[LayerKv]:
    return [LayerKv(np.zeros_like(pair.k), np.zeros_like(pair.v)) for pair in cache]


@settings(max_examples=60, deadline=None)
@given(GEOMETRIES, st.integers(0, 3))
def test_a_block_comes_back_where_it_was(geometry: Geometry, index: int) -> None:
    first = index * geometry.block_size
    cache = random_cache(geometry, 4 * geometry.block_size + 1)
    slot, sums = np.full(geometry.slot_bytes, 0xAA, np.uint8), np.zeros(geometry.layers, np.uint64)
    SlotView(slot, geometry).fill(cache, first, sums)
    assert np.array_equal(sums, layer_sums(slot, geometry))

    back = zeros_like(cache)
    assert SlotView(slot, geometry).read(back, first, sums)
    last = first + geometry.block_size
    for before, after in zip(cache, back, strict=True):
        for ours, theirs in zip(before, after, strict=True):
            assert np.array_equal(ours[:, first:last], theirs[:, first:last])
            assert not theirs[:, :first].any()
            assert not theirs[:, last:].any()


def test_the_layout_is_tokens_then_heads_then_dims_and_v_follows_k() -> None:
    geometry = Geometry(block_size=2, layers=1, kv_heads=2, k_dim=3, v_dim=1, dtype="fp32")
    k = np.arange(12, dtype=np.uint32).reshape(2, 2, 3)  # [heads, tokens, dim]
    v = np.arange(100, 104, dtype=np.uint32).reshape(2, 2, 1)
    slot, sums = np.zeros(geometry.slot_bytes, np.uint8), np.zeros(1, np.uint64)
    SlotView(slot, geometry).fill([LayerKv(k, v)], 0, sums)
    stored = slot[: geometry.layer_bytes].view(np.uint32).tolist()
    assert stored == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11, 100, 102, 101, 103]


def test_padding_carries_nothing_of_what_lay_there() -> None:
    geometry = Geometry(block_size=3, layers=2, kv_heads=1, k_dim=5, v_dim=5)
    slot = np.full(geometry.slot_bytes, 0xEE, np.uint8)
    SlotView(slot, geometry).fill(random_cache(geometry, 3), 0, np.zeros(2, np.uint64))
    padding = slot.reshape(2, geometry.layer_stride)[:, geometry.layer_bytes :]
    assert padding.size
    assert not padding.any()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_case_03_a_flipped_bit_is_no_hit(seed: int) -> None:
    geometry = Geometry(block_size=4, layers=2, kv_heads=2, k_dim=8, v_dim=8)
    cache = random_cache(geometry, 4)
    slot, sums = np.zeros(geometry.slot_bytes, np.uint8), np.zeros(2, np.uint64)
    SlotView(slot, geometry).fill(cache, 0, sums)
    layer, byte, bit = seed % 2, seed // 2 % geometry.layer_bytes, seed % 8
    slot[layer * geometry.layer_stride + byte] ^= 1 << bit
    assert not SlotView(slot, geometry).read(zeros_like(cache), 0, sums)


def test_a_slot_of_another_size_or_layout_is_refused() -> None:
    geometry = Geometry(block_size=4, layers=2, kv_heads=2, k_dim=8, v_dim=8)
    with pytest.raises(ValueError, match="slot has shape"):
        SlotView(np.zeros(geometry.slot_bytes - 1, np.uint8), geometry)
    hnd = Geometry(block_size=4, layers=2, kv_heads=2, k_dim=8, v_dim=8, layout="hnd")
    with pytest.raises(ValueError, match="'hnd' is not nhd"):
        SlotView(np.zeros(hnd.slot_bytes, np.uint8), hnd)


def test_a_cache_of_another_shape_is_named() -> None:
    geometry = Geometry(block_size=4, layers=2, kv_heads=2, k_dim=8, v_dim=6)
    cache = random_cache(geometry, 8)
    check_cache(cache, geometry, 8)
    with pytest.raises(ValueError, match="1 layers; the namespace has 2"):
        check_cache(cache[:1], geometry, 8)
    with pytest.raises(ValueError, match="K of layer 0"):
        check_cache(cache, geometry, 9)
    wide = [cache[0], LayerKv(cache[1].k, cache[1].v.astype(np.uint32))]
    with pytest.raises(ValueError, match="V of layer 1"):
        check_cache(wide, geometry, 8)
