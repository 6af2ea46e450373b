"""Gather and scatter on CUDA in the simulator, against the CPU's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu import paged
from kvtierd.gpu.kernels.paged import GATHER, SCATTER, launch
from kvtierd.gpu.kernels.registry import Kernel
from kvtierd.gpu.paged_layout import PagedLayout, of_block, separate, two_first, two_inside

PAGES, COUNT = 24, 2

Bytes = npt.NDArray[np.uint8]
Layouts = tuple[PagedLayout, PagedLayout]


def _layouts(name: str, geometry: Geometry) -> Layouts:
    match name:
        case "two first":
            return two_first(geometry, 4, PAGES)
        case "by head":
            return two_inside(geometry, 4, by_head=True)
        case _:
            k = separate(geometry, 1, dim=16)
            return k, k


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("name", ["two first", "by head", "tokens"])
def test_gather_and_scatter_are_those_of_the_cpu(name: str, layout: str) -> None:
    geometry = Geometry(block_size=10, layers=2, kv_heads=2, k_dim=16, v_dim=16, layout=layout)
    layouts, rng = _layouts(name, geometry), np.random.default_rng(6)
    size = max(part.span(PAGES, 2) for part in layouts)
    k = rng.integers(0, 256, size, np.uint8)
    engine = (k, rng.integers(0, 256, size, np.uint8) if name == "tokens" else k)
    rows = -(-geometry.block_size // layouts[0].page_tokens)
    pages = rng.permutation(PAGES)[: COUNT * rows].reshape(COUNT, rows).astype(np.int64)
    wanted, found = (np.zeros((COUNT, geometry.slot_bytes), np.uint8) for _ in range(2))
    for index in range(COUNT):
        paged.gather(geometry, wanted[index], 1, engine, layouts, pages[index])
    _launch(GATHER, geometry, engine, layouts, found, pages)
    assert np.array_equal(found, wanted)

    blocks = rng.integers(0, 256, wanted.shape, np.uint8)
    mine, theirs = ((one := buffer.copy(), other.copy() if other is not buffer else one)
                    for buffer, other in (engine, engine))  # fmt: skip
    for index in range(COUNT):
        paged.scatter(geometry, blocks[index], 1, theirs, layouts, pages[index])
    _launch(SCATTER, geometry, mine, layouts, blocks, pages)
    assert all(np.array_equal(*buffers) for buffers in zip(mine, theirs, strict=True))
    assert not np.array_equal(mine[0], engine[0])


def _launch(
    kernel: Kernel,
    geometry: Geometry,
    engine: tuple[Bytes, Bytes],
    layouts: Layouts,
    blocks: Bytes,
    pages: npt.NDArray[np.int64],
) -> None:
    for buffer, there, here in zip(engine, layouts, of_block(geometry), strict=True):
        assert here is not None
        at = np.arange(COUNT, dtype=np.int64) * geometry.slot_bytes + geometry.layer_stride + here.begin
        launch(kernel, geometry, buffer[there.begin :], there, blocks.reshape(-1), at, here, pages, threads=32)


def test_strides_that_16_bytes_do_not_divide_are_refused() -> None:
    geometry = Geometry(block_size=4, layers=1, kv_heads=2, k_dim=12, v_dim=12)
    there, here = separate(geometry, 4, dim=12), of_block(geometry)[0]
    with pytest.raises(ValueError, match="must be multiples of 16"):
        launch(GATHER, geometry, None, there, None, [], here, None)
