"""Twins of the conversions of floats, for Numba's simulator: plain Python over the definition of each format."""

from __future__ import annotations

import math
import struct

import numpy as np

__all__ = [
    "bf16_pair",
    "bits_of",
    "e4m3_word",
    "exp2",
    "f16_of_e4m3",
    "f16_pair",
    "float_of",
    "floats_of_bf16",
    "floats_of_f16",
    "product",
]

E4M3_MAX = 448.0
_E4M3_NAN = 0x7F
_F16_NAN = 0x7FFF


def bits_of(value: float) -> int:
    """The bits of a float32."""
    return int(np.float32(value).view(np.uint32))


def float_of(word: int) -> np.float32:
    """The float32 with these bits; higher bits are cut off."""
    return np.uint32(int(word) & 0xFFFFFFFF).view(np.float32)


def product(a: float, b: float) -> np.float32:
    """The product of two float32."""
    return np.float32(a) * np.float32(b)


def exp2(value: float) -> np.float32:
    """2 to the power of a float32."""
    return np.float32(np.exp2(np.float32(value)))


def bf16_pair(low: float, high: float) -> int:
    """Two float32 rounded to bf16, as a word."""
    return _bf16(low) | _bf16(high) << 16


def floats_of_bf16(word: int) -> tuple[np.float32, np.float32]:
    """The two float32 in a word of bf16."""
    return float_of(word << 16), float_of(word & 0xFFFF0000)


def f16_pair(low: float, high: float) -> int:
    """Two float32 rounded to f16, as a word."""
    return _f16(low) | _f16(high) << 16


def floats_of_f16(word: int) -> tuple[np.float32, np.float32]:
    """The two float32 in a word of f16."""
    low, high = (np.uint16(int(half) & 0xFFFF).view(np.float16) for half in (word, word >> 16))
    return np.float32(low), np.float32(high)


def e4m3_word(f0: float, f1: float, f2: float, f3: float) -> int:
    """Four float32 as codes: nearest even, saturating; NaN keeps its sign."""
    return sum(_code(float(value)) << 8 * index for index, value in enumerate((f0, f1, f2, f3)))


def f16_of_e4m3(word: int) -> tuple[int, int]:
    """Four codes as two words of two f16 each."""
    halves = [_f16_of_code(int(word) >> 8 * index & 0xFF) for index in range(4)]
    return halves[0] | halves[1] << 16, halves[2] | halves[3] << 16


def _bf16(value: float) -> int:
    bits = bits_of(value)
    if math.isnan(value):
        return 0x7FFF
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def _f16(value: float) -> int:
    if math.isnan(value):
        return _F16_NAN
    return int(np.float32(value).astype(np.float16).view(np.uint16))


def _code(value: float) -> int:
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    if math.isnan(value):
        return sign | _E4M3_NAN
    magnitude = min(abs(value), E4M3_MAX)
    if magnitude == 0.0:
        return sign
    _, exponent = math.frexp(magnitude)
    # Three bits behind the leading one; below 2^-6 the steps stay at 2^-9. Python rounds half to even.
    step = max(exponent - 4, -9)
    count = round(magnitude / 2.0**step)
    # count is 8..16 for normal numbers; 16 is the next power of two, which the sum carries into the exponent.
    code = count if step == -9 else count + 8 * (step + 9)
    return sign | min(code, 0x7E)


def _f16_of_code(code: int) -> int:
    sign, exponent, fraction = code & 0x80, code >> 3 & 15, code & 7
    if code & 0x7F == _E4M3_NAN:
        return sign << 8 | _F16_NAN
    value = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return sign << 8 | int.from_bytes(struct.pack("<e", value), "little")
