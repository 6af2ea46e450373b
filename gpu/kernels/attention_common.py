"""What both forms of the CUDA attention kernels share: how a call is described, and their elements as float32.

A launch has blocks of one dtype; `splits` cuts them into runs of whole blocks, and each run of blocks gives a maximum,
a total of weights and a weighted sum of values of its own, as on the CPU (kvtierd.gpu.host_kernels.attention). A thread
block has one split, one KV head, and some of its query heads at one position: what is seen is the same for all of them,
and what is not seen is not read. Scores are in units of log2.

Blocks lie at byte offsets from one array's first byte. On a device these may lead anywhere that the device can read,
mapped host memory included; in the simulator they must stay inside.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from kvtierd.gpu.kernels import primitives as p

HEADS, GROUP, QUERIES, POSITION, WINDOW, K_TOKEN, K_HEAD, V_TOKEN, V_HEAD, V_START, V_SCALE, TILES, Q_EXPONENT = range(
    13
)
"""Places in the int64 array that describes a call: as `Shape` of the host kernels has them, strides in elements; TILES
is how many thread blocks share the query heads of a KV head at one position; Q_EXPONENT, of which only the `mma` form
takes notice, is the power of two that scores are multiplied by because q was divided by it."""
NUMBERS = 13

SIGNATURE = (
    "void(uint8[::1], float32[::1], int64[::1], int64[::1], int64[::1], int32[::1], int64[::1], int64[::1], float32, "
    "float32[::1], float32[::1], float32[::1])"
)
"""memory, q [heads, queries * group, k_dim] scaled to log2, offsets of blocks, offsets of their scales (NO_SCALES
where there are none), positions, tokens, splits [n + 1], numbers, soft cap times log2(e) (0: none), and what is filled
in: tops and totals [splits, heads * queries * group], sums [splits, heads * queries * group, v_dim]."""

WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1}
LOAD_BYTES = 16
NO_SCORE = np.float32(-np.inf)
NO_SCALES = np.int64(-(1 << 63))
"""Stands for scales that a block does not have. Any other offset may be one: host memory can lie below the pool."""
ZERO, ONE = np.float32(0), np.float32(1)


@p.device_function
def unpack_bf16(words: Any, out: Any, at: int) -> None:
    """Four words as eight float32."""
    w0, w1, w2, w3 = words
    out[at], out[at + 1] = p.floats_of_bf16(w0)
    out[at + 2], out[at + 3] = p.floats_of_bf16(w1)
    out[at + 4], out[at + 5] = p.floats_of_bf16(w2)
    out[at + 6], out[at + 7] = p.floats_of_bf16(w3)


@p.device_function
def unpack_fp16(words: Any, out: Any, at: int) -> None:
    """Four words as eight float32."""
    w0, w1, w2, w3 = words
    out[at], out[at + 1] = p.floats_of_f16(w0)
    out[at + 2], out[at + 3] = p.floats_of_f16(w1)
    out[at + 4], out[at + 5] = p.floats_of_f16(w2)
    out[at + 6], out[at + 7] = p.floats_of_f16(w3)


@p.device_function
def unpack_fp32(words: Any, out: Any, at: int) -> None:
    """Four words as four float32."""
    w0, w1, w2, w3 = words
    out[at], out[at + 1], out[at + 2], out[at + 3] = p.float_of(w0), p.float_of(w1), p.float_of(w2), p.float_of(w3)


@p.device_function
def _unpack_codes(word: Any, out: Any, at: int) -> None:
    low, high = p.f16_of_e4m3(word)
    out[at], out[at + 1] = p.floats_of_f16(low)
    out[at + 2], out[at + 3] = p.floats_of_f16(high)


@p.device_function
def unpack_e4m3(words: Any, out: Any, at: int) -> None:
    """Four words as sixteen float32."""
    w0, w1, w2, w3 = words
    _unpack_codes(w0, out, at)
    _unpack_codes(w1, out, at + 4)
    _unpack_codes(w2, out, at + 8)
    _unpack_codes(w3, out, at + 12)


UNPACK: dict[str, Any] = {
    "bf16": unpack_bf16,
    "fp16": unpack_fp16,
    "fp32": unpack_fp32,
    "fp8_e4m3": unpack_e4m3,
}


@p.device_function
def seen_from(position: int, window: int, first: int, count: int) -> int:
    """The first of a block's `count` tokens that a query at `position` sees, the block's first one being at `first`."""
    begin = position - window + 1 - first
    return min(begin, count) if window > 0 and begin > 0 else 0


@p.device_function
def seen_to(position: int, first: int, count: int) -> int:
    """Behind the last one that it sees."""
    return max(min(position + 1 - first, count), 0)


@p.device_function
def scale_at(memory: Any, offset: int, index: int) -> Any:
    """A scale of a block; 1 where it has none."""
    return p.float_of(p.load_word(memory, offset + 4 * index)) if offset != NO_SCALES else ONE


@p.device_function
def capped(score: Any, cap: Any) -> Any:
    """cap * tanh(score), with tanh as 1 - 2e / (1 + e), e = e^-2|x|, and its series near 0 where that would cancel."""
    size = abs(score)
    e = p.exp2(size * np.float32(-2.8853900817779268))
    far = (ONE - e) / (ONE + e)
    x2 = size * size
    near = size * (ONE + x2 * (np.float32(-1 / 3) + x2 * (np.float32(2 / 15) - x2 * np.float32(17 / 315))))
    tanh = near if size < np.float32(0.15) else far
    return cap * (-tanh if score < ZERO else tanh)


@p.device_function
def shrink(old: Any, new: Any) -> Any:
    """What is summed against maximum `old` is multiplied by this when the maximum is `new`."""
    return ONE if new == old else p.exp2(old - new)


@p.device_function
def floor_of(top: Any) -> Any:
    """The maximum to subtract: 0 where there is none, so that weights of nothing are 0."""
    return ZERO if top == NO_SCORE else top


@p.device_function
def add_shared(shared: Any, byte: int, a: Any, b: Any, c: Any, d: Any, first: Any) -> None:
    """Four floats to shared memory, added to what is there unless they are the first."""
    if not first:
        w0, w1, w2, w3 = p.shared_words(shared, byte)
        a, b, c, d = a + p.float_of(w0), b + p.float_of(w1), c + p.float_of(w2), d + p.float_of(w3)
    p.set_shared_words(shared, byte, p.bits_of(a), p.bits_of(b), p.bits_of(c), p.bits_of(d))


@p.device_function
def write_out(shared: Any, at: int, rows: int, part: int, row: int, v_dim: int, first: int, sums: Any) -> None:
    """Copy `rows` rows of `part` floats from shared memory to elements `first` on of rows of sums from `row` on.

    All threads take part.
    """
    quads = part // 4
    for index in range(cuda.threadIdx.x, rows * quads, cuda.blockDim.x):
        r, quad = index // quads, index % quads
        w0, w1, w2, w3 = p.shared_words(shared, at + index * 16)
        p.store_words(sums, ((row + r) * v_dim + first + quad * 4) * 4, w0, w1, w2, w3)
