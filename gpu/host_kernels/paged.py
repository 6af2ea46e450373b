"""Copies between an engine's pages and a block, vector by vector, on one CPU thread without the GIL."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kvtierd.gpu.host_kernels.codec_vectors import data, intrinsic
from kvtierd.index.jit import compiled


@intrinsic
def copy_bytes(_typing: Any, target: Any, at: Any, source: Any, begin: Any, count: Any) -> Any:
    """`copy_bytes(target, at, source, begin, count)` between uint8 arrays; LLVM's memcpy."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = builder.gep(data(context, builder, signature.args[0], args[0]), [args[1]])
        source_at = builder.gep(data(context, builder, signature.args[2], args[2]), [args[3]])
        cgutils.raw_memcpy(builder, to, source_at, args[4], ir.IntType(64)(1))
        return context.get_dummy_value()

    del at, begin, count
    return types.void(target, types.int64, source, types.int64, types.int64), generate


@compiled(f"void(uint8[::1], uint8[::1], int64[::1], {', '.join(['int64'] * 11)}, boolean)")
def copy_pages(  # type: ignore[no-untyped-def]
    engine, block, pages, tokens, heads, vector, page_tokens, begin, page_stride, token_stride, head_stride,
    block_begin, block_token, block_head, to_engine,
):  # fmt: skip
    """Copy `tokens` tokens of `heads` vectors between pages of an engine and a block.

    Token t lies in page pages[t // page_tokens]. Vectors that lie side by side on both sides are copied at once.
    """
    whole = head_stride == vector and block_head == vector
    copies, size = (1, heads * vector) if whole else (heads, vector)
    for token in range(tokens):
        place = begin + pages[token // page_tokens] * page_stride + token % page_tokens * token_stride
        ours = block_begin + token * block_token
        for head in range(copies):
            if to_engine:
                copy_bytes(engine, place + head * head_stride, block, ours + head * block_head, size)
            else:
                copy_bytes(block, ours + head * block_head, engine, place + head * head_stride, size)
