"""FP8 on CUDA: blocks in slot form to codes, scales and errors, and back (`kvtierd.core.stored_form`).

    grid (layers x groups, blocks); a thread block does one group of one layer of one block

        pass 1   largest magnitude: integers, 16 bytes a thread and step
                 -> exponent of the scale, by all threads alike
        pass 2   the same bytes again (from L2): codes, 8 a thread and step, and errors

The bytes are those of the CPU's kernels; only the sums of squares are added in another order. Dims are multiples of 8:
other blocks take the way through the host. Arithmetic is IEEE (no fastmath): the scale and NaN depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import EncodedLayout, encodable
from kvtierd.gpu.kernels.codec_elements import ALL, FINITE, INFINITE, INFINITY, WIDTH, readers, writer
from kvtierd.gpu.kernels.primitives import (
    bits_of,
    device_function,
    e4m3_word,
    exchange_f32,
    exchange_u32,
    f16_of_e4m3,
    float_of,
    floats_of_f16,
    load_pair,
    load_word,
    store_pair,
    store_word,
)
from kvtierd.gpu.kernels.registry import Kernel, register

KINDS = ("bf16", "fp16", "fp32")
VECTOR = 8
"""Elements a thread takes at once: 16 bytes of bf16, 8 bytes of codes."""
THREADS = 128
WARPS_MAX = 8
"""Room for the sums of this many warps."""
MIN_SCALE_EXPONENT = -100

_ZERO, _INF = np.float32(0), np.float32(np.inf)
_FULL_WARP = 32

_SIGNATURE = (
    "void(uint8[::1], int64[::1], uint8[::1], int64[::1],"  # the exact form and its offsets, the FP8 form and its
    " int64, int64, int64, int64, boolean, int64, int64, int64)"
)


@device_function
def _place(group: Any, heads: Any, tokens: Any, k_dim: Any, v_dim: Any, by_head: Any) -> Any:
    """Of a group: first element in its layer, elements of a run, distance of runs, and vectors of all runs."""
    is_v = group >= heads
    head = group - heads if is_v else group
    dim = v_dim if is_v else k_dim
    part = tokens * heads * k_dim if is_v else 0
    begin = part + (head * tokens * dim if by_head else head * dim)
    stride = dim if by_head else heads * dim
    return begin, dim, stride, tokens * dim // VECTOR


@device_function
def _exponent(largest: Any) -> Any:
    """Exponent of the scale of a group with this largest finite magnitude (bits of a float32)."""
    up = 1 if (largest & 0x7FFFFF) > 0x600000 else 0
    exponent = max((largest >> 23) - 127 - 8 + up, MIN_SCALE_EXPONENT)
    return exponent if largest != 0 else 0


@device_function
def _power_of_two(exponent: Any) -> Any:
    return float_of((exponent + 127) << 23)


@device_function
def _largest_in_block(value: Any, scratch: Any, thread: Any, warps: Any) -> Any:
    """The maximum of all threads' unsigned integers, known to all of them."""
    for step in range(5):
        value = max(value, exchange_u32(value, 16 >> step))
    cuda.syncthreads()
    if thread % _FULL_WARP == 0:
        scratch[thread // _FULL_WARP] = value
    cuda.syncthreads()
    for warp in range(warps):
        value = max(value, scratch[warp])
    return value


@device_function
def _sum_in_block(value: Any, scratch: Any, thread: Any, warps: Any) -> Any:
    """The sum of all threads' float32, known to all of them."""
    for step in range(5):
        value = value + exchange_f32(value, 16 >> step)
    cuda.syncthreads()
    if thread % _FULL_WARP == 0:
        scratch[thread // _FULL_WARP] = bits_of(value)
    cuda.syncthreads()
    value = _ZERO
    for warp in range(warps):
        value = value + float_of(scratch[warp])
    return value


@device_function
def _error(value: Any, rounded: Any) -> Any:
    """Error and value of one element, both in units of the scale; nothing for NaN and Inf."""
    finite = abs(value) < _INF
    return (value - rounded) if finite else _ZERO, value if finite else _ZERO


@device_function
def _errors(y: Any, codes: Any) -> Any:
    """Squared errors, squares and the largest error of four elements."""
    words = f16_of_e4m3(codes)
    q, r = floats_of_f16(words[0]), floats_of_f16(words[1])
    a, b, c, d = _error(y[0], q[0]), _error(y[1], q[1]), _error(y[2], r[0]), _error(y[3], r[1])
    lost = a[0] * a[0] + b[0] * b[0] + c[0] * c[0] + d[0] * d[0]
    total = a[1] * a[1] + b[1] * b[1] + c[1] * c[1] + d[1] * d[1]
    return lost, total, max(abs(a[0]), abs(b[0]), abs(c[0]), abs(d[0]))


@device_function
def _times(values: Any, factor: Any) -> Any:
    return (values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor)


def _finder(kind: str) -> Any:
    width = WIDTH[kind]
    _, magnitude, _ = readers(kind)

    @device_function
    def find(exact, source, begin, dim, stride, vectors, scratch, what):  # type: ignore[no-untyped-def]
        """The largest magnitude of the group, known to all threads."""
        thread, threads, in_run = cuda.threadIdx.x, cuda.blockDim.x, dim // VECTOR
        down, right = threads // in_run, threads % in_run
        run, column, found = thread // in_run, thread % in_run, 0
        for _ in range(thread, vectors, threads):
            found = max(found, magnitude(exact, source + (begin + run * stride + column * VECTOR) * width, what))
            run, column = run + down, column + right
            if column >= in_run:
                run, column = run + 1, column - in_run
        return _largest_in_block(found, scratch, thread, (threads + _FULL_WARP - 1) // _FULL_WARP)

    return find


@device_function
def _record(encoded, place, groups, exponent, infinite, lost, total, worst, factor, largest):  # type: ignore[no-untyped-def]
    """Write the scale of a group and its two errors; each kind of figure lies behind that of all groups before it."""
    relative, share = _ZERO, _ZERO
    if infinite == 1:
        relative, share = _INF, _INF
    elif total > _ZERO:
        relative, share = np.float32(math.sqrt(lost / total)), worst / (float_of(largest) * factor)
    store_word(encoded, place, bits_of(_power_of_two(exponent)))
    store_word(encoded, place + 4 * groups, bits_of(relative))
    store_word(encoded, place + 8 * groups, bits_of(share))


def make_encode(kind: str) -> Callable[..., None]:
    """The body of the encoder of one kind of elements."""
    width, infinity = WIDTH[kind], INFINITY[kind]
    load, _, widened = readers(kind)
    find = _finder(kind)

    def encode(  # type: ignore[no-untyped-def]
        exact,
        exact_at,
        encoded,
        encoded_at,
        heads,
        tokens,
        k_dim,
        v_dim,
        by_head,
        layer_stride,
        encoded_stride,
        scales_at,
    ):
        groups = heads * 2 if v_dim > 0 else heads
        layer, group = cuda.blockIdx.x // groups, cuda.blockIdx.x % groups
        thread, threads = cuda.threadIdx.x, cuda.blockDim.x
        warps = (threads + _FULL_WARP - 1) // _FULL_WARP
        scratch = cuda.shared.array(WARPS_MAX, np.uint32)
        begin, dim, stride, vectors = _place(group, heads, tokens, k_dim, v_dim, by_head)
        source = exact_at[cuda.blockIdx.y] + layer * layer_stride
        target = encoded_at[cuda.blockIdx.y] + layer * encoded_stride
        most, infinite = find(exact, source, begin, dim, stride, vectors, scratch, ALL), 0
        if most >= infinity:
            most = find(exact, source, begin, dim, stride, vectors, scratch, FINITE)
            infinite = find(exact, source, begin, dim, stride, vectors, scratch, INFINITE)
        largest = widened(most)
        exponent = _exponent(largest)
        factor = _power_of_two(-exponent)

        lost, total, worst = _ZERO, _ZERO, _ZERO
        in_run = dim // VECTOR
        # Division once: then every step moves by the same number of runs and columns.
        down, right = threads // in_run, threads % in_run
        run, column = thread // in_run, thread % in_run
        for _ in range(thread, vectors, threads):
            at = begin + run * stride + column * VECTOR
            halves = load(exact, source + at * width)
            low, high = _times(halves[0], factor), _times(halves[1], factor)
            a = e4m3_word(low[0], low[1], low[2], low[3])
            b = e4m3_word(high[0], high[1], high[2], high[3])
            store_pair(encoded, target + at, a, b)
            first, second = _errors(low, a), _errors(high, b)
            lost, total = lost + (first[0] + second[0]), total + (first[1] + second[1])
            worst = max(worst, first[2], second[2])
            run, column = run + down, column + right
            if column >= in_run:
                run, column = run + 1, column - in_run
        lost = _sum_in_block(lost, scratch, thread, warps)
        total = _sum_in_block(total, scratch, thread, warps)
        worst = float_of(_largest_in_block(bits_of(worst), scratch, thread, warps))
        if thread == 0:
            _record(
                encoded, target + scales_at + 4 * group, groups, exponent, infinite, lost, total, worst, factor, largest
            )

    return encode


def make_decode(kind: str) -> Callable[..., None]:
    """The body of the decoder of one kind of elements."""
    width = WIDTH[kind]
    write = writer(kind)

    @device_function
    def values(codes: Any, scale: Any) -> Any:
        words = f16_of_e4m3(codes)
        a, b = floats_of_f16(words[0]), floats_of_f16(words[1])
        return (a[0] * scale, a[1] * scale, b[0] * scale, b[1] * scale)

    def decode(  # type: ignore[no-untyped-def]
        exact,
        exact_at,
        encoded,
        encoded_at,
        heads,
        tokens,
        k_dim,
        v_dim,
        by_head,
        layer_stride,
        encoded_stride,
        scales_at,
    ):
        groups = heads * 2 if v_dim > 0 else heads
        layer, group = cuda.blockIdx.x // groups, cuda.blockIdx.x % groups
        thread, threads = cuda.threadIdx.x, cuda.blockDim.x
        begin, dim, stride, vectors = _place(group, heads, tokens, k_dim, v_dim, by_head)
        target = exact_at[cuda.blockIdx.y] + layer * layer_stride
        source = encoded_at[cuda.blockIdx.y] + layer * encoded_stride
        scale = float_of(load_word(encoded, source + scales_at + 4 * group))
        in_run = dim // VECTOR
        down, right = threads // in_run, threads % in_run
        run, column = thread // in_run, thread % in_run
        for _ in range(thread, vectors, threads):
            at = begin + run * stride + column * VECTOR
            codes = load_pair(encoded, source + at)
            write(exact, target + at * width, (values(codes[0], scale), values(codes[1], scale)), codes)
            run, column = run + down, column + right
            if column >= in_run:
                run, column = run + 1, column - in_run

    return decode


_REGISTERS = {
    "encode": ({"sm_80": 96, "*": 80}, "6 thread blocks of 128 on a multiprocessor (5 where e4m3 is done by hand)"),
    "decode": ({"*": 64}, "8 thread blocks of 128 on a multiprocessor, enough to keep memory busy"),
}


def _registered(name: str, make: Callable[[str], Callable[..., None]], kind: str) -> Kernel:
    bounds, reason = _REGISTERS[name]
    return register(
        Kernel(
            name=f"{name}_{kind}",
            function=make(kind),
            signature=_SIGNATURE,
            threads=THREADS,
            registers=bounds,
            reason=reason,
            canonical=kind == "bf16",
        )
    )


ENCODERS = {kind: _registered("encode", make_encode, kind) for kind in KINDS}
DECODERS = {kind: _registered("decode", make_decode, kind) for kind in KINDS}


def supports(geometry: Geometry) -> bool:
    """Whether these kernels take blocks of a geometry; the others go through the host's."""
    return encodable(geometry) and geometry.k_dim % VECTOR == 0 and geometry.v_dim % VECTOR == 0


def launch(
    kernels: dict[str, Kernel],
    geometry: Geometry,
    exact: Any,
    exact_at: Any,
    encoded: Any,
    encoded_at: Any,
    *,
    stream: Any = 0,
    threads: int = THREADS,
) -> None:
    """Encode (`ENCODERS`) or decode (`DECODERS`) blocks in device memory.

    `exact` and `encoded` are uint8 arrays, `exact_at` and `encoded_at` int64 [blocks]: the byte in them at which each
    block's slot begins, multiples of 4 KiB. Padding is left as it is. ValueError for a geometry that `supports`
    refuses.
    """
    if not supports(geometry):
        raise ValueError(f"K and V dims are {geometry.k_dim} and {geometry.v_dim}; multiples of {VECTOR} are wanted")
    layout, shape = EncodedLayout(geometry), geometry
    strides = (shape.layer_stride, layout.layer_stride, layout.scales_offset)
    dims = (shape.kv_heads, shape.block_size, shape.k_dim, shape.v_dim, shape.layout == "hnd")
    grid = (shape.layers * layout.groups, len(exact_at))
    arguments = (exact, exact_at, encoded, encoded_at, *dims, *strides)
    kernels[shape.dtype].launch(grid, *arguments, threads=threads, stream=stream)
