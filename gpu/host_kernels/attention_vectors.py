"""Building blocks of the attention kernel in LLVM's portable IR: vectors of fp32 from elements of any KV dtype.

Everything here runs while a function is compiled and emits instructions; nothing runs on a request. LLVM picks what the
processor has. Memory is read at any address: a promise of more alignment than there is crashes vector code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic as _numba_intrinsic

BF16, FP16, FP32, E4M3, CODED = 0, 1, 2, 3, 4
"""Codes of the dtypes of elements."""
CODES = (BF16, FP16, FP32, E4M3)
ELEMENT_BYTES = (2, 2, 4, 1)
"""Bytes of an element by code."""

_WIDE = bool(llvm.get_host_cpu_features().get("avx512f", False))
LANES = 16 if _WIDE else 8
"""fp32 lanes of a vector: a whole cache line of them where the processor has such registers."""
TOKENS = 4 if _WIDE else 2
"""Tokens of a register tile of scores: with 4 query heads, 16 of 32 registers, or 8 of 16."""

E4M3_SHIFT = 20
"""e4m3's mantissa moved to where fp32 has its own; the exponent is then 2^120 too small (its bias is 7, not 127)."""
_E4M3_BITS = 0x87F00000
_TWICE_NAN = 0xFE

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
_declare: Callable[..., Any] = get_or_insert_function
_READ, _SECOND_LEVEL, _DATA = 0, 2, 1
LINE_BYTES = 64
FUSED = ("contract", "nsz")
"""Let a product and a sum become one instruction; NaN and Inf keep their meaning."""


def intrinsic(typing: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's decorator; what it makes is called without the typing context, which its own annotation does not say."""
    made: Callable[..., Any] = _numba_intrinsic(typing)
    return made


def address(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """A pointer to `kind` at integer address `base` plus `offset` bytes."""
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def load(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """Load a value of `kind`, wherever it lies."""
    value = builder.load(address(builder, base, offset, kind))
    value.align = 1
    return value


def store(builder: Any, value: Any, base: Any, offset: Any) -> None:
    """Store a value, wherever."""
    builder.store(value, address(builder, base, offset, value.type)).align = 1


def ask_for(builder: Any, base: Any, offset: Any, count: int) -> None:
    """Ask for `count` bytes to come into the second-level cache; never faults.

    The first level is too small for what has to be on its way: measured, it gains nothing there.
    """
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = _declare(builder.module, kind, "llvm.prefetch.p0i8")
    for byte in range(0, count, LINE_BYTES):
        place = address(builder, base, builder.add(offset, I64(byte)), I8)
        builder.call(function, [place, I32(_READ), I32(_SECOND_LEVEL), I32(_DATA)])


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """The scalar in every lane."""
    kind = ir.VectorType(scalar.type, lanes)
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, scalar, I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def constant(value: float) -> Any:
    """An fp32 constant in every lane."""
    return ir.Constant(FLOATS, [value] * LANES)


def integers(value: int) -> Any:
    """A 32-bit constant in every lane."""
    return ir.Constant(INTS, [value] * LANES)


def fma(builder: Any, one: Any, other: Any, total: Any) -> Any:
    """one * other + total, fused where the processor can."""
    return builder.fadd(builder.fmul(one, other, flags=FUSED), total, flags=FUSED)


def load_floats(builder: Any, code: int, base: Any, offset: Any) -> Any:
    """LANES elements as fp32; those of e4m3 come 2^120 too small, and their NaN as 480 (see `any_nan`)."""
    if code == FP32:
        return load(builder, base, offset, FLOATS)
    if code == FP16:
        return builder.fpext(load(builder, base, offset, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    if code == BF16:
        halves = load(builder, base, offset, ir.VectorType(I16, LANES))
        return builder.bitcast(builder.shl(builder.zext(halves, INTS), integers(16)), FLOATS)
    # Extending the sign fills the bits above the mantissa's new place, of which all but the topmost are cleared.
    signed = builder.sext(load(builder, base, offset, ir.VectorType(I8, LANES)), INTS)
    return builder.bitcast(builder.and_(builder.shl(signed, integers(E4M3_SHIFT)), integers(_E4M3_BITS)), FLOATS)


def most_e4m3(builder: Any, codes: Any, most: Any) -> Any:
    """The larger of what was seen and twice each code, in every lane: the sign falls out, and NaN is the largest."""
    twice = builder.add(codes, codes)
    return builder.select(builder.icmp_unsigned(">", twice, most), twice, most)


def holds_e4m3_nan(builder: Any, most: Any) -> Any:
    """Whether a NaN is in what `most_e4m3` saw."""
    lanes = most.type.count
    found = builder.icmp_unsigned("==", most, ir.Constant(most.type, [_TWICE_NAN] * lanes))
    bits = ir.IntType(lanes)
    return builder.icmp_unsigned("!=", builder.bitcast(found, bits), bits(0))


def for_case(builder: Any, value: Any, cases: Sequence[int], emit: Callable[[int], None]) -> None:
    """Emit a switch: the code of `emit(case)` runs where value (64 bits) is that case, and nothing for other values."""
    after = builder.append_basic_block("after_cases")
    switch = builder.switch(value, after)
    for case in cases:
        inside = builder.append_basic_block(f"case_{case}")
        switch.add_case(I64(case), inside)
        builder.position_at_end(inside)
        emit(case)
        builder.branch(after)
    builder.position_at_end(after)


def counted_loop(
    builder: Any, count: Any, values: Sequence[Any], body: Callable[[Any, Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Emit `for i in range(count): values = body(i, values)` with the values in registers; returns the last ones."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    carried = [builder.phi(value.type) for value in values]
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    results = body(index, carried)
    index.add_incoming(I64(0), before)
    index.add_incoming(builder.add(index, I64(1)), builder.block)
    for phi, first, again in zip(carried, values, results, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(again, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return carried


def sums_of_lanes(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sum of each vector's lanes, in one vector of as many lanes as there are vectors (at most LANES).

    A tree: each step adds the halves of two vectors' groups of lanes and lays the results side by side.
    """
    count = 1 << (len(vectors) - 1).bit_length()
    parts = [*vectors, *[constant(0.0)] * (count - len(vectors))]
    group = LANES
    while len(parts) > 1:
        parts = [_add_halves(builder, parts[i], parts[i + 1], group) for i in range(0, len(parts), 2)]
        group //= 2
    total = parts[0]
    while group > 1:
        moved = [lane - lane % group + (lane + group // 2) % group for lane in range(LANES)]
        total = builder.fadd(total, pick(builder, total, total, moved))
        group //= 2
    return pick(builder, total, total, [lane * (LANES // count) for lane in range(len(vectors))])


def _add_halves(builder: Any, one: Any, other: Any, group: int) -> Any:
    half, groups = group // 2, LANES // group
    low = [LANES * side + g * group + i for side in (0, 1) for g in range(groups) for i in range(half)]
    high = [lane + half for lane in low]
    return builder.fadd(pick(builder, one, other, low), pick(builder, one, other, high))


def pick(builder: Any, one: Any, other: Any, lanes: Sequence[int]) -> Any:
    """A vector of the given lanes of two."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))
