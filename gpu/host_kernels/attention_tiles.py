"""Register tiles of attention on the CPU: scores of a few tokens, and the weighted sum of a few values.

A vector of K or V is turned into fp32 once and used for up to ROWS query heads while it is in a register. Addresses and
strides are in bytes. Each combination of dtype, rows and tokens is code of its own behind one switch.
"""

# ruff: noqa: ARG001 - Numba gives an intrinsic the types of its arguments, and the names are for whoever reads it.
from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types

from kvtierd.gpu.host_kernels.attention_vectors import (
    CODES,
    ELEMENT_BYTES,
    F32,
    FLOATS,
    I8,
    I64,
    INTS,
    LANES,
    TOKENS,
    ask_for,
    constant,
    counted_loop,
    fma,
    for_case,
    holds_e4m3_nan,
    integers,
    intrinsic,
    load,
    load_floats,
    most_e4m3,
    pick,
    splat,
    store,
    sums_of_lanes,
)

ROWS = 4
"""Query heads of a register tile."""
VECTORS = 4
"""Vectors of V of a register tile; the rest of a head is done vector by vector."""
_BYTES_AT_ONCE = 64

_LOG2_E = 1.4426950408889634
_EXP2 = (
    1.0000000000e00,
    6.9314718056e-01,
    2.4022650696e-01,
    5.5504108665e-02,
    9.6181291076e-03,
    1.3333558146e-03,
    1.5403530393e-04,
    1.5252733804e-05,
)
"""ln(2)^n / n!: the series of 2^x, within 1e-8 for |x| <= 0.5."""
_TANH = (1.0, -1.0 / 3, 2.0 / 15, -17.0 / 315, 62.0 / 2835, -1382.0 / 155925)
"""The series of tanh(x) / x in x^2, within 1e-9 for |x| <= 0.3."""
_TANH_SERIES_BELOW = 0.3
_ROUNDING = 12582912.0
"""1.5 * 2^23: adding it leaves a float's integer part in its lowest bits."""
_SMALLEST = -126.0


@intrinsic
def score_rows(
    _typing: Any, code: Any, rows: Any, tokens: Any, k: Any, k_stride: Any, q: Any, q_stride: Any, steps: Any,
    factor: Any, scores: Any, score_stride: Any, ahead: Any,
) -> Any:  # fmt: skip
    """Dot products of `rows` query vectors (fp32) with `tokens` K vectors of `steps` * LANES elements, times factor.

    rows is 1..ROWS, tokens 1..TOKENS. The score of row r and token t is stored at scores + r * score_stride + 4 * t;
    TOKENS of a row are always stored, those beyond `tokens` being repetitions of the last. As many bytes as the tile
    reads are asked for from `ahead` on, some with every step: all at once, they would be in the way of the tile's own.
    """

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind, height = args[:2]

        def emit(c: int, r: int) -> None:
            _score_tile(builder, c, r, args[2:])

        for_case(
            builder, kind, CODES,
            lambda c: for_case(builder, height, range(1, ROWS + 1), lambda r: emit(c, r)),
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.uint64, types.int64, types.uint64, types.int64,
                      types.int64, types.float32, types.uint64, types.int64, types.uint64), codegen  # fmt: skip


def _score_tile(builder: Any, code: int, height: int, args: Any) -> None:
    tokens, k_base, k_step, q_base, q_step, count, scale, out, out_step, ahead = args
    width, last = TOKENS, builder.sub(tokens, I64(1))
    places = [builder.select(builder.icmp_signed("<", last, I64(t)), last, I64(t)) for t in range(width)]
    k_rows = [builder.add(k_base, builder.mul(k_step, place)) for place in places]
    q_rows = [builder.add(q_base, builder.mul(q_step, I64(r))) for r in range(height)]

    bytes_a_step = width * LANES * ELEMENT_BYTES[code]

    def body(index: Any, sums: Any) -> list[Any]:
        ask_for(builder, ahead, builder.mul(index, I64(bytes_a_step)), bytes_a_step)
        at_k = builder.mul(index, I64(LANES * ELEMENT_BYTES[code]))
        at_q = builder.mul(index, I64(LANES * 4))
        keys = [load_floats(builder, code, row, at_k) for row in k_rows]
        queries = [load(builder, row, at_q, FLOATS) for row in q_rows]
        return [fma(builder, queries[r], keys[t], sums[r * width + t]) for r in range(height) for t in range(width)]

    sums = counted_loop(builder, count, [constant(0.0)] * (height * width), body)
    totals = sums_of_lanes(builder, sums)
    totals = builder.fmul(totals, splat(builder, scale, height * width))
    for r in range(height):
        part = pick(builder, totals, totals, range(r * width, (r + 1) * width))
        store(builder, part, out, builder.mul(out_step, I64(r)))


@intrinsic
def add_values(
    _typing: Any, code: Any, rows: Any, v: Any, v_stride: Any, steps: Any, weights: Any, weight_stride: Any,
    tokens: Any, sums: Any, sum_stride: Any, ahead: Any,
) -> Any:  # fmt: skip
    """Add `tokens` V vectors of `steps` * LANES elements, weighted for each of `rows` rows (1..ROWS), to fp32 sums.

    The weight of row r and token t is at weights + r * weight_stride + 4 * t. What lies `ahead` is asked for as by
    `score_rows`.
    """

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind, height, v_base, v_step, steps_in, weight_base, weight_step, count, out, out_step, ahead = args
        wide = builder.udiv(steps_in, I64(VECTORS))
        narrow = builder.urem(steps_in, I64(VECTORS))
        tail = builder.mul(wide, I64(VECTORS))

        def emit(c: int, r: int) -> None:
            for step_count, width, first in ((wide, VECTORS, I64(0)), (narrow, 1, tail)):

                def body(index: Any, _: Any, width: int = width, first: Any = first) -> list[Any]:
                    step = builder.add(first, builder.mul(index, I64(width)))
                    values = builder.add(v_base, builder.mul(step, I64(LANES * ELEMENT_BYTES[c])))
                    target = builder.add(out, builder.mul(step, I64(LANES * 4)))
                    before = builder.mul(step, builder.mul(count, I64(LANES * ELEMENT_BYTES[c])))
                    next_bytes = builder.add(ahead, before)
                    rest = (values, v_step, weight_base, weight_step, count, target, out_step, next_bytes)
                    _value_tile(builder, (c, r, width), rest)
                    return []

                counted_loop(builder, step_count, [], body)

        for_case(
            builder, kind, CODES,
            lambda c: for_case(builder, height, range(1, ROWS + 1), lambda r: emit(c, r)),
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.uint64, types.int64, types.int64, types.uint64, types.int64,
                      types.int64, types.uint64, types.int64, types.uint64), codegen  # fmt: skip


def _value_tile(builder: Any, tile: tuple[int, int, int], args: Any) -> None:
    code, height, width = tile
    v_base, v_step, weight_base, weight_step, count, out, out_step, ahead = args
    bytes_a_token = width * LANES * ELEMENT_BYTES[code]
    weight_rows = [builder.add(weight_base, builder.mul(weight_step, I64(r))) for r in range(height)]
    places = [(builder.mul(out_step, I64(r)), j) for r in range(height) for j in range(width)]
    offsets = [builder.add(row, I64(j * LANES * 4)) for row, j in places]
    before = [load(builder, out, offset, FLOATS) for offset in offsets]

    def body(index: Any, totals: Any) -> list[Any]:
        ask_for(builder, ahead, builder.mul(index, I64(bytes_a_token)), bytes_a_token)
        row = builder.mul(index, v_step)
        at_weight = builder.mul(index, I64(4))
        at = [builder.add(row, I64(j * LANES * ELEMENT_BYTES[code])) for j in range(width)]
        values = [load_floats(builder, code, v_base, offset) for offset in at]
        weights = [splat(builder, load(builder, base, at_weight, F32)) for base in weight_rows]
        return [fma(builder, weights[r], values[j], totals[r * width + j]) for r in range(height) for j in range(width)]

    for total, offset in zip(counted_loop(builder, count, before, body), offsets, strict=True):
        store(builder, total, out, offset)


@intrinsic
def any_nan(_typing: Any, codes: Any, stride: Any, rows: Any, count: Any) -> Any:
    """Whether any of `rows` rows of `count` e4m3 bytes holds a NaN; count is a multiple of LANES.

    Strip by strip, all rows of one before the next: rows are short and many, and a loop over each would cost more than
    what it looks at.
    """

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, step, height, width = args
        pair = 2 * _BYTES_AT_ONCE

        def sweep(first: Any, last: Any, lanes: int, loads: int) -> list[Any]:
            kind = ir.VectorType(I8, lanes)

            def strip(index: Any, found: Any) -> list[Any]:
                start = builder.add(base, builder.add(first, builder.mul(index, I64(lanes * loads))))

                def look(row: Any, most: Any) -> list[Any]:
                    at = builder.mul(row, step)
                    places = [builder.add(at, I64(j * lanes)) for j in range(loads)]
                    codes = [load(builder, start, place, kind) for place in places]
                    return [most_e4m3(builder, code, seen) for code, seen in zip(codes, most, strict=True)]

                return counted_loop(builder, height, found, look)

            count = builder.udiv(builder.sub(last, first), I64(lanes * loads))
            return counted_loop(builder, count, [ir.Constant(kind, [0] * lanes)] * loads, strip)

        whole = builder.and_(width, I64(-pair))
        half = builder.and_(width, I64(-_BYTES_AT_ONCE))
        seen = sweep(I64(0), whole, _BYTES_AT_ONCE, 2)
        seen += sweep(whole, half, _BYTES_AT_ONCE, 1)
        seen += sweep(half, width, LANES, 1)
        return functools.reduce(builder.or_, (holds_e4m3_nan(builder, most) for most in seen))

    return types.boolean(types.uint64, types.int64, types.int64, types.int64), codegen


@intrinsic
def largest(_typing: Any, scores: Any, steps: Any) -> Any:
    """The largest of `steps` * LANES fp32 scores; NaN is passed over, and nothing gives -Inf."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, count = args

        def body(index: Any, best: Any) -> list[Any]:
            here = load(builder, base, builder.mul(index, I64(LANES * 4)), FLOATS)
            return [builder.select(builder.fcmp_ordered(">", here, best[0]), here, best[0])]

        best = counted_loop(builder, count, [constant(float("-inf"))], body)[0]
        half = LANES // 2
        while half:
            moved = pick(builder, best, best, [(lane + half) % LANES for lane in range(LANES)])
            best = builder.select(builder.fcmp_ordered(">", moved, best), moved, best)
            half //= 2
        return builder.extract_element(best, ir.IntType(32)(0))

    return types.float32(types.uint64, types.int64), codegen


@intrinsic
def weigh(_typing: Any, scores: Any, steps: Any, top: Any, factor: Any) -> Any:
    """Replace `steps` * LANES scores s by factor * 2^(s - top); returns the sum of the powers without the factor."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, count, top_score, scale = args
        tops, scales = splat(builder, top_score), splat(builder, scale)

        def body(index: Any, total: Any) -> list[Any]:
            at = builder.mul(index, I64(LANES * 4))
            power = exp2(builder, builder.fsub(load(builder, base, at, FLOATS), tops))
            store(builder, builder.fmul(power, scales), base, at)
            return [builder.fadd(total[0], power)]

        total = counted_loop(builder, count, [constant(0.0)], body)[0]
        return builder.extract_element(sums_of_lanes(builder, [total]), ir.IntType(32)(0))

    return types.float32(types.uint64, types.int64, types.float32, types.float32), codegen


@intrinsic
def cap_scores(_typing: Any, scores: Any, steps: Any, cap: Any) -> Any:
    """Replace `steps` * LANES scores s by cap * tanh(s)."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, count, limit = args
        limits = splat(builder, limit)

        def body(index: Any, _: Any) -> list[Any]:
            at = builder.mul(index, I64(LANES * 4))
            store(builder, builder.fmul(limits, _tanh(builder, load(builder, base, at, FLOATS))), base, at)
            return []

        counted_loop(builder, count, [], body)
        return _context.get_dummy_value()

    return types.void(types.uint64, types.int64, types.float32), codegen


def exp2(builder: Any, power: Any) -> Any:
    """2^power for power <= 0 in every lane: exact to 1e-7; 0 below 2^-126; NaN of NaN."""
    too_small = builder.fcmp_ordered("<", power, constant(_SMALLEST))
    inside = builder.select(too_small, constant(_SMALLEST), power)
    shifted = builder.fadd(inside, constant(_ROUNDING))
    fraction = builder.fsub(inside, builder.fsub(shifted, constant(_ROUNDING)))
    result = _series(builder, _EXP2, fraction)
    # The integer part becomes a float's exponent. Multiplying by it, rather than adding to the bits, keeps a NaN.
    exponent = builder.shl(builder.add(builder.bitcast(shifted, INTS), integers(127)), integers(23))
    result = builder.fmul(result, builder.bitcast(exponent, FLOATS))
    return builder.select(too_small, constant(0.0), result)


def _tanh(builder: Any, x: Any) -> Any:
    """tanh in every lane: its series near 0, where the other form would cancel, else 1 - 2e / (1 + e), e = e^-2|x|."""
    bits = builder.bitcast(x, INTS)
    size = builder.bitcast(builder.and_(bits, integers(0x7FFFFFFF)), FLOATS)
    power = exp2(builder, builder.fmul(size, constant(-2.0 * _LOG2_E)))
    far = builder.fdiv(builder.fsub(constant(1.0), power), builder.fadd(constant(1.0), power))
    near = builder.fmul(_series(builder, _TANH, builder.fmul(size, size)), size)
    result = builder.select(builder.fcmp_ordered("<", size, constant(_TANH_SERIES_BELOW)), near, far)
    sign = builder.and_(bits, integers(0x80000000))
    return builder.bitcast(builder.or_(builder.bitcast(result, INTS), sign), FLOATS)


def _series(builder: Any, coefficients: tuple[float, ...], x: Any) -> Any:
    total = constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = fma(builder, total, x, constant(coefficient))
    return total
