"""What Numba has no word for: access to memory at a byte offset, prefetch, and comparing eight 16-bit lanes at once.

Each is a few instructions of LLVM's portable IR; LLVM picks what the processor has. Offsets count bytes from the first
byte of a contiguous array and are unchecked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

_READ, _KEEP_IN_ALL_LEVELS, _DATA = 0, 3, 1
_LANES = ir.VectorType(ir.IntType(16), 8)
_I32 = ir.IntType(32)
_declare: Callable[..., Any] = cgutils.get_or_insert_function


def _intrinsic(typing: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's decorator; what it makes is called without the typing context, which its own annotation does not say."""
    made: Callable[..., Any] = _numba_intrinsic(typing)
    return made


def _address(context: Any, builder: Any, signature: Any, args: Any, pointee: Any) -> Any:
    """A pointer to `pointee` at byte args[1] of array args[0]."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    base = builder.bitcast(array.data, ir.IntType(8).as_pointer())
    offset = context.cast(builder, args[1], signature.args[1], types.intp)
    return builder.bitcast(builder.gep(base, [offset]), pointee.as_pointer())


def _load(context: Any, builder: Any, signature: Any, args: Any, kind: Any) -> Any:
    value = builder.load(_address(context, builder, signature, args, kind))
    # Keys arrive inside network frames at any address; promising more alignment than there is crashes vector code.
    value.align = 1
    return value


def _loader(bits: int, result: Any) -> Any:
    def typed(_typing: Any, array: Any, offset: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _load(context, builder, signature, args, ir.IntType(bits))

        return result(array, offset), codegen

    return _intrinsic(typed)


def _storer(bits: int, stored: Any) -> Any:
    def typed(_typing: Any, array: Any, offset: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            cast = context.cast(builder, args[2], signature.args[2], stored)
            store = builder.store(cast, _address(context, builder, signature, args, ir.IntType(bits)))
            store.align = 1
            return context.get_dummy_value()

        return types.void(array, offset, value), codegen

    return _intrinsic(typed)


load_u64 = _loader(64, types.uint64)
"""`load_u64(array, offset) -> uint64`; so the others, of their widths."""
load_i32 = _loader(32, types.int32)
load_u16 = _loader(16, types.uint16)
store_u64 = _storer(64, types.uint64)
"""`store_u64(array, offset, value)`; so the others, of their widths; higher bits of the value are cut off."""
store_i32 = _storer(32, types.int32)
store_u16 = _storer(16, types.uint16)


@_intrinsic
def prefetch(_typing: Any, array: Any, offset: Any) -> Any:
    """`prefetch(array, offset)`: ask for the cache line there; never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, signature, args, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = _declare(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, _I32(_READ), _I32(_KEEP_IN_ALL_LEVELS), _I32(_DATA)])
        return context.get_dummy_value()

    return types.void(array, offset), codegen


@_intrinsic
def match_lanes(_typing: Any, array: Any, offset: Any, value: Any) -> Any:
    """`match_lanes(array, offset, value) -> uint64`: bit i is set where the i-th of eight uint16 equals `value`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(context, builder, signature, args, _LANES)
        wanted = context.cast(builder, args[2], signature.args[2], types.uint16)
        anything = ir.Constant(_LANES, ir.Undefined)
        one = builder.insert_element(anything, wanted, _I32(0))
        all_lanes = builder.shuffle_vector(one, anything, ir.Constant(ir.VectorType(_I32, 8), [0] * 8))
        bits = builder.bitcast(builder.icmp_unsigned("==", found, all_lanes), ir.IntType(8))
        return builder.zext(bits, ir.IntType(64))

    return types.uint64(array, offset, value), codegen


@_intrinsic
def lowest_bit(_typing: Any, bits: Any) -> Any:
    """`lowest_bit(uint64) -> int64`: index of the lowest set bit; 64 of zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = context.cast(builder, args[0], signature.args[0], types.uint64)
        return builder.cttz(value, ir.IntType(1)(0))

    return types.int64(bits), codegen


@_intrinsic
def leading_zeros(_typing: Any, bits: Any) -> Any:
    """`leading_zeros(uint64) -> int64`: zero bits above the highest set one; 64 of zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = context.cast(builder, args[0], signature.args[0], types.uint64)
        return builder.ctlz(value, ir.IntType(1)(0))

    return types.int64(bits), codegen


@_intrinsic
def count_bits(_typing: Any, bits: Any) -> Any:
    """`count_bits(uint64) -> int64`: how many bits are set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(context.cast(builder, args[0], signature.args[0], types.uint64))

    return types.int64(bits), codegen


@_intrinsic
def touch(_typing: Any, array: Any, offset: Any) -> Any:
    """`touch(array, offset)`: make the kernel back the page there for writing; offset a multiple of 8.

    Changes nothing, even if another thread writes there: it compares with 0 and exchanges for 0, in one atomic step.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, zero = _address(context, builder, signature, args, ir.IntType(64)), ir.IntType(64)(0)
        builder.cmpxchg(pointer, zero, zero, "monotonic", "monotonic")
        return context.get_dummy_value()

    return types.void(array, offset), codegen
