"""FP8 on the CPU: layers of a block to codes, scales and errors.

A layer has one or two parts (K, V). A part is `groups` groups (heads) of `runs` runs of `length` neighbouring elements
each; strides are in elements. With layout nhd a run is one token's vector, with hnd a group is one run. Elements are
given as unsigned integers of their size, codes have the strides of the elements. Kernels run on one thread without the
GIL: whoever calls them shares out the layers. `kvtierd.core.stored_form` defines rotation, scales and errors. Keys of a
layer are rotated into memory that the second-level cache holds, and encoded from there; where the processor rounds to
bf16 by itself, their largest magnitudes are found on the way (`rotate_quickly`).

A part is read twice, first for the largest magnitudes; the second time it lies in the processor's cache. Both times in
the order of memory, run by run of all groups: head by head, the processor's prefetching would see only short pieces.
What comes next is asked for meanwhile, so that the memory is not idle while this part is worked on.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from kvtierd.gpu.host_kernels.codec_form import F4, FORM, LAYERS, PART, U1, U2, U4
from kvtierd.gpu.host_kernels.codec_keys import lane_memory, rotate, rotate_quickly, row_of, words
from kvtierd.gpu.host_kernels.codec_vectors import (
    LANES,
    LARGEST,
    LOST,
    TOTAL,
    WORST,
    encode_bf16_run,
    encode_fp16_run,
    encode_fp32_run,
    largest_of_16_bits,
    largest_of_32_bits,
)
from kvtierd.gpu.host_kernels.codec_words import AT_ONCE, ERRORS_BY_LOW_BITS, encode_bf16_words
from kvtierd.gpu.host_kernels.e4m3 import (
    BF16,
    FP16,
    FP32,
    MAX,
    bits_of,
    clamped,
    code_of,
    float_of,
    power_of_two,
    scale_exponent,
    steps_of,
    sum_of,
    widen,
)
from kvtierd.gpu.host_kernels.rotation_quick import QUICK, QUICK_LANES
from kvtierd.index.jit import Word, compiled, helper

CHOOSE = -1000
"""Given instead of a scale's exponent: take the group's own."""

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
_AHEAD_BYTES = 384 << 10
"""A part of up to this size leaves room in the second-level cache (1 MiB and more) for the next one."""
_LINE_BYTES = 64
_CERTAIN = np.float32(2.0**-60)
"""With a largest error (over a largest magnitude of 2^-40 and more) from here on denormals are of no account."""


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
                largest_of_32_bits(source, at, at + length, row_of(lanes, group))
                rest = _whole(at, at + length, LANES)
            else:
                largest_of_16_bits(source, at, at + length, row_of(lanes, group))
                rest = _whole(at, at + length, 2 * LANES)
            for i in range(rest, at + length):
                largest[group] = max(largest[group], np.uint32(source[i]) & mask)


@helper
def _largest_of_lanes(kind, groups, lanes, largest):  # type: ignore[no-untyped-def]
    """The largest magnitude of each group, with what the lanes have found."""
    mask, _ = _masks(kind)
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
def _encode_slowly(kind, source, codes, begin, end, factor, lanes, group):  # type: ignore[no-untyped-def]
    """Element by element, whatever they are: tails of runs, groups with NaN or Inf, scales that saturate.

    Errors are in units of the scale.
    """
    lost, total, worst = float_of(lanes[group, LOST]), float_of(lanes[group, TOTAL]), lanes[group, WORST]
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
    lanes[group, LOST], lanes[group, TOTAL], lanes[group, WORST] = bits_of(lost), bits_of(total), worst


@helper
def _sums(lanes, group, way):  # type: ignore[no-untyped-def]
    """Squared errors, squares and the largest error of a group, all in units of its scale or of its elements."""
    lost, total, worst = _ZERO, _ZERO, np.uint32(0)
    for lane in range(LANES):
        lost = lost + float_of(lanes[group, LOST + lane])
        total = total + float_of(lanes[group, TOTAL + lane])
        bits = lanes[group, WORST + lane]
        if way == _UNSCALED:  # two of bf16
            bits = max(np.uint32(bits & np.uint32(0xFFFF0000)), np.uint32(bits << np.uint32(16)))
        worst = max(worst, bits)
    return lost, total, float_of(worst)


@helper
def _encode_quickly(kind: Word, source: Word, codes: Word, begin: Word, end: Word, factor: Word, home: Word) -> None:
    """Whole vectors of values that are finite and, times the factor, at most 448."""
    if kind == BF16:
        encode_bf16_run(source, codes, begin, end, factor, home)
    elif kind == FP16:
        encode_fp16_run(source, codes, begin, end, factor, home)
    else:
        encode_fp32_run(source, codes, begin, end, factor, home)


@helper
def _way(kind, size, scale, factor, length):  # type: ignore[no-untyped-def]
    """How to encode a group whose largest magnitude is finite and this."""
    if size * factor > _MAX:
        return _SLOWLY
    square = _SQUARES_FROM <= size <= _SQUARES_TO and scale <= _SQUARES_TO
    return _UNSCALED if kind == BF16 and square and length % AT_ONCE == 0 else _SCALED


@helper
def _relative(lanes, group, way, largest, has_infinity):  # type: ignore[no-untyped-def]
    """Relative L2 and largest error of a group from its sums; `largest` is in their units."""
    lost, total, worst = _sums(lanes, group, way)
    if has_infinity:
        return np.float32(np.inf), np.float32(np.inf)
    if total == _ZERO:
        return _ZERO, _ZERO
    return np.float32(math.sqrt(lost / total)), worst / largest


@helper
def _encode(  # type: ignore[no-untyped-def]
    kind,
    source,
    codes,
    scales,
    relative_l2,
    largest_error,
    groups,
    runs,
    length,
    group_stride,
    run_stride,
    given,
    ahead,
    past,
    lanes,
    searched,
):
    """Encode a part; the lanes hold the largest magnitudes where they are `searched`, and else zeros.

    Returns whether it is certain that denormals among the elements, had they been zeros, would have changed no byte.
    """
    _, infinity = _masks(kind)
    largest = np.zeros(groups, np.uint32)
    factors = np.empty(groups, np.float32)
    ways, has_infinity = np.zeros(groups, np.uint8), np.zeros(groups, np.bool_)
    lines = codes.ctypes.data % _LINE_BYTES + length % _LINE_BYTES + group_stride % _LINE_BYTES
    stream = past and lines + run_stride % _LINE_BYTES == 0
    if not searched:
        _find_largest(kind, source, groups, runs, length, group_stride, run_stride, lanes, largest)
    _largest_of_lanes(kind, groups, lanes, largest)
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
                home = row_of(lanes, group)
                encode_bf16_words(source, codes, at, end, smallest, home, ERRORS_BY_LOW_BITS, ahead, stream)
                at = end
            elif ways[group] != _SLOWLY:
                _encode_quickly(kind, source, codes, at, end, factors[group], row_of(lanes, group))
                at = _whole(at, end, LANES)
            if at < end:
                _encode_slowly(kind, source, codes, at, end, factors[group], lanes, group)
    certain = True
    for group in range(groups):
        unit = np.float32(1) if ways[group] == _UNSCALED else factors[group]
        errors = _relative(lanes, group, ways[group], widen(kind, largest[group]) * unit, has_infinity[group])
        relative_l2[group], largest_error[group] = errors
        certain = certain and ways[group] == _UNSCALED and errors[1] >= _CERTAIN
    return certain


@helper
def _encode_layers(kind, source, target, floats, first, end, form, k, v, given, past):  # type: ignore[no-untyped-def]
    keys = words(k.count if k.rotation > 1 else 0)
    lanes = lane_memory(max(k.groups, v.groups))
    for layer in range(first, end):
        begin, code_begin = layer * form.element_stride, layer * form.code_stride
        scales = code_begin // 4 + form.scales
        target[code_begin + form.codes : 4 * scales] = 0
        target[4 * (scales + 3 * form.groups) : code_begin + form.code_stride] = 0
        for part in (k, v):
            after = begin + v.begin if part.begin < v.begin else begin + form.element_stride
            here = begin + part.begin
            near = after - here if part.count * source.itemsize <= _AHEAD_BYTES else 0
            columns = scales + part.first_group
            lanes[:] = 0
            if part.rotation > 1:
                ahead = (source.ctypes.data - keys.ctypes.data) // 2 + after if kind == BF16 and near > 0 else 0
                quick = QUICK and kind == BF16 and part.dim % (16 * QUICK_LANES) == 0 and given == CHOOSE
                certain = False
                while not certain:
                    if kind == BF16 and quick:
                        rotate_quickly(source, here, keys, part, lanes)
                    else:
                        rotate(kind, source, here, keys, part)
                    certain = _encode(
                        BF16,
                        keys,
                        target[code_begin + part.begin : code_begin + part.begin + part.count],
                        floats[columns : columns + part.groups],
                        floats[columns + form.groups : columns + form.groups + part.groups],
                        floats[columns + 2 * form.groups : columns + 2 * form.groups + part.groups],
                        part.groups, part.runs, part.length, part.group_stride, part.run_stride, given, ahead,
                        past, lanes, quick,
                    )  # fmt: skip
                    # Once more, and exactly, where there are NaN and Inf, or where a denormal may count.
                    certain = certain or not quick
                    quick = False
                    lanes[:] = 0
            elif part.count > 0:
                _encode(
                    kind,
                    source[here : here + part.count],
                    target[code_begin + part.begin : code_begin + part.begin + part.count],
                    floats[columns : columns + part.groups],
                    floats[columns + form.groups : columns + form.groups + part.groups],
                    floats[columns + 2 * form.groups : columns + 2 * form.groups + part.groups],
                    part.groups, part.runs, part.length, part.group_stride, part.run_stride, given, near,
                    past, lanes, False,  # noqa: FBT003 - compiled code knows no keywords here
                )  # fmt: skip


@compiled(types.void(U2, U1, F4, *LAYERS, FORM, PART, PART, types.int64, types.boolean))
def encode_bf16(source, target, floats, first, end, form, k, v, given, past):  # type: ignore[no-untyped-def]
    """Encode layers first..end of a block of bf16; `floats` is the target as float32.

    `given` is the exponent of the scale of every group, or CHOOSE. `past`: codes may be written past the caches. A
    latent form has a V of no elements.
    """
    _encode_layers(BF16, source, target, floats, first, end, form, k, v, given, past)


@compiled(types.void(U2, U1, F4, *LAYERS, FORM, PART, PART, types.int64, types.boolean))
def encode_fp16(source, target, floats, first, end, form, k, v, given, past):  # type: ignore[no-untyped-def]
    """Encode layers of a block of fp16."""
    _encode_layers(FP16, source, target, floats, first, end, form, k, v, given, past)


@compiled(types.void(U4, U1, F4, *LAYERS, FORM, PART, PART, types.int64, types.boolean))
def encode_fp32(source, target, floats, first, end, form, k, v, given, past):  # type: ignore[no-untyped-def]
    """Encode layers of a block of fp32."""
    _encode_layers(FP32, source, target, floats, first, end, form, k, v, given, past)
