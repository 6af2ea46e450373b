"""Conversions of floats as inline PTX: pairs of bf16 and f16, and e4m3 with or without its hardware instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from kvtierd.gpu.kernels.ptx import (
    F32,
    FIRST_WITH_E4M3,
    I16,
    I32,
    compute_capability,
    emit,
    instruction,
    packed,
)

__all__ = [
    "bf16_pair",
    "e4m3_word",
    "f16_of_e4m3",
    "f16_pair",
    "floats_of_bf16",
    "floats_of_f16",
]

# The first operand of these conversions goes to the upper half.
bf16_pair = instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", [types.uint32], [types.float32] * 2)
f16_pair = instruction("cvt.rn.f16x2.f32 $0, $2, $1;", [types.uint32], [types.float32] * 2)
floats_of_bf16 = instruction("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", [types.float32] * 2, [types.uint32])
floats_of_f16 = instruction(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }",
    [types.float32] * 2,
    [types.uint32],
)


@intrinsic
def f16_of_e4m3(_typing: Any, word: Any) -> Any:
    """`f16_of_e4m3(word)`: four codes as two words of two f16 each; exact, NaN stays NaN."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        halves = [builder.trunc(args[0], I16), builder.trunc(builder.lshr(args[0], I32(16)), I16)]
        decode = _decode_pair if compute_capability() >= FIRST_WITH_E4M3 else _decode_pair_by_hand
        return packed(context, builder, [decode(builder, half) for half in halves])

    del word
    return types.UniTuple(types.uint32, 2)(types.uint32), generate


@intrinsic
def e4m3_word(_typing: Any, f0: Any, f1: Any, f2: Any, f3: Any) -> Any:
    """`e4m3_word(f0, f1, f2, f3)`: nearest even, saturating at 448 (Inf too); NaN is 0x7f with the sign it had."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        encode = _encode_pair if compute_capability() >= FIRST_WITH_E4M3 else _encode_pair_by_hand
        low, high = encode(builder, *args[:2]), encode(builder, *args[2:])
        return builder.or_(low, builder.shl(high, I32(16)))

    del f0, f1, f2, f3
    return types.uint32(*[types.float32] * 4), generate


def _decode_pair(builder: Any, pair: Any) -> Any:
    return emit(builder, "cvt.rn.f16x2.e4m3x2 $0, $1;", [types.uint32], [pair], "h")[0]


def _decode_pair_by_hand(builder: Any, pair: Any) -> Any:
    """Shift the code into an f16, whose exponent has a bias of 15 instead of 7, and multiply by 2^8.

    Denormals come out right because the multiplication normalises them. 0x7f would be 480: it gets the bits of a NaN.
    """
    word = builder.zext(pair, I32)
    spread = builder.or_(builder.and_(word, I32(0xFF)), builder.shl(builder.and_(word, I32(0xFF00)), I32(8)))
    sign = builder.shl(builder.and_(spread, I32(0x00800080)), I32(8))
    magnitude = builder.and_(spread, I32(0x007F007F))
    scaled = emit(
        builder,
        "{ .reg .b32 t; mov.b32 t, 0x5c005c00; mul.rn.f16x2 $0, $1, t; }",
        [types.uint32],
        [builder.shl(magnitude, I32(7))],
        "r",
    )[0]
    nan = builder.and_(builder.add(magnitude, I32(0x00010001)), I32(0x00800080))
    return builder.or_(builder.or_(scaled, sign), builder.mul(nan, I32(0xFC)))


def _encode_pair(builder: Any, low: Any, high: Any) -> Any:
    text = "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }"
    pair = emit(builder, text, [types.uint32], [low, high], "ff")[0]
    # The instruction makes every NaN positive; ours keeps its sign. All others carry their sign already.
    signs = builder.or_(_sign(builder, low), builder.shl(_sign(builder, high), I32(8)))
    return builder.or_(pair, signs)


def _encode_pair_by_hand(builder: Any, low: Any, high: Any) -> Any:
    return builder.or_(_encode_by_hand(builder, low), builder.shl(_encode_by_hand(builder, high), I32(8)))


def _encode_by_hand(builder: Any, value: Any) -> Any:
    """As `kvtierd.gpu.host_kernels.e4m3.code_of`, in LLVM's words."""
    bits = builder.and_(builder.bitcast(value, I32), I32(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(bits, I32(20)), I32(1))
    rounded = builder.add(builder.add(bits, I32(0x7FFFF)), odd)
    normal = builder.sub(builder.lshr(rounded, I32(20)), I32(120 << 3))
    magic = ir.Constant(F32, 16384.0)
    small = builder.bitcast(builder.fadd(builder.bitcast(bits, F32), magic), I32)
    small = builder.sub(small, I32(0x46800000))
    code = builder.select(builder.icmp_unsigned("<", bits, I32(0x3C800000)), small, normal)
    code = builder.select(builder.icmp_unsigned("<", code, I32(0x7E)), code, I32(0x7E))
    code = builder.select(builder.icmp_unsigned(">", bits, I32(0x7F800000)), I32(0x7F), code)
    return builder.or_(code, _sign(builder, value))


def _sign(builder: Any, value: Any) -> Any:
    return builder.and_(builder.lshr(builder.bitcast(value, I32), I32(24)), I32(0x80))
