"""Keys of bf16 to rotated ones, at the speed of the arithmetic, with the largest magnitude found on the way.

As `rotation`, whose result it is but for denormals, which are zeros of their sign, and for the bits of a NaN: the
processor's own rounding to bf16 is one instruction where the exact one takes a dozen. The factor of 1 / root of n, a
power of two and so exact, is part of the first sums and differences.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from kvtierd.gpu.host_kernels.codec_vectors import (
    I16,
    I32,
    I64,
    LARGEST,
    data,
    element_pointer,
    function,
    intrinsic,
    larger,
    load,
    store,
)
from kvtierd.gpu.host_kernels.codec_words import BFloat
from kvtierd.index.jit import Word, helper

QUICK = all(llvm.get_host_cpu_features().get(feature, False) for feature in ("avx512bf16", "avx512vl", "fma"))
"""Whether the processor rounds 8 float32 to bf16 at once (vcvtneps2bf16)."""
QUICK_LANES = 8
_WORDS, _INTS = ir.VectorType(I16, QUICK_LANES), ir.VectorType(I32, QUICK_LANES)
_FLOATS = ir.VectorType(ir.FloatType(), QUICK_LANES)


def _rows(builder: Any, base: Any, at: Any, step: Any, n: int) -> list[Any]:
    """The same 8 columns of n rows as float32."""
    shift, found = ir.Constant(_INTS, [16] * QUICK_LANES), []
    for row in range(n):
        place = builder.add(at, builder.mul(step, I64(row)))
        words = load(builder, element_pointer(builder, base, place, _WORDS))
        found.append(builder.bitcast(builder.shl(builder.zext(words, _INTS), shift), _FLOATS))
    return found


def _spread(builder: Any, rows: list[Any]) -> list[Any]:
    """Sums and differences of rows as `rotation` makes them, the factor within the first."""
    n = len(rows)
    factor, half = ir.Constant(_FLOATS, [1 / math.sqrt(n)] * QUICK_LANES), n // 2
    fma = function(builder, f"llvm.fma.v{QUICK_LANES}f32", _FLOATS, [_FLOATS] * 3)
    for row in range(half):
        other = builder.fmul(rows[row + half], factor)
        rows[row], rows[row + half] = (
            builder.call(fma, [rows[row], factor, part]) for part in (other, builder.fneg(other))
        )
    while half := half // 2:
        for first in (row for row in range(n) if not row & half):
            a, b = rows[first], rows[first + half]
            rows[first], rows[first + half] = builder.fadd(a, b), builder.fsub(a, b)
    return rows


def _rounded(builder: Any, row: Any) -> Any:
    """8 float32 as bf16. Without the processor's instruction this is compiled but never called (`QUICK`): cut off."""
    if not QUICK:
        upper = builder.lshr(builder.bitcast(row, _INTS), ir.Constant(_INTS, [16] * QUICK_LANES))
        return builder.trunc(upper, _WORDS)
    numbers = ir.VectorType(BFloat(), QUICK_LANES)
    rounding = function(builder, "llvm.x86.avx512bf16.cvtneps2bf16.256", numbers, [_FLOATS])
    return builder.bitcast(builder.call(rounding, [row]), _WORDS)


@intrinsic
def _rotate(_typing: Any, source: Any, _from: Any, target: Any, _to: Any, _step: Any, _home: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        origin, result = (data(context, builder, signature.args[index], args[index]) for index in (0, 2))
        home = element_pointer(builder, builder.inttoptr(args[5], I32.as_pointer()), I64(LARGEST), _WORDS)
        mask, most = ir.Constant(_WORDS, [0x7FFF] * QUICK_LANES), load(builder, home)
        for row, value in enumerate(_spread(builder, _rows(builder, origin, args[1], args[4], 16))):
            words = _rounded(builder, value)
            place = builder.add(args[3], builder.mul(args[4], I64(row)))
            store(builder, words, element_pointer(builder, result, place, _WORDS))
            most = larger(builder, builder.and_(words, mask), most)
        store(builder, most, home)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64, types.uint64), generate


@helper
def rotate_columns(source: Word, first: Word, target: Word, begin: Word, step: Word, home: Word) -> None:
    """8 columns of the 16 rows, which are `step` elements apart, from `first` on to `begin` on.

    `home` is the address of the lanes of the group (`codec_vectors`), whose largest magnitudes grow.
    """
    _rotate(source, first, target, begin, step, home)
