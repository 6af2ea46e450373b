"""FP8 on the CPU: a part of a layer (K or V) to codes, scales and errors, and back.

A part is `groups` groups (heads) of `runs` runs of `length` neighbouring elements each; strides are in elements. With
layout nhd a run is one token's vector, with hnd a group is one run. Elements are given as unsigned integers of their
size, codes have the strides of the elements. Kernels run on one thread without the GIL: whoever calls them shares out
the layers. `kvtierd.gpu.codec_layout` defines scales and errors.

A part is read twice, first for the largest magnitudes; the second time it lies in the processor's cache. Both times in
the order of memory, run by run of all groups: head by head, the processor's prefetching would see only short pieces.
"""

from __future__ import annotations

import math

import numpy as np

from kvtierd.gpu.host_kernels.codec_vectors import (
    LANE_WORDS,
    LANES,
    LARGEST,
    LOST,
    TABLE_LOOKUPS,
    TOTAL,
    WORST,
    decode_run,
    encode_bf16_run,
    encode_bf16_words,
    encode_fp16_run,
    encode_fp32_run,
    largest_of_16_bits,
    largest_of_32_bits,
)
from kvtierd.gpu.host_kernels.e4m3 import (
    BF16,
    FP16,
    FP32,
    MAX,
    NAN_CODE,
    bits_of,
    clamped,
    code_of,
    e4m3_values,
    float_of,
    nan_of,
    narrow,
    power_of_two,
    scale_exponent,
    steps_of,
    sum_of,
    widen,
)
from kvtierd.index.jit import Word, compiled, helper

CHOOSE = -1000
"""Given instead of a scale's exponent: take the group's own."""

_VALUES = e4m3_values()
_MAX = np.float32(MAX)
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_ZERO = np.float32(0)
_SMALLEST = np.float32(2.0**-6)
"""The smallest normal number of e4m3."""
_SLOWLY, _SCALED, _UNSCALED = 0, 1, 2
"""How a group is encoded: element by element, in vectors of float32, or in vectors of bf16 as they are."""
_SQUARES_FROM, _SQUARES_TO = np.float32(2.0**-40), np.float32(2.0**40)
"""Largest magnitudes between which sums of squares need no scale to stay within float32."""
_OUT = "uint8[::1], float32[::1], float32[::1], float32[::1]"
_SHAPE = "int64, int64, int64, int64, int64"


@helper
def _masks(kind: Word) -> Word:
    """Of the element's own bits: the mask of the magnitude, and the magnitude of Inf."""
    if kind == BF16:
        return np.uint32(0x7FFF), np.uint32(0x7F80)
    if kind == FP16:
        return np.uint32(0x7FFF), np.uint32(0x7C00)
    return _MAGNITUDE, _INFINITY


@helper
def _whole(begin: Word, end: Word, lanes: Word) -> Word:
    """Where the last whole vector of begin..end ends."""
    return begin + (end - begin) // lanes * lanes


@helper
def _find_largest(kind, source, groups, runs, length, group_stride, run_stride, lanes, largest):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude of each group, NaN and Inf among them: their order is that of the integers."""
    mask, _ = _masks(kind)
    for run in range(runs):
        for group in range(groups):
            at = group * group_stride + run * run_stride
            if kind == FP32:
                largest_of_32_bits(source, at, at + length, lanes[group])
                rest = _whole(at, at + length, LANES)
            else:
                largest_of_16_bits(source, at, at + length, lanes[group])
                rest = _whole(at, at + length, 2 * LANES)
            for i in range(rest, at + length):
                largest[group] = max(largest[group], np.uint32(source[i]) & mask)
    for group in range(groups):
        for lane in range(LARGEST, LARGEST + LANES):
            bits = lanes[group, lane]
            found = bits if kind == FP32 else max(bits & mask, bits >> np.uint32(16))
            largest[group] = max(largest[group], found)


@helper
def _largest_finite(kind: Word, source: Word, begin: Word, runs: Word, length: Word, stride: Word) -> Word:
    """Bits of the largest finite magnitude, and whether there is an Inf; for the rare group that has NaN or Inf."""
    mask, infinity = _masks(kind)
    most, has_infinity = np.uint32(0), False
    for run in range(runs):
        for i in range(begin + run * stride, begin + run * stride + length):
            size = np.uint32(source[i]) & mask
            if size < infinity:
                most = max(most, size)
            has_infinity = has_infinity or size == infinity
    return most, has_infinity


@helper
def _encode_slowly(kind, source, codes, begin, end, factor, lanes):  # type: ignore[no-untyped-def]
    """Element by element, whatever they are: tails of runs, groups with NaN or Inf, scales that saturate.

    Errors are in units of the scale.
    """
    lost, total, worst = float_of(lanes[LOST]), float_of(lanes[TOTAL]), lanes[WORST]
    for i in range(begin, end):
        bits = bits_of(widen(kind, source[i]) * factor)
        magnitude = clamped(bits & _MAGNITUDE)
        steps = steps_of(magnitude)
        rounded = sum_of(magnitude, steps)
        codes[i] = np.uint8(code_of(bits, rounded, steps))
        if bits & _MAGNITUDE < _INFINITY:
            size = float_of(bits & _MAGNITUDE)
            error = size - (float_of(rounded) - float_of(steps))
            lost, total = lost + error * error, total + size * size
            worst = max(worst, bits_of(error) & _MAGNITUDE)
    lanes[LOST], lanes[TOTAL], lanes[WORST] = bits_of(lost), bits_of(total), worst


@helper
def _sums(lanes):  # type: ignore[no-untyped-def]
    """Squared errors, squares and the largest error of a group, all in units of its scale."""
    lost, total, worst = _ZERO, _ZERO, np.uint32(0)
    for lane in range(LANES):
        lost, total = lost + float_of(lanes[LOST + lane]), total + float_of(lanes[TOTAL + lane])
        worst = max(worst, lanes[WORST + lane])
    return lost, total, float_of(worst)


@helper
def _encode_quickly(kind: Word, source: Word, codes: Word, begin: Word, end: Word, factor: Word, lanes: Word) -> None:
    """Whole vectors of values that are finite and, times the factor, at most 448."""
    if kind == BF16:
        encode_bf16_run(source, codes, begin, end, factor, lanes)
    elif kind == FP16:
        encode_fp16_run(source, codes, begin, end, factor, lanes)
    else:
        encode_fp32_run(source, codes, begin, end, factor, lanes)


@helper
def _way(kind, size, scale, factor, length):  # type: ignore[no-untyped-def]
    """How to encode a group whose largest magnitude is finite and this."""
    if size * factor > _MAX:
        return _SLOWLY
    square = _SQUARES_FROM <= size <= _SQUARES_TO and scale <= _SQUARES_TO
    return _UNSCALED if kind == BF16 and square and length % (2 * LANES) == 0 else _SCALED


@helper
def _relative(lanes, largest, has_infinity):  # type: ignore[no-untyped-def]
    """Relative L2 and largest error of a group from its sums; `largest` is in their units."""
    lost, total, worst = _sums(lanes)
    if has_infinity:
        return np.float32(np.inf), np.float32(np.inf)
    if total == _ZERO:
        return _ZERO, _ZERO
    return np.float32(math.sqrt(lost / total)), worst / largest


@helper
def _encode(  # type: ignore[no-untyped-def]
    kind, source, codes, scales, relative_l2, largest_error, groups, runs, length, group_stride, run_stride, given
):
    _, infinity = _masks(kind)
    lanes = np.zeros((groups, LANE_WORDS), np.uint32)
    largest = np.zeros(groups, np.uint32)
    factors = np.empty(groups, np.float32)
    ways, has_infinity = np.zeros(groups, np.uint8), np.zeros(groups, np.bool_)
    _find_largest(kind, source, groups, runs, length, group_stride, run_stride, lanes, largest)
    for group in range(groups):
        finite = largest[group] < infinity
        if not finite:
            found = _largest_finite(kind, source, group * group_stride, runs, length, run_stride)
            largest[group], has_infinity[group] = found
        exponent = scale_exponent(widen(kind, largest[group])) if given == CHOOSE else given
        scales[group], factors[group] = power_of_two(exponent), power_of_two(-exponent)
        if finite:
            ways[group] = _way(kind, widen(kind, largest[group]), scales[group], factors[group], length)
    for run in range(runs):
        for group in range(groups):
            at = group * group_stride + run * run_stride
            end = at + length
            if kind == BF16 and ways[group] == _UNSCALED:
                smallest = np.uint16(bits_of(_SMALLEST * scales[group]) >> np.uint32(16))
                encode_bf16_words(source, codes, at, end, smallest, lanes[group])
                at = end
            elif ways[group] != _SLOWLY:
                _encode_quickly(kind, source, codes, at, end, factors[group], lanes[group])
                at = _whole(at, end, LANES)
            if at < end:
                _encode_slowly(kind, source, codes, at, end, factors[group], lanes[group])
    for group in range(groups):
        unit = np.float32(1) if ways[group] == _UNSCALED else factors[group]
        errors = _relative(lanes[group], widen(kind, largest[group]) * unit, has_infinity[group])
        relative_l2[group], largest_error[group] = errors


@compiled(f"void(uint16[::1], {_OUT}, {_SHAPE}, int64)")
def encode_bf16(source, codes, scales, l2, most, groups, runs, length, group_stride, run_stride, given):  # type: ignore[no-untyped-def]
    """Encode a part of bf16; `given` is the exponent of the scale of every group, or CHOOSE."""
    _encode(BF16, source, codes, scales, l2, most, groups, runs, length, group_stride, run_stride, given)


@compiled(f"void(uint16[::1], {_OUT}, {_SHAPE}, int64)")
def encode_fp16(source, codes, scales, l2, most, groups, runs, length, group_stride, run_stride, given):  # type: ignore[no-untyped-def]
    """Encode a part of fp16."""
    _encode(FP16, source, codes, scales, l2, most, groups, runs, length, group_stride, run_stride, given)


@compiled(f"void(uint32[::1], {_OUT}, {_SHAPE}, int64)")
def encode_fp32(source, codes, scales, l2, most, groups, runs, length, group_stride, run_stride, given):  # type: ignore[no-untyped-def]
    """Encode a part of fp32."""
    _encode(FP32, source, codes, scales, l2, most, groups, runs, length, group_stride, run_stride, given)


@helper
def _decode(kind, codes, target, scales, groups, runs, length, group_stride, run_stride, tables):  # type: ignore[no-untyped-def]
    """All 256 results of each group are computed first: then NaN, rounding and saturation cost nothing an element."""
    for group in range(groups):
        for code in range(256):
            is_nan = code & NAN_CODE == NAN_CODE
            tables[group, code] = nan_of(kind, code) if is_nan else narrow(kind, _VALUES[code] * scales[group])
    for run in range(runs):
        for group in range(groups):
            at = group * group_stride + run * run_stride
            end = at + length
            if TABLE_LOOKUPS and kind != FP32:
                decode_run(codes, target, tables[group], at, end, kind == FP16)
                at = _whole(at, end, 2 * LANES)
            for i in range(at, end):
                target[i] = tables[group, codes[i]]


@compiled(f"void(uint8[::1], uint16[::1], float32[::1], {_SHAPE})")
def decode_bf16(codes, target, scales, groups, runs, length, group_stride, run_stride):  # type: ignore[no-untyped-def]
    """Decode a part to bf16."""
    tables = np.empty((groups, 256), np.uint16)
    _decode(BF16, codes, target, scales, groups, runs, length, group_stride, run_stride, tables)


@compiled(f"void(uint8[::1], uint16[::1], float32[::1], {_SHAPE})")
def decode_fp16(codes, target, scales, groups, runs, length, group_stride, run_stride):  # type: ignore[no-untyped-def]
    """Decode a part to fp16."""
    tables = np.empty((groups, 256), np.uint16)
    _decode(FP16, codes, target, scales, groups, runs, length, group_stride, run_stride, tables)


@compiled(f"void(uint8[::1], uint32[::1], float32[::1], {_SHAPE})")
def decode_fp32(codes, target, scales, groups, runs, length, group_stride, run_stride):  # type: ignore[no-untyped-def]
    """Decode a part to fp32."""
    tables = np.empty((groups, 256), np.uint32)
    _decode(FP32, codes, target, scales, groups, runs, length, group_stride, run_stride, tables)
