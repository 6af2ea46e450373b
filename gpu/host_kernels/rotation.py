"""Keys between their own channels and those that FP8 stores: Hadamard's rotation over n channels of each vector.

`kvtierd.core.stored_form` defines it. Vectors of `dim` neighbouring elements lie one after the other, whatever the
layout; rotated ones are bf16. In LLVM's portable vectors, because Numba does not vectorise butterflies: a step takes
the same 8, 4 or 1 columns of all n rows of a vector into registers, and nothing of it is written before all is read, so
that source and target may be the same.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from kvtierd.gpu.host_kernels.codec_vectors import I16, I32, I64, data, element_pointer, intrinsic, load, store
from kvtierd.gpu.host_kernels.e4m3 import BF16, FP16, FP32
from kvtierd.index.jit import Word, helper

_F32, _F16 = ir.FloatType(), ir.HalfType()
_STORED = {BF16: I16, FP16: _F16, FP32: _F32}
_LARGEST = {BF16: 0x7F7F, FP16: 0x477FE000, FP32: 0x7F7FFFFF}
"""Bits of the largest finite numbers: as bf16, and as float32."""
_NAN = {BF16: 0x7FC0, FP16: 0x7FFFFFFF, FP32: 0x7FF00000}


class _Columns:
    """Emits the rotation of the same `lanes` columns of `n` rows."""

    def __init__(self, builder: Any, lanes: int, n: int) -> None:
        self._builder, self._lanes, self._n = builder, lanes, n
        self._floats, self._ints = ir.VectorType(_F32, lanes), ir.VectorType(I32, lanes)

    def _same(self, value: int) -> Any:
        return ir.Constant(self._ints, [value] * self._lanes)

    def read(self, kind: int, base: Any, at: Any, step: Any) -> list[Any]:
        """The rows as float32, times 1 / root of n."""
        stored = ir.VectorType(_STORED[kind], self._lanes)
        factor = ir.Constant(self._floats, [1 / math.sqrt(self._n)] * self._lanes)
        found = []
        for row in range(self._n):
            place = self._builder.add(at, self._builder.mul(step, I64(row)))
            value = load(self._builder, element_pointer(self._builder, base, place, stored))
            found.append(self._builder.fmul(self._widened(kind, value), factor))
        return found

    def _widened(self, kind: int, value: Any) -> Any:
        if kind == BF16:
            bits = self._builder.shl(self._builder.zext(value, self._ints), self._same(16))
            return self._builder.bitcast(bits, self._floats)
        return self._builder.fpext(value, self._floats) if kind == FP16 else value

    def spread(self, rows: list[Any]) -> list[Any]:
        """Sums and differences of rows, half of them apart, then a quarter, ... then neighbours."""
        half = self._n // 2
        while half:
            for first in (row for row in range(self._n) if not row & half):
                a, b = rows[first], rows[first + half]
                rows[first], rows[first + half] = self._builder.fadd(a, b), self._builder.fsub(a, b)
            half //= 2
        return rows

    def write(self, kind: int, base: Any, at: Any, step: Any, rows: list[Any], *, saturate: bool) -> None:
        """Round the rows to nearest even; with `saturate` what is beyond the range becomes the largest finite one."""
        stored = ir.VectorType(_STORED[kind], self._lanes)
        for row, value in enumerate(rows):
            place = self._builder.add(at, self._builder.mul(step, I64(row)))
            rounded = self._rounded(kind, value, saturate=saturate)
            store(self._builder, rounded, element_pointer(self._builder, base, place, stored))

    def _rounded(self, kind: int, value: Any, *, saturate: bool) -> Any:
        build = self._builder
        is_nan = build.fcmp_unordered("uno", value, value)
        bits = build.bitcast(value, self._ints)
        sign, size = build.and_(bits, self._same(1 << 31)), build.and_(bits, self._same((1 << 31) - 1))
        if kind == BF16:
            last = build.and_(build.lshr(size, self._same(16)), self._same(1))
            size = build.lshr(build.add(size, build.add(last, self._same(0x7FFF))), self._same(16))
            sign = build.lshr(sign, self._same(16))
        if saturate:
            most = self._same(_LARGEST[kind])
            size = build.select(build.icmp_unsigned("<", size, most), size, most)
        found = build.select(is_nan, self._same(_NAN[kind]), build.or_(sign, size))
        if kind == BF16:
            return build.trunc(found, ir.VectorType(I16, self._lanes))
        number = build.bitcast(found, self._floats)
        return build.fptrunc(number, ir.VectorType(_F16, self._lanes)) if kind == FP16 else number


def _rotator(kinds: tuple[int, int], n: int, lanes: int, *, saturate: bool) -> Any:
    @intrinsic
    def rotate(_typing: Any, source: Any, _from: Any, target: Any, _to: Any, _step: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            origin, result = (data(context, builder, signature.args[index], args[index]) for index in (0, 2))
            columns = _Columns(builder, lanes, n)
            rows = columns.spread(columns.read(kinds[0], origin, args[1], args[4]))
            columns.write(kinds[1], result, args[3], args[4], rows, saturate=saturate)
            return context.get_dummy_value()

        return types.void(source, types.int64, target, types.int64, types.int64), generate

    return rotate


def _over_vectors(kinds: tuple[int, int], *, saturate: bool) -> Any:
    """`rotate(source, first, target, begin, count, dim, n)`: elements `first`.. of source to `begin`.. of target."""
    wide, some, one = (_rotator(kinds, 16, lanes, saturate=saturate) for lanes in (8, 4, 1))
    wide_of_4, one_of_4 = (_rotator(kinds, 4, lanes, saturate=saturate) for lanes in (8, 1))

    @helper
    def rotate(source: Word, first: Word, target: Word, begin: Word, count: Word, dim: Word, n: Word) -> None:
        step = dim // n
        for vector in range(0, count, dim):
            column = 0
            while column + 8 <= step:
                if n == 16:
                    wide(source, first + vector + column, target, begin + vector + column, step)
                else:
                    wide_of_4(source, first + vector + column, target, begin + vector + column, step)
                column += 8
            if n == 16 and column + 4 <= step:
                some(source, first + vector + column, target, begin + vector + column, step)
                column += 4
            while column < step:
                if n == 16:
                    one(source, first + vector + column, target, begin + vector + column, step)
                else:
                    one_of_4(source, first + vector + column, target, begin + vector + column, step)
                column += 1

    return rotate


rotate_bf16, rotate_fp16, rotate_fp32 = (_over_vectors((kind, BF16), saturate=False) for kind in (BF16, FP16, FP32))
"""To rotated keys, where a number beyond the range is Inf."""
back_to_bf16, back_to_fp16, back_to_fp32 = (_over_vectors((BF16, kind), saturate=True) for kind in (BF16, FP16, FP32))
"""From rotated keys; beyond the range is the largest finite number."""
