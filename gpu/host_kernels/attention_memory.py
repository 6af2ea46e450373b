"""Single elements at plain addresses, and the decoding of rows that the register tiles cannot take as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kvtierd.gpu.host_kernels.attention_vectors import (
    BF16,
    F32,
    FP16,
    FP32,
    I8,
    I16,
    I32,
    I64,
    LINE_BYTES,
    ask_for,
    intrinsic,
    load,
    store,
)
from kvtierd.gpu.host_kernels.e4m3 import e4m3_values
from kvtierd.index.jit import Word, helper, subroutine

E4M3_VALUES = e4m3_values()
"""float32 [256]: what each byte of e4m3 stands for."""


def _reader(kind: Any, result: Any, widen: Callable[[Any, Any], Any]) -> Any:
    def typed(_typing: Any, _place: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return widen(builder, load(builder, args[0], I64(0), kind))

        return result(types.uint64), codegen

    return intrinsic(typed)


get_byte = _reader(I8, types.uint8, lambda _builder, value: value)
"""`get_byte(address) -> uint8`."""
get_fp32 = _reader(F32, types.float32, lambda _builder, value: value)
"""`get_fp32(address) -> float32`; so the next two, of their formats."""
get_fp16 = _reader(ir.HalfType(), types.float32, lambda builder, value: builder.fpext(value, F32))
get_bf16 = _reader(
    I16, types.float32, lambda builder, value: builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), F32)
)


@intrinsic
def put_fp32(_typing: Any, _place: Any, _value: Any) -> Any:
    """`put_fp32(address, float32)`."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        store(builder, args[1], args[0], I64(0))
        return context.get_dummy_value()

    return types.void(types.uint64, types.float32), codegen


@intrinsic
def _ask_for_line(_typing: Any, _place: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        ask_for(builder, args[0], I64(0), LINE_BYTES)
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


@helper
def ask_at_once(address: Word, count: Word) -> None:
    """Ask for `count` bytes to come into the second-level cache; never faults."""
    for byte in range(0, count, LINE_BYTES):
        _ask_for_line(address + np.uint64(byte))


@helper
def get_element(code: Word, address: Word) -> Word:
    """The element of a dtype's code at an address, as fp32."""
    if code == BF16:
        return get_bf16(address)
    if code == FP16:
        return get_fp16(address)
    if code == FP32:
        return get_fp32(address)
    return E4M3_VALUES[get_byte(address)]


@subroutine
def decode_rows(
    code: Word,
    width: Word,
    source: Word,
    stride: Word,
    rows: Word,
    dim: Word,
    factor: Word,
    target: Word,
    target_stride: Word,
) -> Word:
    """Rows of `dim` elements of `width` bytes as fp32 times factor; the rest of target_stride bytes is zero."""
    for row in range(rows):
        place = target + np.uint64(row * target_stride)
        start = source + np.uint64(row * stride)
        for i in range(dim):
            put_fp32(place + np.uint64(4 * i), get_element(code, start + np.uint64(i * width)) * factor)
        for i in range(dim, target_stride // 4):
            put_fp32(place + np.uint64(4 * i), np.float32(0.0))
