"""Gather and scatter between engines' layouts and blocks, against NumPy's indexing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.paged import gather, scatter
from kvtierd.gpu.paged_layout import PagedLayout, separate, two_first, two_inside

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[np.uint16]

BLOCK, HEADS, DIM, PAGES = 12, 3, 16, 9


def _geometry(layout: str, **changes: int) -> Geometry:
    shape = {"block_size": BLOCK, "layers": 2, "kv_heads": HEADS, "k_dim": DIM, "v_dim": DIM}
    return Geometry(**shape | changes, layout=layout)


def _random(shape: tuple[int, ...], seed: int) -> Elements:
    return np.random.default_rng(seed).integers(0, 65536, shape, np.uint16)


def _flat(*arrays: Elements) -> tuple[Bytes, ...]:
    return tuple(array.reshape(-1).view(np.uint8) for array in arrays)


def engine_cache(
    name: str, geometry: Geometry, page: int
) -> tuple[tuple[Bytes, ...], tuple[PagedLayout, ...], Elements, Elements]:
    """Buffers, layouts, and K and V as [pages, page_tokens, heads, dim] views of them."""
    tokens = (PAGES, page, HEADS, DIM)
    match name:
        case "two first":
            both = _random((2, *tokens), 1)
            return _flat(both, both), two_first(geometry, page, PAGES), both[0], both[1]
        case "two inside":
            both = _random((PAGES, 2, page, HEADS, DIM), 1)
            return _flat(both, both), two_inside(geometry, page), both[:, 0], both[:, 1]
        case "two inside, by head":
            both = _random((PAGES, 2, HEADS, page, DIM), 1)
            k, v = (both[:, part].swapaxes(1, 2) for part in (0, 1))
            return _flat(both, both), two_inside(geometry, page, by_head=True), k, v
        case _:
            k, v = _random(tokens, 1), _random((PAGES, page, HEADS, geometry.v_dim), 2)
            layouts = tuple(separate(geometry, page, dim=dim) for dim in (DIM, geometry.v_dim))
            return _flat(k, v), layouts, k, v


def _in_block(block: Bytes, geometry: Geometry, layer: int) -> tuple[Elements, Elements]:
    """K and V of a layer of a block as [tokens, heads, dim] views."""
    part = block[layer * geometry.layer_stride :][: geometry.layer_bytes].view(np.uint16)
    split = geometry.k_bytes // 2
    found = []
    for values, dim in ((part[:split], geometry.k_dim), (part[split:], geometry.v_dim)):
        if geometry.layout == "hnd":
            found.append(values.reshape(HEADS, BLOCK, dim).swapaxes(0, 1))
        else:
            found.append(values.reshape(BLOCK, HEADS, dim))
    return found[0], found[1]


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page", [1, 4, 5, 12, 16])
@pytest.mark.parametrize("name", ["two first", "two inside", "two inside, by head", "separate"])
def test_every_layout_goes_into_a_block_and_back(name: str, page: int, layout: str) -> None:
    geometry = _geometry(layout) if name != "separate" else _geometry(layout, v_dim=8)
    buffers, layouts, k, v = engine_cache(name, geometry, page)
    table = np.random.default_rng(4).permutation(PAGES if page > 1 else BLOCK - 3)[: -(-BLOCK // page)]
    table = np.resize(table, -(-BLOCK // page)).astype(np.int64)
    places = [(int(table[token // page]), token % page) for token in range(BLOCK)]
    block = np.full(geometry.slot_bytes, 0xEE, np.uint8)
    gather(geometry, block, 1, buffers, layouts, table)
    got_k, got_v = _in_block(block, geometry, 1)
    assert np.array_equal(got_k, [k[place] for place in places])
    assert np.array_equal(got_v, [v[place] for place in places])
    assert (block[: geometry.layer_stride] == 0xEE).all()
    before = k.copy(), v.copy()
    fresh = np.random.default_rng(8).integers(0, 256, geometry.slot_bytes, np.uint8)
    scatter(geometry, fresh, 1, buffers, layouts, table)
    new_k, new_v = _in_block(fresh, geometry, 1)
    for part, new, old in ((k, new_k, before[0]), (v, new_v, before[1])):
        wanted = old.copy()
        for token, place in enumerate(places):
            wanted[place] = new[token]
        assert np.array_equal(part, wanted)


def test_case_25_a_latent_form_has_one_buffer() -> None:
    geometry = Geometry(block_size=4, layers=1, kv_heads=1, k_dim=24, v_dim=0)
    latent = _random((5, 2, 24), 3)
    layout = separate(geometry, 2, dim=24)
    block = np.zeros(geometry.slot_bytes, np.uint8)
    gather(geometry, block, 0, _flat(latent), (layout,), np.array([4, 1]))
    assert np.array_equal(block[: geometry.layer_bytes].view(np.uint16).reshape(2, 2, 24), latent[[4, 1]])


def test_pages_outside_the_buffer_and_tables_of_another_length_are_refused() -> None:
    geometry = _geometry("nhd")
    buffers, layouts, _, _ = engine_cache("two inside", geometry, 4)
    block = np.zeros(geometry.slot_bytes, np.uint8)
    with pytest.raises(ValueError, match=r"page 9 ends at byte \d+ of a buffer of"):
        gather(geometry, block, 0, buffers, layouts, np.array([0, 9, 1]))
    with pytest.raises(ValueError, match="page -1 is below 0"):
        scatter(geometry, block, 0, buffers, layouts, np.array([0, -1, 1]))
    with pytest.raises(ValueError, match=r"pages is \(2,\); \(3,\) is wanted"):
        gather(geometry, block, 0, buffers, layouts, np.array([0, 1]))
    with pytest.raises(ValueError, match="1 buffers and 2 layouts are given; 2 are wanted"):
        gather(geometry, block, 0, buffers[:1], layouts, np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="layer 2 of a block"):
        gather(geometry, block, 2, buffers, layouts, np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="K has dim 16 and V 8"):
        two_inside(_geometry("nhd", v_dim=8), 4)
    shorter = tuple(separate(_geometry("nhd", v_dim=8), 4, dim=8) for _ in range(2))
    with pytest.raises(ValueError, match="a vector has 16 bytes in the engine and 32 in the block"):
        gather(geometry, block, 0, buffers, shorter, np.array([0, 1, 2]))
