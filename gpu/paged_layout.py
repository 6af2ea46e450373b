"""Where an engine keeps K and V of a token: what gather and scatter need to know of its cache, for one layer.

An engine's cache of a layer is one buffer (or one of K and one of V). A token lies in a *page*; K of a token's head is
one run of `k_dim` elements, V another. All of vLLM's and SGLang's layouts are this with other strides:

| layout of the buffer | constructor |
|---|---|
| [2, pages, page_tokens, heads, dim] (vLLM, FlashAttention; K and V of one dim) | `two_first` |
| [pages, 2, page_tokens, heads, dim] (vLLM, FlashInfer and Triton, NHD) | `two_inside` |
| [pages, 2, heads, page_tokens, dim] (the same, HND) | `two_inside(…, by_head=True)` |
| [pages, page_tokens, heads, dim], a buffer each of K and V | `separate` |
| [tokens, heads, dim], a buffer each of K and V (SGLang's pools: a page is one token) | `separate` with page_tokens=1 |
| [pages, page_tokens, dim], one latent vector a token (MLA) | `separate` with kv_heads=1, as K only |
"""

from __future__ import annotations

import dataclasses

from kvtierd.core.geometry import DTYPE_BYTES, Geometry


@dataclasses.dataclass(frozen=True, slots=True)
class PagedLayout:
    """Where K (or V) of page p, token t and head h of a layer lies: all in bytes, from the first of its buffer.

    `begin + p * page_stride + t * token_stride + h * head_stride`, `vector_bytes` long. `page_tokens` tokens a page.
    """

    page_tokens: int
    begin: int
    page_stride: int
    token_stride: int
    head_stride: int
    vector_bytes: int

    def span(self, pages: int, heads: int) -> int:
        """Bytes from the first of the buffer to the end of the last vector of `pages` pages."""
        last = (pages - 1) * self.page_stride + (self.page_tokens - 1) * self.token_stride
        return self.begin + last + (heads - 1) * self.head_stride + self.vector_bytes


def separate(geometry: Geometry, page_tokens: int, *, dim: int, by_head: bool = False) -> PagedLayout:
    """A buffer of its own: [pages, page_tokens, heads, dim], or [pages, heads, page_tokens, dim] `by_head`."""
    vector = dim * DTYPE_BYTES[geometry.dtype]
    page = page_tokens * geometry.kv_heads * vector
    if by_head:
        return PagedLayout(page_tokens, 0, page, vector, page_tokens * vector, vector)
    return PagedLayout(page_tokens, 0, page, geometry.kv_heads * vector, vector, vector)


def two_first(geometry: Geometry, page_tokens: int, pages: int) -> tuple[PagedLayout, PagedLayout]:
    """K and V in [2, pages, page_tokens, heads, dim]. ValueError where the dims of K and V differ."""
    k = separate(geometry, page_tokens, dim=_one_dim(geometry))
    return k, dataclasses.replace(k, begin=pages * k.page_stride)


def two_inside(geometry: Geometry, page_tokens: int, *, by_head: bool = False) -> tuple[PagedLayout, PagedLayout]:
    """K and V in [pages, 2, page_tokens, heads, dim], or [pages, 2, heads, page_tokens, dim] `by_head`."""
    k = separate(geometry, page_tokens, dim=_one_dim(geometry), by_head=by_head)
    k, half = dataclasses.replace(k, page_stride=2 * k.page_stride), k.page_stride
    return k, dataclasses.replace(k, begin=half)


def of_block(geometry: Geometry) -> tuple[PagedLayout, PagedLayout | None]:
    """K and V of one layer of a block in slot form, as a page of `block_size` tokens."""
    by_head = geometry.layout == "hnd"
    k = separate(geometry, geometry.block_size, dim=geometry.k_dim, by_head=by_head)
    if not geometry.v_dim:
        return k, None
    v = separate(geometry, geometry.block_size, dim=geometry.v_dim, by_head=by_head)
    return k, dataclasses.replace(v, begin=geometry.k_bytes)


def _one_dim(geometry: Geometry) -> int:
    if geometry.k_dim != geometry.v_dim:
        raise ValueError(f"K has dim {geometry.k_dim} and V {geometry.v_dim}; one buffer of both wants the same")
    return geometry.k_dim
