"""Groups that the form does not rotate, for the codec's kernels: a thread does 8 neighbouring elements at a time.

A *place* is what `codec._place` says of a group. That of `codec_keys` has the same functions, and a use for n.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from kvtierd.gpu.kernels.codec_elements import VECTOR, WIDTH, errors, readers, times, writer
from kvtierd.gpu.kernels.primitives import (
    device_function,
    e4m3_word,
    f16_of_e4m3,
    floats_of_f16,
    load_pair,
    store_pair,
)

_ZERO = np.float32(0)


def vector_encoder(kind: str) -> tuple[Any, Any]:
    """For groups that are not rotated: the largest magnitude up to a limit of a thread's vectors; their encoding."""
    width = WIDTH[kind]
    load, magnitude, _ = readers(kind)

    @device_function
    def find(exact, source, place, _n, limit):  # type: ignore[no-untyped-def]
        begin, dim, stride, tokens = place
        thread, threads, in_run, found = cuda.threadIdx.x, cuda.blockDim.x, dim // VECTOR, 0
        # Division once: then every step moves by the same number of runs and columns.
        down, right = threads // in_run, threads % in_run
        run, column = thread // in_run, thread % in_run
        for _ in range(thread, tokens * in_run, threads):
            found = max(found, magnitude(exact, source + (begin + run * stride + column * VECTOR) * width, limit))
            run, column = run + down, column + right
            if column >= in_run:
                run, column = run + 1, column - in_run
        return found

    @device_function
    def encode(exact, source, encoded, target, place, _n, factor):  # type: ignore[no-untyped-def]
        """Write the codes of a thread's vectors. Returns squared errors, squares and the largest error."""
        begin, dim, stride, tokens = place
        thread, threads, in_run = cuda.threadIdx.x, cuda.blockDim.x, dim // VECTOR
        lost, total, worst = _ZERO, _ZERO, _ZERO
        down, right = threads // in_run, threads % in_run
        run, column = thread // in_run, thread % in_run
        for _ in range(thread, tokens * in_run, threads):
            at = begin + run * stride + column * VECTOR
            halves = load(exact, source + at * width)
            low, high = times(halves[0], factor), times(halves[1], factor)
            a = e4m3_word(low[0], low[1], low[2], low[3])
            b = e4m3_word(high[0], high[1], high[2], high[3])
            store_pair(encoded, target + at, a, b)
            first, second = errors(low, a), errors(high, b)
            lost, total = lost + (first[0] + second[0]), total + (first[1] + second[1])
            worst = max(worst, first[2], second[2])
            run, column = run + down, column + right
            if column >= in_run:
                run, column = run + 1, column - in_run
        return lost, total, worst

    return find, encode


def vector_decoder(kind: str) -> Any:
    """For groups that are not rotated: decode a thread's vectors."""
    width = WIDTH[kind]
    write = writer(kind)

    @device_function
    def values(codes: Any, scale: Any) -> Any:
        words = f16_of_e4m3(codes)
        a, b = floats_of_f16(words[0]), floats_of_f16(words[1])
        return times((a[0], a[1], b[0], b[1]), scale)

    @device_function
    def decode(exact, target, encoded, source, place, _n, scale):  # type: ignore[no-untyped-def]
        begin, dim, stride, tokens = place
        thread, threads, in_run = cuda.threadIdx.x, cuda.blockDim.x, dim // VECTOR
        down, right = threads // in_run, threads % in_run
        run, column = thread // in_run, thread % in_run
        for _ in range(thread, tokens * in_run, threads):
            at = begin + run * stride + column * VECTOR
            codes = load_pair(encoded, source + at)
            write(exact, target + at * width, (values(codes[0], scale), values(codes[1], scale)), codes)
            run, column = run + down, column + right
            if column >= in_run:
                run, column = run + 1, column - in_run

    return decode
