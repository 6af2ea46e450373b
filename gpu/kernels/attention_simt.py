"""Attention on CUDA cores: a few lanes share a token, and their parts of a dot product meet by shuffles.

With a dim of 128 in bf16 a vector of K is 16 loads of 16 bytes: 16 lanes take one token, a warp two. Each such group of
lanes has a maximum, a total and sums of its own, which meet when the split is done: first within the warp, then through
shared memory. Every query head of the tile uses what was loaded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from kvtierd.gpu.kernels import primitives as p
from kvtierd.gpu.kernels.attention_common import (
    GROUP,
    HEADS,
    K_HEAD,
    K_TOKEN,
    LOAD_BYTES,
    NO_SCORE,
    POSITION,
    QUERIES,
    TILES,
    UNPACK,
    V_HEAD,
    V_SCALE,
    V_START,
    V_TOKEN,
    WIDTHS,
    WINDOW,
    ZERO,
    add_shared,
    capped,
    floor_of,
    scale_at,
    seen_from,
    seen_to,
    shrink,
    write_out,
)

WARP = 32
WARPS_MAX = 4


def lanes_for(chunks: int) -> int:
    """Lanes that share a vector of so many loads: a power of two, so that shuffles stay within them."""
    return min(WARP, 1 << (chunks - 1).bit_length())


def make_simt(dtype: str, k_dim: int, v_dim: int, rows: int) -> Callable[..., None]:  # noqa: C901, PLR0915 - one kernel
    """The body for blocks of a dtype and these dims, with `rows` query heads a thread block (see `SIGNATURE`)."""
    width, unpack = WIDTHS[dtype], UNPACK[dtype]
    each = LOAD_BYTES // width
    k_chunks, v_chunks = k_dim // each, v_dim // each
    lanes = lanes_for(max(k_chunks, v_chunks))
    k_loads, v_loads = -(-k_chunks // lanes), -(-v_chunks // lanes)
    k_each, v_each = k_loads * each, v_loads * each
    at_once, k_all, v_all = WARP // lanes, rows * k_each, rows * v_each
    states_bytes = WARPS_MAX * rows * 16
    shared_size = states_bytes + rows * v_dim * 4

    def kernel(  # noqa: C901, PLR0912, PLR0915 - the phases share what is in registers
        memory: Any, q: Any, offsets: Any, scales: Any, positions: Any, tokens: Any, splits: Any, numbers: Any,
        cap: Any, tops: Any, totals: Any, sums: Any,
    ) -> None:  # fmt: skip
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        warps = cuda.blockDim.x // WARP
        place, member = lane % lanes, lane // lanes
        heads, group, queries = numbers[HEADS], numbers[GROUP], numbers[QUERIES]
        tile = cuda.blockIdx.y % numbers[TILES]
        query = cuda.blockIdx.y // numbers[TILES] % queries
        head = cuda.blockIdx.y // numbers[TILES] // queries
        live = min(np.int64(rows), group - tile * rows)
        row0 = (head * queries + query) * group + tile * rows
        position = numbers[POSITION] + query

        vectors = cuda.local.array(k_all, np.float32)
        for r in range(rows):
            for load in range(k_loads):
                chunk = place + load * lanes
                for i in range(each):
                    given = r < live and chunk < k_chunks
                    at = (row0 + r) * k_dim + chunk * each + i
                    vectors[r * k_each + load * each + i] = q[at] if given else ZERO
        top = cuda.local.array(rows, np.float32)
        total = cuda.local.array(rows, np.float32)
        kept = cuda.local.array(v_all, np.float32)
        for r in range(rows):
            top[r], total[r] = NO_SCORE, ZERO
            for i in range(v_each):
                kept[r * v_each + i] = ZERO
        keys = cuda.local.array(k_each, np.float32)
        values = cuda.local.array(v_each, np.float32)

        for block in range(splits[cuda.blockIdx.x], splits[cuda.blockIdx.x + 1]):
            first, count = positions[block], np.int64(tokens[block])
            begin = seen_from(position, numbers[WINDOW], first, count)
            end = seen_to(position, first, count)
            k_scale = scale_at(memory, scales[block], head)
            v_scale = scale_at(memory, scales[block], numbers[V_SCALE] + head)
            k_base = offsets[block] + head * numbers[K_HEAD] * width
            v_base = offsets[block] + (numbers[V_START] + head * numbers[V_HEAD]) * width
            for start in range(begin + warp * at_once, end, warps * at_once):
                token = start + member
                there = token < end
                # Both vectors are asked for before either is used: the second comes while the first is worked on.
                for load in range(k_loads):
                    chunk = place + load * lanes
                    k_words = (np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0))
                    if there and chunk < k_chunks:
                        k_words = p.load_words(memory, k_base + token * numbers[K_TOKEN] * width + chunk * LOAD_BYTES)
                    unpack(k_words, keys, load * each)
                for load in range(v_loads):
                    chunk = place + load * lanes
                    v_words = (np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0))
                    if there and chunk < v_chunks:
                        v_words = p.load_words(memory, v_base + token * numbers[V_TOKEN] * width + chunk * LOAD_BYTES)
                    unpack(v_words, values, load * each)
                for r in range(rows):
                    score = ZERO
                    for i in range(k_each):
                        score += vectors[r * k_each + i] * keys[i]
                    mask = 1
                    while mask < lanes:
                        score += p.exchange_f32(score, mask)
                        mask *= 2
                    score *= k_scale
                    if cap > ZERO:
                        score = capped(score, cap)
                    if not there:
                        score = NO_SCORE
                    new = max(top[r], score)
                    factor = shrink(top[r], new)
                    weight = p.exp2(score - floor_of(new))
                    top[r] = new
                    total[r] = total[r] * factor + weight
                    weight *= v_scale
                    for i in range(v_each):
                        kept[r * v_each + i] = kept[r * v_each + i] * factor + weight * values[i]

        mask = lanes
        while mask < WARP:
            for r in range(rows):
                other = p.exchange_f32(top[r], mask)
                new = max(top[r], other)
                ours, theirs = shrink(top[r], new), shrink(other, new)
                top[r] = new
                total[r] = total[r] * ours + p.exchange_f32(total[r], mask) * theirs
                for i in range(v_each):
                    theirs_here = p.exchange_f32(kept[r * v_each + i], mask)
                    kept[r * v_each + i] = kept[r * v_each + i] * ours + theirs_here * theirs
            mask *= 2

        shared = p.shared_bytes(shared_size)
        if lane == 0:
            for r in range(rows):
                at = (warp * rows + r) * 16
                p.set_shared_words(shared, at, p.bits_of(top[r]), p.bits_of(total[r]), np.uint32(0), np.uint32(0))
        cuda.syncthreads()
        out = np.int64(cuda.blockIdx.x) * heads * queries * group + row0
        for r in range(rows):
            new, whole = NO_SCORE, ZERO
            for other_warp in range(warps):
                there_top = p.float_of(p.shared_words(shared, (other_warp * rows + r) * 16)[0])
                new = max(new, there_top)
            for other_warp in range(warps):
                words = p.shared_words(shared, (other_warp * rows + r) * 16)
                whole += p.float_of(words[1]) * shrink(p.float_of(words[0]), new)
            factor = shrink(top[r], new)
            for i in range(v_each):
                kept[r * v_each + i] *= factor
            if cuda.threadIdx.x == 0 and r < live:
                tops[out + r], totals[out + r] = new, whole
        for turn in range(warps):
            if warp == turn and member == 0:
                for r in range(rows):
                    for load in range(v_loads):
                        chunk = place + load * lanes
                        if chunk < v_chunks:
                            for i in range(0, each, 4):
                                at = states_bytes + (r * v_dim + chunk * each + i) * 4
                                here = r * v_each + load * each + i
                                add_shared(
                                    shared, at, kept[here], kept[here + 1], kept[here + 2], kept[here + 3], turn == 0
                                )
            cuda.syncthreads()
        write_out(shared, states_bytes, live, v_dim, out, v_dim, 0, sums)

    kernel.__name__ = f"attention_simt_{dtype}_{k_dim}_{v_dim}_{rows}"
    return kernel
