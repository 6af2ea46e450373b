"""One element between float32, the 16-bit formats and e4m3, as helpers that vectorise.

Rounding to e4m3 adds a power of two so large that the sum's last bit is the code's last bit: the processor's own
rounding (to nearest even) then does the work, for the code's normal and denormal numbers alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _numba_intrinsic

from kvtierd.index.jit import Word, helper

BF16, FP16, FP32 = 0, 1, 2
"""Kinds of elements, as compiled functions know them; constants where they are called, so that branches fold."""

MAX = 448.0
NAN_CODE = 0x7F
MIN_SCALE_EXPONENT = -100
"""Below it the reciprocal of a scale and the smallest code times a scale would come near float32's own limits."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_EXPONENT = np.uint32(0x7F800000)
_MAX_BITS = np.uint32(np.float32(MAX).view(np.uint32))
_SMALLEST_NORMAL = np.uint32(121 << 23)
"""2^-6 as float32: below it the steps of e4m3 stay as they are."""
_STEPS = np.uint32(20 << 23)
"""The sum's last bit is 2^-3 of the number's leading one when the addend is 2^20 of it: float32 has 23 bits."""
_CODE_OFFSET = np.uint32(1128)  # 8 x 141: the exponent that 2^-6 times 2^20 has in float32


def e4m3_values() -> npt.NDArray[np.float32]:
    """What each of the 256 codes stands for, float32 [256]."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(codes & 0x7F) == NAN_CODE] = np.nan
    return np.where(codes & 0x80, -size, size).astype(np.float32)


def _cast(result: Any, kind: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic of one argument, cast to `kind`, that is a few LLVM instructions."""

    def typed(_typing: Any, value: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return convert(builder, args[0])

        del value
        return result(kind), generate

    return _numba_intrinsic(typed)


_F32, _F16, _I16, _I32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)

float_of = _cast(types.float32, types.uint32, lambda builder, value: builder.bitcast(value, _F32))
"""`float_of(uint32) -> float32` with these bits."""
bits_of = _cast(types.uint32, types.float32, lambda builder, value: builder.bitcast(value, _I32))
"""`bits_of(float32) -> uint32`."""
float_of_half = _cast(
    types.float32, types.uint16, lambda builder, value: builder.fpext(builder.bitcast(value, _F16), _F32)
)
"""`float_of_half(uint16) -> float32`: the value of a half float with these bits."""
half_of = _cast(types.uint16, types.float32, lambda builder, value: builder.bitcast(builder.fptrunc(value, _F16), _I16))
"""`half_of(float32) -> uint16`: the nearest half float, ties to even."""


@helper
def widen(kind: Word, bits: Word) -> Word:
    """float32 of an element's bits."""
    if kind == BF16:
        return float_of(np.uint32(bits) << np.uint32(16))
    if kind == FP16:
        return float_of_half(np.uint16(bits))
    return float_of(np.uint32(bits))


@helper
def narrow(kind: Word, value: Word) -> Word:
    """Bits of the nearest element to a value that is no NaN, as uint32; beyond the range the largest finite one."""
    bits = bits_of(value)
    sign, magnitude = bits & ~_MAGNITUDE, bits & _MAGNITUDE
    if kind == BF16:
        rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return sign >> np.uint32(16) | min(rounded, np.uint32(0x7F7F))
    if kind == FP16:
        half = np.uint32(half_of(float_of(magnitude)))
        return sign >> np.uint32(16) | min(half, np.uint32(0x7BFF))
    return sign | min(magnitude, np.uint32(0x7F7FFFFF))


@helper
def nan_of(kind: Word, code: Word) -> Word:
    """The NaN that torch makes of a NaN code: without its sign in bf16, with it otherwise."""
    sign = np.uint32(code & 0x80)
    if kind == BF16:
        return np.uint32(0x7FC0)
    if kind == FP16:
        return np.uint32(0x7F80) | sign << np.uint32(8)
    return np.uint32(0x7FF00000) | sign << np.uint32(24)


@helper
def steps_of(magnitude: Word) -> Word:
    """Bits of the float32 to add to a magnitude (bits, at most 448) so that the sum's last bit is the code's."""
    return max(magnitude & _EXPONENT, _SMALLEST_NORMAL) + _STEPS


@helper
def sum_of(magnitude: Word, steps: Word) -> Word:
    """Bits of the rounded sum of both."""
    return bits_of(float_of(magnitude) + float_of(steps))


@helper
def clamped(magnitude: Word) -> Word:
    """Bits of a magnitude, at most 448; NaN becomes 448 too and is put right by `code_of`."""
    return min(magnitude, _MAX_BITS)


@helper
def code_of(bits: Word, rounded: Word, steps: Word) -> Word:
    """The code of a float32 (its bits) from the rounded sum of its clamped magnitude."""
    code = rounded - steps + (steps >> np.uint32(20)) - _CODE_OFFSET
    if bits & _MAGNITUDE > _EXPONENT:
        code = np.uint32(NAN_CODE)
    return code | (bits >> np.uint32(24) & np.uint32(0x80))


@helper
def power_of_two(exponent: Word) -> Word:
    """2^exponent as float32; exponent in -126..127."""
    return float_of(np.uint32(exponent + 127) << np.uint32(23))


@helper
def scale_exponent(largest: Word) -> Word:
    """Exponent of the scale of a group whose largest finite magnitude this is; 0 where that is zero."""
    bits = bits_of(largest)
    if bits == np.uint32(0):
        return 0
    # 448 is 1.75 x 2^8: with a larger mantissa the next power of two is wanted.
    up = 1 if bits & np.uint32(0x7FFFFF) > np.uint32(0x600000) else 0
    return max(np.int64(bits >> np.uint32(23)) - 127 - 8 + up, MIN_SCALE_EXPONENT)
