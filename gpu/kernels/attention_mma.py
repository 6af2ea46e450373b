"""Attention on tensor cores: `mma.m16n8k16`, fed from global memory by 16-byte loads without shared memory between.

Query heads are the 16 rows of a product (8 of them for `rows` = 8, the others stay zero), tokens its columns. What a
lane loads at once need not be what an instruction's fragment names, as long as both factors agree on the order: the sum
of products does not care. So lane (g, c) loads 16 bytes of token g at chunk 4j + c, which are its parts of two
instructions (four for e4m3), and q lies in shared memory in the same order. For values, lane (g, c) loads chunk 8j + g
of tokens 2c, 2c + 1, 2c + 8, 2c + 9, and the i-th instruction takes the i-th element of every chunk.

q and the weights are split into a high and a low half, each of 16 bits, and multiplied one after the other: 16 bits of
precision at least instead of 8 (bf16) or 11 (fp16), for products that cost nothing while memory is the limit. e4m3 goes
into fp16, exactly.
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
    Q_EXPONENT,
    QUERIES,
    TILES,
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

WARP, WARPS_MAX, TILE = 32, 4, 16
NOTHING = np.uint32(0)


@p.device_function
def _keep_16bit(words: Any, out: Any, at: int) -> None:
    w0, w1, w2, w3 = words
    out[at], out[at + 1], out[at + 2], out[at + 3] = w0, w1, w2, w3


@p.device_function
def _keep_e4m3(words: Any, out: Any, at: int) -> None:
    w0, w1, w2, w3 = words
    out[at], out[at + 1] = p.f16_of_e4m3(w0)
    out[at + 2], out[at + 3] = p.f16_of_e4m3(w1)
    out[at + 4], out[at + 5] = p.f16_of_e4m3(w2)
    out[at + 6], out[at + 7] = p.f16_of_e4m3(w3)


@p.device_function
def _split_bf16(a: Any, b: Any) -> Any:
    """Two floats as a word of bf16 and a word of what that leaves."""
    high = p.bf16_pair(a, b)
    x, y = p.floats_of_bf16(high)
    return high, p.bf16_pair(a - x, b - y)


@p.device_function
def _split_f16(a: Any, b: Any) -> Any:
    high = p.f16_pair(a, b)
    x, y = p.floats_of_f16(high)
    return high, p.f16_pair(a - x, b - y)


@p.device_function
def _halves(one: Any, other: Any, upper: int) -> Any:
    """The lower (upper) 16 bits of two words, in one."""
    if upper:
        return one >> np.uint32(16) | other & np.uint32(0xFFFF0000)
    return one & np.uint32(0xFFFF) | other << np.uint32(16)


@p.device_function
def _power_of_two(exponent: int) -> Any:
    return p.float_of(np.uint32((exponent + 127) << 23))


def make_mma(  # noqa: C901, PLR0915 - one kernel
    dtype: str, k_dim: int, v_dim: int, rows: int, part: int
) -> Callable[..., None]:
    """The body for blocks of a dtype and these dims (see `SIGNATURE`), with 8 or 16 query heads a thread block.

    A thread block sums `part` elements of the values: grid z is v_dim / part.
    """
    width = WIDTHS[dtype]
    bf16 = dtype == "bf16"
    mma, split, keep = (
        (p.mma_bf16, _split_bf16, _keep_16bit)
        if bf16
        else (p.mma_f16, _split_f16, _keep_e4m3 if dtype == "fp8_e4m3" else _keep_16bit)
    )
    each = LOAD_BYTES // width
    steps, words_each = each // 4, each // 2
    k_chunks, v_chunks = k_dim // each, part // each
    k_blocks, v_blocks = -(-k_chunks // 4), -(-v_chunks // 8)
    halves = rows // 8
    floats_each = 2 * halves
    kept_all, v_words_all = v_blocks * each * floats_each, 4 * words_each
    scaled = dtype == "fp8_e4m3"
    q_entry = 16 * halves
    q_bytes = k_blocks * steps * WARP * q_entry
    states_at, sums_at = q_bytes, q_bytes + WARPS_MAX * rows * 16
    shared_size = sums_at + rows * part * 4

    def kernel(  # noqa: C901, PLR0912, PLR0915 - the phases share what is in registers
        memory: Any, q: Any, offsets: Any, scales: Any, positions: Any, tokens: Any, splits: Any, numbers: Any,
        cap: Any, tops: Any, totals: Any, sums: Any,
    ) -> None:  # fmt: skip
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        warps = cuda.blockDim.x // WARP
        g, c = lane // 4, lane % 4
        heads, group, queries = numbers[HEADS], numbers[GROUP], numbers[QUERIES]
        tile = cuda.blockIdx.y % numbers[TILES]
        query = cuda.blockIdx.y // numbers[TILES] % queries
        head = cuda.blockIdx.y // numbers[TILES] // queries
        live = min(np.int64(rows), group - tile * rows)
        row0 = (head * queries + query) * group + tile * rows
        position = numbers[POSITION] + query
        q_factor = _power_of_two(numbers[Q_EXPONENT])

        shared = p.shared_bytes(shared_size)
        for entry in range(cuda.threadIdx.x, k_blocks * steps * WARP, cuda.blockDim.x):
            to_lane, step, block = entry % WARP, entry // WARP % steps, entry // WARP // steps
            element = (block * 4 + to_lane % 4) * each + step * 4
            for half in range(halves):
                row = to_lane // 4 + half * 8
                given = row < live and element < k_dim
                at = (row0 + row) * k_dim + element
                f0 = q[at] if given else ZERO
                f1 = q[at + 1] if given else ZERO
                f2 = q[at + 2] if given else ZERO
                f3 = q[at + 3] if given else ZERO
                high0, low0 = split(f0, f1)
                high1, low1 = split(f2, f3)
                p.set_shared_words(shared, entry * q_entry + half * 16, high0, high1, low0, low1)
        cuda.syncthreads()

        top = cuda.local.array(halves, np.float32)
        total = cuda.local.array(halves, np.float32)
        factor = cuda.local.array(halves, np.float32)
        kept = cuda.local.array(kept_all, np.float32)
        weights = cuda.local.array(8, np.float32)
        high = cuda.local.array(4, np.uint32)
        low = cuda.local.array(4, np.uint32)
        k_words = cuda.local.array(words_each, np.uint32)
        v_words = cuda.local.array(v_words_all, np.uint32)
        scores = cuda.local.array(8, np.float32)
        for half in range(halves):
            top[half], total[half] = NO_SCORE, ZERO
        for i in range(kept_all):
            kept[i] = ZERO
        for i in range(4):
            high[i], low[i] = NOTHING, NOTHING
        v_first = cuda.blockIdx.z * part

        for block in range(splits[cuda.blockIdx.x], splits[cuda.blockIdx.x + 1]):
            first, count = positions[block], np.int64(tokens[block])
            begin = seen_from(position, numbers[WINDOW], first, count)
            end = seen_to(position, first, count)
            k_scale = scale_at(memory, scales[block], head) * q_factor
            v_scale = scale_at(memory, scales[block], numbers[V_SCALE] + head)
            k_base = offsets[block] + head * numbers[K_HEAD] * width
            v_base = offsets[block] + (numbers[V_START] + head * numbers[V_HEAD] + v_first) * width
            for start in range(begin + warp * TILE, end, warps * TILE):
                for column in range(2):
                    token = start + column * 8 + g
                    s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
                    for j in range(k_blocks):
                        chunk = j * 4 + c
                        loaded = (NOTHING, NOTHING, NOTHING, NOTHING)
                        if token < end and chunk < k_chunks:
                            loaded = p.load_words(
                                memory, k_base + token * numbers[K_TOKEN] * width + chunk * LOAD_BYTES
                            )
                        keep(loaded, k_words, 0)
                        for step in range(steps):
                            at = ((j * steps + step) * WARP + lane) * q_entry
                            h0, h2, l0, l2 = p.shared_words(shared, at)
                            h1, h3, l1, l3 = NOTHING, NOTHING, NOTHING, NOTHING
                            if halves == 2:
                                h1, h3, l1, l3 = p.shared_words(shared, at + 16)
                            pair = (k_words[2 * step], k_words[2 * step + 1])
                            s0, s1, s2, s3 = mma((h0, h1, h2, h3), pair, (s0, s1, s2, s3))
                            s0, s1, s2, s3 = mma((l0, l1, l2, l3), pair, (s0, s1, s2, s3))
                    scores[column * 4], scores[column * 4 + 1] = s0, s1
                    scores[column * 4 + 2], scores[column * 4 + 3] = s2, s3

                for half in range(halves):
                    new = top[half]
                    for i in range(4):
                        at = i // 2 * 4 + half * 2 + i % 2
                        score = scores[at] * k_scale
                        if cap > ZERO:
                            score = capped(score, cap)
                        if start + i // 2 * 8 + 2 * c + i % 2 >= end:
                            score = NO_SCORE
                        scores[at] = score
                        new = max(new, score)
                    other = p.exchange_f32(new, 1)
                    new = max(new, other)
                    other = p.exchange_f32(new, 2)
                    new = max(new, other)
                    factor[half] = shrink(top[half], new)
                    top[half] = new
                    total[half] *= factor[half]
                    for i in range(4):
                        at = i // 2 * 4 + half * 2 + i % 2
                        weight = p.exp2(scores[at] - floor_of(new))
                        weights[at] = weight
                        total[half] += weight
                    high[half], low[half] = split(weights[half * 2], weights[half * 2 + 1])
                    high[half + 2], low[half + 2] = split(weights[4 + half * 2], weights[5 + half * 2])
                a_high, a_low = (high[0], high[1], high[2], high[3]), (low[0], low[1], low[2], low[3])

                for j in range(v_blocks):
                    chunk = j * 8 + g
                    for which in range(4):
                        token = start + which // 2 * 8 + 2 * c + which % 2
                        loaded = (NOTHING, NOTHING, NOTHING, NOTHING)
                        if token < end and chunk < v_chunks:
                            loaded = p.load_words(
                                memory, v_base + token * numbers[V_TOKEN] * width + chunk * LOAD_BYTES
                            )
                        keep(loaded, v_words, which * words_each)
                    for i in range(each):
                        b0 = _halves(v_words[i // 2], v_words[words_each + i // 2], i % 2)
                        b1 = _halves(v_words[2 * words_each + i // 2], v_words[3 * words_each + i // 2], i % 2)
                        o = (ZERO, ZERO, ZERO, ZERO)
                        at = (j * each + i) * floats_each
                        if not scaled:
                            o = (kept[at] * factor[0], kept[at + 1] * factor[0], ZERO, ZERO)
                            if halves == 2:
                                o = (o[0], o[1], kept[at + 2] * factor[1], kept[at + 3] * factor[1])
                        o = mma(a_high, (b0, b1), o)
                        o = mma(a_low, (b0, b1), o)
                        if scaled:
                            kept[at] = kept[at] * factor[0] + o[0] * v_scale
                            kept[at + 1] = kept[at + 1] * factor[0] + o[1] * v_scale
                            if halves == 2:
                                kept[at + 2] = kept[at + 2] * factor[1] + o[2] * v_scale
                                kept[at + 3] = kept[at + 3] * factor[1] + o[3] * v_scale
                        else:
                            kept[at], kept[at + 1] = o[0], o[1]
                            if halves == 2:
                                kept[at + 2], kept[at + 3] = o[2], o[3]

        for half in range(halves):
            total[half] += p.exchange_f32(total[half], 1)
            total[half] += p.exchange_f32(total[half], 2)
            if c == 0:
                at = states_at + (warp * rows + half * 8 + g) * 16
                p.set_shared_words(shared, at, p.bits_of(top[half]), p.bits_of(total[half]), NOTHING, NOTHING)
        cuda.syncthreads()
        out = np.int64(cuda.blockIdx.x) * heads * queries * group + row0
        for half in range(halves):
            row = half * 8 + g
            new, whole = NO_SCORE, ZERO
            for other_warp in range(warps):
                there = p.float_of(p.shared_words(shared, states_at + (other_warp * rows + row) * 16)[0])
                new = max(new, there)
            for other_warp in range(warps):
                words = p.shared_words(shared, states_at + (other_warp * rows + row) * 16)
                whole += p.float_of(words[1]) * shrink(p.float_of(words[0]), new)
            factor[half] = shrink(top[half], new)
            if warp == 0 and c == 0 and row < live and cuda.blockIdx.z == 0:
                tops[out + row], totals[out + row] = new, whole
        for turn in range(warps):
            if warp == turn:
                for half in range(halves):
                    for j in range(v_blocks):
                        for side in range(2):
                            chunk = j * 8 + 2 * c + side
                            if chunk < v_chunks:
                                for i in range(0, each, 4):
                                    here = (j * each + i) * floats_each + half * 2 + side
                                    at = sums_at + ((half * 8 + g) * part + chunk * each + i) * 4
                                    add_shared(
                                        shared,
                                        at,
                                        kept[here] * factor[half],
                                        kept[here + floats_each] * factor[half],
                                        kept[here + 2 * floats_each] * factor[half],
                                        kept[here + 3 * floats_each] * factor[half],
                                        turn == 0,
                                    )
            cuda.syncthreads()
        write_out(shared, sums_at, live, part, out, v_dim, v_first, sums)

    kernel.__name__ = f"attention_mma_{dtype}_{k_dim}_{v_dim}_{rows}"
    return kernel
