"""Elements of each kind for the codec's kernels: 8 at once between memory and float32, on CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtierd.gpu.kernels.primitives import (
    bf16_pair,
    bits_of,
    device_function,
    f16_of_e4m3,
    f16_pair,
    float_of,
    floats_of_bf16,
    floats_of_f16,
    load_words,
    store_words,
)

VECTOR = 8
"""Elements a thread takes at once: 16 bytes of bf16, 8 bytes of codes."""
WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an element by its kind."""
INFINITY = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}
"""Inf as the element's own bits."""
_FINITE_MAX = {
    "bf16": np.uint32(0x7F7F0000).view(np.float32),
    "fp16": np.float32(65504),
    "fp32": np.finfo(np.float32).max,
}
_NAN = {"bf16": 0x7FC0, "fp16": 0x7FFF, "fp32": 0x7FF00000}


_ZERO, _INF = np.float32(0), np.float32(np.inf)


@device_function
def counted(bits: Any, limit: Any) -> Any:
    """What a magnitude counts for in a search for the largest one up to a limit: NaN is above Inf."""
    return bits if bits <= limit else 0


def readers(kind: str) -> tuple[Any, Any, Any]:
    """For a kind of elements: load 8 as float32; the largest magnitude of 8 up to a limit; its bits as a float32's."""
    if kind == "fp32":

        @device_function
        def load(array: Any, byte: Any) -> Any:
            a, b = load_words(array, byte), load_words(array, byte + 16)
            low = (float_of(a[0]), float_of(a[1]), float_of(a[2]), float_of(a[3]))
            return low, (float_of(b[0]), float_of(b[1]), float_of(b[2]), float_of(b[3]))

        @device_function
        def magnitude(array: Any, byte: Any, limit: Any) -> Any:
            most = 0
            for half in range(2):
                for word in load_words(array, byte + 16 * half):
                    most = max(most, counted(word & 0x7FFFFFFF, limit))
            return most

        @device_function
        def widened(bits: Any) -> Any:
            return bits

        return load, magnitude, widened

    pair, is_bf16 = floats_of_bf16 if kind == "bf16" else floats_of_f16, kind == "bf16"

    @device_function
    def load_halves(array: Any, byte: Any) -> Any:
        words = load_words(array, byte)
        a, b, c, d = pair(words[0]), pair(words[1]), pair(words[2]), pair(words[3])
        return (a[0], a[1], b[0], b[1]), (c[0], c[1], d[0], d[1])

    @device_function
    def magnitude_of_halves(array: Any, byte: Any, limit: Any) -> Any:
        most = 0
        for word in load_words(array, byte):
            most = max(most, counted(word & 0x7FFF, limit), counted(word >> 16 & 0x7FFF, limit))
        return most

    @device_function
    def widened_half(bits: Any) -> Any:
        return bits << 16 if is_bf16 else bits_of(floats_of_f16(bits)[0])

    return load_halves, magnitude_of_halves, widened_half


def _limiter(kind: str) -> Any:
    limit = _FINITE_MAX[kind]

    @device_function
    def within(value: Any) -> Any:
        return min(max(value, -limit), limit)

    return within


def narrower(kind: str) -> Any:
    """A word of two float32 as elements of a kind (the first alone where that is fp32), saturated.

    NaN is the one of the CPU's rotation, which has no sign.
    """
    within, nan = _limiter(kind), _NAN[kind]
    if kind == "fp32":

        @device_function
        def narrow(value: Any, _none: Any) -> Any:
            return bits_of(within(value)) if value == value else nan  # noqa: PLR0124 - of all numbers only NaN differs

        return narrow
    is_bf16 = kind == "bf16"

    @device_function
    def narrow_pair(low: Any, high: Any) -> Any:
        a, b = within(low), within(high)
        word = bf16_pair(a, b) if is_bf16 else f16_pair(a, b)
        if low != low:  # noqa: PLR0124
            word = (word & 0xFFFF0000) | nan
        if high != high:  # noqa: PLR0124
            word = (word & 0xFFFF) | nan << 16
        return word

    return narrow_pair


def writer(kind: str) -> Any:
    """Store 8 float32 as elements of a kind; NaN as the CPU's kernels and torch make it of a code."""
    within = _limiter(kind)
    if kind == "fp32":

        @device_function
        def bits(value: Any, code: Any) -> Any:
            if code & 0x7F == 0x7F:
                return 0x7FF00000 | (code & 0x80) << 24
            return bits_of(within(value))

        @device_function
        def write(array: Any, byte: Any, v: Any, codes: Any) -> None:
            c, d = codes[0], codes[1]
            low, high = v[0], v[1]
            store_words(
                array,
                byte,
                bits(low[0], c),
                bits(low[1], c >> 8),
                bits(low[2], c >> 16),
                bits(low[3], c >> 24),
            )
            store_words(
                array,
                byte + 16,
                bits(high[0], d),
                bits(high[1], d >> 8),
                bits(high[2], d >> 16),
                bits(high[3], d >> 24),
            )

        return write

    is_bf16 = kind == "bf16"

    @device_function
    def pair(low: Any, high: Any, codes: Any) -> Any:
        a, b = within(low), within(high)
        word = bf16_pair(a, b) if is_bf16 else f16_pair(a, b)
        if codes & 0x7F == 0x7F:
            word = (word & 0xFFFF0000) | (0x7FC0 if is_bf16 else 0x7F80 | (codes & 0x80) << 8)
        if codes >> 8 & 0x7F == 0x7F:
            word = (word & 0xFFFF) | (0x7FC0 if is_bf16 else 0x7F80 | (codes >> 8 & 0x80) << 8) << 16
        return word

    @device_function
    def write_halves(array: Any, byte: Any, v: Any, codes: Any) -> None:
        c, d = codes[0], codes[1]
        low, high = v[0], v[1]
        store_words(
            array,
            byte,
            pair(low[0], low[1], c),
            pair(low[2], low[3], c >> 16),
            pair(high[0], high[1], d),
            pair(high[2], high[3], d >> 16),
        )

    return write_halves


@device_function
def times(values: Any, factor: Any) -> Any:
    """Four numbers times a factor."""
    return (values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor)


@device_function
def errors(y: Any, codes: Any) -> Any:
    """Squared errors, squares and the largest error of four elements, in units of the scale; none of NaN and Inf."""
    words = f16_of_e4m3(codes)
    q, r = floats_of_f16(words[0]), floats_of_f16(words[1])
    # Written out, because every function that Numba inlines costs a tenth of a second of compiling.
    e = y[0] - q[0] if abs(y[0]) < _INF else _ZERO
    f = y[1] - q[1] if abs(y[1]) < _INF else _ZERO
    g = y[2] - r[0] if abs(y[2]) < _INF else _ZERO
    h = y[3] - r[1] if abs(y[3]) < _INF else _ZERO
    a, b = y[0] if abs(y[0]) < _INF else _ZERO, y[1] if abs(y[1]) < _INF else _ZERO
    c, d = y[2] if abs(y[2]) < _INF else _ZERO, y[3] if abs(y[3]) < _INF else _ZERO
    lost, total = e * e + f * f + g * g + h * h, a * a + b * b + c * c + d * d
    return lost, total, max(abs(e), abs(f), abs(g), abs(h))
