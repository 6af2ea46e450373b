"""Pages of an engine's cache go into slots and come back, whatever the cache's shape; damage is noticed."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from kvtierd.connectors.vllm_pages import EnginePages
from kvtierd.core.checksum import layer_sums
from kvtierd.core.geometry import Geometry

PADDED = Geometry(block_size=4, layers=5, kv_heads=2, k_dim=8, v_dim=4, layout="opaque:test")
WHOLE = Geometry(block_size=32, layers=5, kv_heads=2, k_dim=64, v_dim=64, layout="opaque:test")
LARGE = Geometry(block_size=256, layers=2, kv_heads=8, k_dim=64, v_dim=64, layout="opaque:test")
PAGES = 6


def one_storage(shape: Geometry, seed: int) -> list[np.ndarray]:
    whole = np.random.default_rng(seed).integers(0, 256, (shape.layers, PAGES, shape.layer_bytes), np.uint8)
    return [np.ndarray(layer.shape, np.uint8, whole, i * layer.nbytes) for i, layer in enumerate(whole)]


def apart(shape: Geometry, seed: int) -> list[np.ndarray]:
    return [layer.copy() for layer in one_storage(shape, seed)]


def blocks_outside(shape: Geometry, seed: int) -> list[np.ndarray]:
    """[pages, layers, bytes]: a block's layers lie side by side."""
    whole = np.random.default_rng(seed).integers(0, 256, (PAGES, shape.layers, shape.layer_bytes), np.uint8)
    step = (shape.layers * shape.layer_bytes, 1)
    size = (PAGES, shape.layer_bytes)
    return [np.ndarray(size, np.uint8, whole, layer * shape.layer_bytes, step) for layer in range(shape.layers)]


@pytest.mark.parametrize("shape", [PADDED, WHOLE, LARGE])
@pytest.mark.parametrize("make", [one_storage, apart, blocks_outside])
def test_a_page_goes_out_and_comes_back(shape, make):
    source, target = make(shape, 1), make(shape, 2)
    before = [layer.copy() for layer in target]
    slots, sums = np.full((2, shape.slot_bytes), 7, np.uint8), np.zeros((2, shape.layers), np.uint64)
    EnginePages(shape, source).store([4, 1], slots, sums)
    for slot, row in zip(slots, sums, strict=True):
        assert (row == layer_sums(slot, shape)).all()
        assert not slot.reshape(shape.layers, shape.layer_stride)[:, shape.layer_bytes :].any()
    with closing(EnginePages(shape, target)) as pages:
        assert pages.load([2, 5], slots, sums) == 2
    for there, here, old in zip(source, target, before, strict=True):
        assert (here[[2, 5]] == there[[4, 1]]).all()
        assert (np.delete(here, [2, 5], 0) == np.delete(old, [2, 5], 0)).all()


@pytest.mark.parametrize("shape", [PADDED, LARGE])
@pytest.mark.parametrize("layer", [0, 1])
def test_case_03_a_damaged_slot_is_noticed(shape, layer):
    pages = EnginePages(shape, one_storage(shape, 1))
    slots, sums = np.zeros((3, shape.slot_bytes), np.uint8), np.zeros((3, shape.layers), np.uint64)
    pages.store([0, 1, 2], slots, sums)
    slots[1, layer * shape.layer_stride + shape.layer_bytes - 1] ^= 1
    with closing(pages):
        assert pages.load([3, 4, 5], slots, sums) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda layers: layers[:-1], "4 layers"),
        (lambda layers: [layer[:, :-1] for layer in layers], "is wanted"),
        (lambda layers: [layer.view(np.int8) for layer in layers], "int8"),
        (lambda layers: [np.asfortranarray(layer) for layer in layers], "not contiguous"),
    ],
)
def test_a_cache_of_another_shape_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        EnginePages(PADDED, change(one_storage(PADDED, 1)))
