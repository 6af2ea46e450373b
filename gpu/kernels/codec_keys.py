"""Rotated keys for the codec's kernels (`kvtierd.core.stored_form`): a thread does one column of a vector in registers.

The n numbers that are spread over one another lie `row` = k_dim / n apart. A column is four *quads* of numbers, those
of rows 0..3, 4..7, 8..11 and 12..15; where n is 4 there is one, and the others are zeros. Neighbouring threads take
neighbouring columns, so that all bytes of a cache line are asked for one after the other. A *place* is what
`codec._place` says of a group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from kvtierd.gpu.kernels.codec_elements import WIDTH, errors, narrower, times
from kvtierd.gpu.kernels.primitives import (
    bf16_pair,
    device_function,
    e4m3_word,
    f16_of_e4m3,
    float_of,
    floats_of_bf16,
    floats_of_f16,
    load_u8,
    load_u16,
    load_word,
    product,
    store_u8,
    store_u16,
    store_word,
)

_ZERO, _QUARTER, _HALF = np.float32(0), np.float32(0.25), np.float32(0.5)
_ZEROS = (_ZERO, _ZERO, _ZERO, _ZERO)


@device_function
def _four(v: Any) -> Any:
    """Hadamard's rotation of four numbers, but for the factor: sums and differences two apart, then of neighbours."""
    a, b, c, d = v[0] + v[2], v[1] + v[3], v[0] - v[2], v[1] - v[3]
    return a + b, a - b, c + d, c - d


@device_function
def _spread(a: Any, b: Any, c: Any, d: Any, n: Any) -> Any:
    """The rotation of a column of n numbers, but for the factor: first across the quads, then in each."""
    if n == 16:
        s = (a[0] + c[0], a[1] + c[1], a[2] + c[2], a[3] + c[3])
        t = (b[0] + d[0], b[1] + d[1], b[2] + d[2], b[3] + d[3])
        u = (a[0] - c[0], a[1] - c[1], a[2] - c[2], a[3] - c[3])
        v = (b[0] - d[0], b[1] - d[1], b[2] - d[2], b[3] - d[3])
        a = (s[0] + t[0], s[1] + t[1], s[2] + t[2], s[3] + t[3])
        b = (s[0] - t[0], s[1] - t[1], s[2] - t[2], s[3] - t[3])
        c = (u[0] + v[0], u[1] + v[1], u[2] + v[2], u[3] + v[3])
        d = (u[0] - v[0], u[1] - v[1], u[2] - v[2], u[3] - v[3])
    return _four(a), _four(b), _four(c), _four(d)


@device_function
def _factor(n: Any) -> Any:
    """One over the root of n."""
    return _QUARTER if n == 16 else _HALF


def _reader(kind: str) -> Any:
    width, pair = WIDTH[kind], floats_of_bf16 if kind == "bf16" else floats_of_f16

    # Products that are fused with the additions behind them are not rounded; among fp32 there are numbers that show it.
    if kind == "fp32":

        @device_function
        def quad(array: Any, byte: Any, step: Any, factor: Any) -> Any:
            a, b = float_of(load_word(array, byte)), float_of(load_word(array, byte + step))
            c, d = float_of(load_word(array, byte + 2 * step)), float_of(load_word(array, byte + 3 * step))
            return product(a, factor), product(b, factor), product(c, factor), product(d, factor)

    else:

        @device_function
        def quad(array: Any, byte: Any, step: Any, factor: Any) -> Any:
            a = pair(load_u16(array, byte) | load_u16(array, byte + step) << 16)
            b = pair(load_u16(array, byte + 2 * step) | load_u16(array, byte + 3 * step) << 16)
            return product(a[0], factor), product(a[1], factor), product(b[0], factor), product(b[1], factor)

    @device_function
    def read(array: Any, byte: Any, row: Any, n: Any) -> Any:
        """The rotated numbers of the column whose first number is at `byte`, before they are rounded."""
        step, factor = row * width, _factor(n)
        a, b, c, d = quad(array, byte, step, factor), _ZEROS, _ZEROS, _ZEROS
        if n == 16:
            b = quad(array, byte + 4 * step, step, factor)
            c = quad(array, byte + 8 * step, step, factor)
            d = quad(array, byte + 12 * step, step, factor)
        return _spread(a, b, c, d, n)

    return read


@device_function
def _largest_of(a: Any, b: Any, c: Any, d: Any, limit: Any) -> Any:
    """The largest magnitude of a column up to a limit, both as bits of a bf16."""
    most = 0
    for q in (a, b, c, d):
        for word in (bf16_pair(q[0], q[1]), bf16_pair(q[2], q[3])):
            low, high = word & 0x7FFF, word >> 16 & 0x7FFF
            most = max(most, low if low <= limit else 0, high if high <= limit else 0)
    return most


@device_function
def _encoded(encoded: Any, at: Any, row: Any, quad: Any, factor: Any) -> Any:
    """Write the codes of a quad; its errors."""
    low, high = floats_of_bf16(bf16_pair(quad[0], quad[1])), floats_of_bf16(bf16_pair(quad[2], quad[3]))
    scaled = times((low[0], low[1], high[0], high[1]), factor)
    codes = e4m3_word(scaled[0], scaled[1], scaled[2], scaled[3])
    store_u8(encoded, at, codes)
    store_u8(encoded, at + row, codes >> 8)
    store_u8(encoded, at + 2 * row, codes >> 16)
    store_u8(encoded, at + 3 * row, codes >> 24)
    return errors(scaled, codes)


def key_encoder(kind: str) -> tuple[Any, Any]:
    """For keys: the largest magnitude up to a limit of a thread's columns, as bits of a bf16; and their encoding."""
    width = WIDTH[kind]
    read = _reader(kind)

    @device_function
    def find(exact, source, place, n, limit):  # type: ignore[no-untyped-def]
        begin, dim, stride, tokens = place
        thread, threads, row, found = cuda.threadIdx.x, cuda.blockDim.x, dim // n, 0
        down, right = threads // row, threads % row
        run, column = thread // row, thread % row
        for _ in range(thread, tokens * row, threads):
            a, b, c, d = read(exact, source + (begin + run * stride + column) * width, row, n)
            found = max(found, _largest_of(a, b, c, d, limit))
            run, column = run + down, column + right
            if column >= row:
                run, column = run + 1, column - row
        return found

    @device_function
    def encode(exact, source, encoded, target, place, n, factor):  # type: ignore[no-untyped-def]
        """Write the codes of a thread's columns. Returns squared errors, squares and the largest error."""
        begin, dim, stride, tokens = place
        thread, threads, row = cuda.threadIdx.x, cuda.blockDim.x, dim // n
        lost, total, worst = _ZERO, _ZERO, _ZERO
        down, right = threads // row, threads % row
        run, column = thread // row, thread % row
        for _ in range(thread, tokens * row, threads):
            at = begin + run * stride + column
            a, b, c, d = read(exact, source + at * width, row, n)
            of_a = _encoded(encoded, target + at, row, a, factor)
            lost, total, worst = lost + of_a[0], total + of_a[1], max(worst, of_a[2])
            if n == 16:
                of_b = _encoded(encoded, target + at + 4 * row, row, b, factor)
                of_c = _encoded(encoded, target + at + 8 * row, row, c, factor)
                of_d = _encoded(encoded, target + at + 12 * row, row, d, factor)
                lost, total = lost + (of_b[0] + of_c[0] + of_d[0]), total + (of_b[1] + of_c[1] + of_d[1])
                worst = max(worst, of_b[2], of_c[2], of_d[2])
            run, column = run + down, column + right
            if column >= row:
                run, column = run + 1, column - row
        return lost, total, worst

    return find, encode


@device_function
def _decoded(encoded: Any, at: Any, row: Any, scale: Any) -> Any:
    """The numbers of a quad of codes, times the scale."""
    low = load_u8(encoded, at) | load_u8(encoded, at + row) << 8
    words = f16_of_e4m3(low | load_u8(encoded, at + 2 * row) << 16 | load_u8(encoded, at + 3 * row) << 24)
    a, b = floats_of_f16(words[0]), floats_of_f16(words[1])
    return times((a[0], a[1], b[0], b[1]), scale)


def _storer(kind: str) -> Any:
    width, narrow = WIDTH[kind], narrower(kind)

    @device_function
    def store(exact: Any, byte: Any, row: Any, quad: Any) -> None:
        """Write a quad as elements of the kind; the first is at `byte`."""
        step = row * width
        if width == 4:
            store_word(exact, byte, narrow(quad[0], 0))
            store_word(exact, byte + step, narrow(quad[1], 0))
            store_word(exact, byte + 2 * step, narrow(quad[2], 0))
            store_word(exact, byte + 3 * step, narrow(quad[3], 0))
        else:
            low, high = narrow(quad[0], quad[1]), narrow(quad[2], quad[3])
            store_u16(exact, byte, low)
            store_u16(exact, byte + step, low >> 16)
            store_u16(exact, byte + 2 * step, high)
            store_u16(exact, byte + 3 * step, high >> 16)

    return store


def key_decoder(kind: str) -> Any:
    """For keys of a kind: decode a thread's columns."""
    width, store = WIDTH[kind], _storer(kind)

    @device_function
    def decode(exact, target, encoded, source, place, n, scale):  # type: ignore[no-untyped-def]
        begin, dim, stride, tokens = place
        thread, threads, row = cuda.threadIdx.x, cuda.blockDim.x, dim // n
        scale = scale * _factor(n)  # both are powers of two: no number is rounded by it, as none is by bf16
        down, right = threads // row, threads % row
        run, column = thread // row, thread % row
        for _ in range(thread, tokens * row, threads):
            at = begin + run * stride + column
            a, b, c, d = _decoded(encoded, source + at, row, scale), _ZEROS, _ZEROS, _ZEROS
            if n == 16:
                b = _decoded(encoded, source + at + 4 * row, row, scale)
                c = _decoded(encoded, source + at + 8 * row, row, scale)
                d = _decoded(encoded, source + at + 12 * row, row, scale)
            a, b, c, d = _spread(a, b, c, d, n)
            there = target + at * width
            store(exact, there, row, a)
            if n == 16:
                store(exact, there + 4 * row * width, row, b)
                store(exact, there + 8 * row * width, row, c)
                store(exact, there + 12 * row * width, row, d)
            run, column = run + down, column + right
            if column >= row:
                run, column = run + 1, column - row

    return decode
