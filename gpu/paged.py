"""Gather and scatter on the CPU: blocks in slot form from and to an engine's paged cache, one layer at a time.

An engine's pages may be smaller than a block (16 tokens against 128) or single tokens: a table names the page of each.
Calls run on one thread without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.host_kernels.paged import copy_pages
from kvtierd.gpu.paged_layout import PagedLayout, of_block

Pages = npt.NDArray[np.int64]

_copy_pages: Callable[..., None] = copy_pages


def gather(
    geometry: Geometry,
    block: Bytes,
    layer: int,
    engine: tuple[Bytes, ...],
    layouts: tuple[PagedLayout, ...],
    pages: Pages,
) -> None:
    """Copy one layer of a block out of an engine's cache.

    `block` is [slot_bytes] uint8; its padding is left as it is. `engine` and `layouts` are of K and V (of K alone for a
    latent form), the buffers flat uint8; the same one twice where both lie in it. `pages` is int64
    [ceil(block_size / page_tokens)]. ValueError where a page or a vector would lie outside its buffer.
    """
    _copy(geometry, block, layer, engine, layouts, pages, to_engine=False)


def scatter(
    geometry: Geometry,
    block: Bytes,
    layer: int,
    engine: tuple[Bytes, ...],
    layouts: tuple[PagedLayout, ...],
    pages: Pages,
) -> None:
    """Copy one layer of a block into an engine's cache; as `gather`."""
    _copy(geometry, block, layer, engine, layouts, pages, to_engine=True)


def check_pages(
    geometry: Geometry, engine_bytes: tuple[int, ...], layouts: tuple[PagedLayout, ...], pages: Pages
) -> None:
    """Raise ValueError where the page table does not fit the block or the engine's buffers."""
    wanted_parts = 2 if geometry.v_dim else 1
    if len(engine_bytes) != wanted_parts or len(layouts) != wanted_parts:
        raise ValueError(f"{len(engine_bytes)} buffers and {len(layouts)} layouts are given; {wanted_parts} are wanted")
    for layout, size in zip(layouts, engine_bytes, strict=True):
        needed = -(-geometry.block_size // layout.page_tokens)
        if pages.shape != (needed,):
            raise ValueError(
                f"pages is {pages.shape}; ({needed},) is wanted: {layout.page_tokens} tokens lie in a page"
            )
        if int(pages.min()) < 0:
            raise ValueError(f"page {int(pages.min())} is below 0")
        if (span := layout.span(int(pages.max()) + 1, geometry.kv_heads)) > size:
            raise ValueError(f"page {int(pages.max())} ends at byte {span} of a buffer of {size}")


def _copy(
    geometry: Geometry,
    block: Bytes,
    layer: int,
    engine: tuple[Bytes, ...],
    layouts: tuple[PagedLayout, ...],
    pages: Pages,
    *,
    to_engine: bool,
) -> None:
    if block.shape != (geometry.slot_bytes,) or not 0 <= layer < geometry.layers:
        wanted = f"({geometry.slot_bytes},) and a layer below {geometry.layers} are wanted"
        raise ValueError(f"layer {layer} of a block {block.shape}: {wanted}")
    check_pages(geometry, tuple(buffer.size for buffer in engine), layouts, pages)
    for buffer, there, here in zip(engine, layouts, of_block(geometry), strict=False):
        if here is None:
            break
        if there.vector_bytes != here.vector_bytes:
            raise ValueError(
                f"a vector has {there.vector_bytes} bytes in the engine and {here.vector_bytes} in the block"
            )
        _copy_pages(
            buffer,
            block,
            pages,
            geometry.block_size,
            geometry.kv_heads,
            here.vector_bytes,
            there.page_tokens,
            there.begin,
            there.page_stride,
            there.token_stride,
            there.head_stride,
            layer * geometry.layer_stride + here.begin,
            here.token_stride,
            here.head_stride,
            to_engine,
        )
