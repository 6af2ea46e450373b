"""Gather and scatter on CUDA: blocks in slot form from and to an engine's paged cache, one layer's K or V a launch.

    grid (token groups, blocks); the threads of a thread block share out the 16-byte pieces of its tokens

Pages are tables as `kvtierd.gpu.paged_layout` says. Vectors are multiples of 16 bytes and lie at multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.kernels.primitives import load_words, store_words
from kvtierd.gpu.kernels.registry import Kernel, register
from kvtierd.gpu.paged_layout import PagedLayout

PIECE = 16
"""Bytes a thread moves at once."""
THREADS = 256
TOKENS_A_BLOCK = 8
"""Tokens a thread block moves: 8 heads of 128 bf16 make 2 KiB a token, so 4 pieces a thread."""

_SIGNATURE = "void(uint8[::1], uint8[::1], int64[::1], int64[:, ::1]" + ", int64" * 9 + ")"


def _make_copy(*, to_engine: bool) -> Callable[..., None]:
    """The body of gather, or of scatter: one direction each, so that reads go through the read-only path."""

    def copy(  # type: ignore[no-untyped-def]
        engine, blocks, block_at, pages,
        tokens, heads, pieces, page_tokens, page_stride, token_stride, head_stride, block_token, block_head,
    ):  # fmt: skip
        index = cuda.blockIdx.y
        first = cuda.blockIdx.x * TOKENS_A_BLOCK
        count = min(tokens - first, TOKENS_A_BLOCK)
        in_token = heads * pieces
        for item in range(cuda.threadIdx.x, count * in_token, cuda.blockDim.x):
            token, rest = first + item // in_token, item % in_token
            head, piece = rest // pieces, rest % pieces
            page = pages[index, token // page_tokens]
            there = page * page_stride + token % page_tokens * token_stride + head * head_stride + piece * PIECE
            here = block_at[index] + token * block_token + head * block_head + piece * PIECE
            if to_engine:
                words = load_words(blocks, here)
                store_words(engine, there, words[0], words[1], words[2], words[3])
            else:
                words = load_words(engine, there)
                store_words(blocks, here, words[0], words[1], words[2], words[3])

    return copy


def _registered(name: str, *, to_engine: bool) -> Kernel:
    return register(
        Kernel(
            name=name,
            function=_make_copy(to_engine=to_engine),
            signature=_SIGNATURE,
            threads=THREADS,
            registers={"*": 64},
            reason="4 thread blocks of 256 on a multiprocessor: a copy lives from loads under way",
            canonical=True,
        )
    )


GATHER = _registered("gather_pages", to_engine=False)
SCATTER = _registered("scatter_pages", to_engine=True)


def supports(layout: PagedLayout) -> bool:
    """Whether vectors of an engine's buffer lie so that 16 bytes can be moved at once."""
    strides = (layout.begin, layout.page_stride, layout.token_stride, layout.head_stride, layout.vector_bytes)
    return all(size % PIECE == 0 for size in strides)


def launch(
    kernel: Kernel,
    geometry: Geometry,
    engine: Any,
    there: PagedLayout,
    blocks: Any,
    block_at: Any,
    here: PagedLayout,
    pages: Any,
    *,
    stream: Any = 0,
    threads: int = THREADS,
) -> None:
    """Gather (`GATHER`) or scatter (`SCATTER`) K or V of one layer of many blocks, all in device memory.

    `engine` is the part of the engine's buffer from `there.begin` on, flat uint8; `block_at` int64 [blocks] the byte in
    `blocks` at which K or V of the layer of each block begins; `here` one of `paged_layout.of_block`; `pages` int64
    [blocks, pages of a block], which the caller has checked on the host (`gpu.paged.check_pages`). ValueError for
    strides that `supports` refuses.
    """
    if not (supports(there) and supports(here)) or there.vector_bytes != here.vector_bytes:
        raise ValueError(f"strides of {there} and {here} must be multiples of {PIECE} and their vectors equally long")
    grid = (-(-geometry.block_size // TOKENS_A_BLOCK), len(block_at))
    shape = (geometry.block_size, geometry.kv_heads, here.vector_bytes // PIECE)
    strides = (there.page_tokens, there.page_stride, there.token_stride, there.head_stride)
    arguments = (engine, blocks, block_at, pages, *shape, *strides, here.token_stride, here.head_stride)
    kernel.launch(grid, *arguments, threads=threads, stream=stream)
