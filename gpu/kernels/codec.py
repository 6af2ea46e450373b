"""FP8 on CUDA: blocks in slot form to codes, scales and errors, and back (`kvtierd.core.stored_form`).

    two launches: keys that the form rotates (`codec_keys`); all other groups
    grid (layers x groups, blocks); a thread block does one group of one layer of one block

        pass 1   largest magnitude: integers, 16 bytes a thread and step
                 -> exponent of the scale, by all threads alike
        pass 2   the same bytes again (from L2): codes, 8 a thread and step, and errors

The bytes are those of the CPU's kernels; only the sums of squares are added in another order. Dims are multiples of 8:
other blocks take the way through the host. Arithmetic is IEEE (no fastmath): the scale and NaN depend on it.

Keys are rotated in both passes, in the registers of one thread, n numbers of a vector at a time: so they are read
element by element, and nothing but the form is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import EncodedLayout, encodable, rotation
from kvtierd.gpu.kernels.codec_elements import INFINITY, VECTOR, readers
from kvtierd.gpu.kernels.codec_keys import key_decoder, key_encoder
from kvtierd.gpu.kernels.codec_vectors import vector_decoder, vector_encoder
from kvtierd.gpu.kernels.primitives import (
    bits_of,
    device_function,
    exchange_f32,
    exchange_u32,
    float_of,
    load_word,
    store_word,
)
from kvtierd.gpu.kernels.registry import Kernel, register

KINDS = ("bf16", "fp16", "fp32")
THREADS = 128
WARPS_MAX = 8
"""Room for the sums of this many warps."""
MIN_SCALE_EXPONENT = -100

_ZERO, _INF = np.float32(0), np.float32(np.inf)
_FULL_WARP = 32

_SIGNATURE = (
    "void(uint8[::1], int64[::1], uint8[::1], int64[::1],"  # the exact form and its offsets, the FP8 form and its
    " int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64, int64)"
)


@device_function
def _place(group: Any, heads: Any, tokens: Any, k_dim: Any, v_dim: Any, by_head: Any) -> Any:
    """Of a group: first element in its layer, elements of a run, distance of runs, and how many there are."""
    is_v = group >= heads
    head = group - heads if is_v else group
    dim = v_dim if is_v else k_dim
    part = tokens * heads * k_dim if is_v else 0
    begin = part + (head * tokens * dim if by_head else head * dim)
    stride = dim if by_head else heads * dim
    return begin, dim, stride, tokens


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


def make_encode(kind: str, *, keys: bool) -> Callable[..., None]:
    """The body of the encoder of one kind of elements, of rotated keys or of all that is not rotated."""
    find, encode_all = key_encoder(kind) if keys else vector_encoder(kind)
    infinity = INFINITY["bf16" if keys else kind]
    _, _, widened = readers("bf16" if keys else kind)

    def encode(  # type: ignore[no-untyped-def]
        exact,
        exact_at,
        encoded,
        encoded_at,
        first,
        count,
        heads,
        tokens,
        k_dim,
        v_dim,
        n,
        by_head,
        layer_stride,
        encoded_stride,
        scales_at,
    ):
        layer, group = cuda.blockIdx.x // count, first + cuda.blockIdx.x % count
        thread, threads = cuda.threadIdx.x, cuda.blockDim.x
        warps = (threads + _FULL_WARP - 1) // _FULL_WARP
        scratch = cuda.shared.array(WARPS_MAX, np.uint32)
        place = _place(group, heads, tokens, k_dim, v_dim, by_head)
        source = exact_at[cuda.blockIdx.y] + layer * layer_stride
        target = encoded_at[cuda.blockIdx.y] + layer * encoded_stride
        most, infinite = infinity, -1
        # Where there is an Inf, again for what is less. A loop, so that the code of the pass is there once.
        while most == infinity:
            infinite += 1
            found = find(exact, source, place, n, infinity - infinite)
            most = _largest_in_block(found, scratch, thread, warps)
        largest = widened(most)
        exponent = _exponent(largest)
        factor = _power_of_two(-exponent)
        lost, total, worst = encode_all(exact, source, encoded, target, place, n, factor)
        lost = _sum_in_block(lost, scratch, thread, warps)
        total = _sum_in_block(total, scratch, thread, warps)
        worst = float_of(_largest_in_block(bits_of(worst), scratch, thread, warps))
        if thread == 0:
            groups = heads * 2 if v_dim > 0 else heads
            _record(
                encoded, target + scales_at + 4 * group, groups, exponent, infinite, lost, total, worst, factor, largest
            )

    return encode


def make_decode(kind: str, *, keys: bool) -> Callable[..., None]:
    """The body of the decoder of one kind of elements, of rotated keys or of all that is not rotated."""
    decode_all = key_decoder(kind) if keys else vector_decoder(kind)

    def decode(  # type: ignore[no-untyped-def]
        exact,
        exact_at,
        encoded,
        encoded_at,
        first,
        count,
        heads,
        tokens,
        k_dim,
        v_dim,
        n,
        by_head,
        layer_stride,
        encoded_stride,
        scales_at,
    ):
        layer, group = cuda.blockIdx.x // count, first + cuda.blockIdx.x % count
        place = _place(group, heads, tokens, k_dim, v_dim, by_head)
        target = exact_at[cuda.blockIdx.y] + layer * layer_stride
        source = encoded_at[cuda.blockIdx.y] + layer * encoded_stride
        scale = float_of(load_word(encoded, source + scales_at + 4 * group))
        decode_all(exact, target, encoded, source, place, n, scale)

    return decode


# Of encode, the compiler is promised 5 thread blocks: without, it takes one register too many for them on sm_80.
_REGISTERS = {
    "encode": ({"sm_80": 96, "*": 80}, "6 thread blocks of 128 on a multiprocessor (5 where e4m3 is done by hand)"),
    "encode_keys": (
        {"sm_80": 112, "*": 96},
        "as encode, less a thread block: a thread has 16 numbers and 16 loads",
    ),
    "decode": ({"*": 64}, "8 thread blocks of 128 on a multiprocessor, enough to keep memory busy"),
    "decode_keys": ({"*": 64}, "as decode"),
}


class Pair(NamedTuple):
    """The kernels of one direction and one kind of elements: for rotated keys, and for what is not rotated."""

    keys: Kernel
    others: Kernel


def _registered(name: str, make: Callable[..., Callable[..., None]], kind: str, *, keys: bool) -> Kernel:
    named = f"{name}_keys" if keys else name
    bounds, reason = _REGISTERS[named]
    return register(
        Kernel(
            name=f"{named}_{kind}",
            function=make(kind, keys=keys),
            signature=_SIGNATURE,
            threads=THREADS,
            registers=bounds,
            reason=reason,
            canonical=kind == "bf16",
            blocks_per_multiprocessor=5 if named == "encode" else None,
        )
    )


def _pairs(name: str, make: Callable[..., Callable[..., None]]) -> dict[str, Pair]:
    return {
        kind: Pair(_registered(name, make, kind, keys=True), _registered(name, make, kind, keys=False))
        for kind in KINDS
    }


ENCODERS = _pairs("encode", make_encode)
DECODERS = _pairs("decode", make_decode)


def supports(geometry: Geometry) -> bool:
    """Whether these kernels take blocks of a geometry; the others go through the host's."""
    return encodable(geometry) and geometry.k_dim % VECTOR == 0 and geometry.v_dim % VECTOR == 0


def launch(
    kernels: dict[str, Pair],
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
    layout, shape, n = EncodedLayout(geometry), geometry, rotation(geometry)
    strides = (shape.layer_stride, layout.layer_stride, layout.scales_offset)
    dims = (shape.kv_heads, shape.block_size, shape.k_dim, shape.v_dim, n, shape.layout == "hnd")
    of_keys = shape.kv_heads if n > 1 else 0
    for kernel, first, count in zip(
        kernels[shape.dtype], (0, of_keys), (of_keys, layout.groups - of_keys), strict=True
    ):
        if count:
            arguments = (exact, exact_at, encoded, encoded_at, first, count, *dims, *strides)
            kernel.launch((shape.layers * count, len(exact_at)), *arguments, threads=threads, stream=stream)
