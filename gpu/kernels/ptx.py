"""Inline PTX as Numba intrinsics: how they are made, and those that work on registers of a warp.

PTX ISA 8.8, sections 9.7 (instructions) and 9.7.14 (matrix fragments). An instruction in which other lanes take part is
`volatile`: it stays where it is. One that touches memory says so too (`memory`), so that no access moves across it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.core.targetconfig import ConfigStack
from numba.cuda.extending import intrinsic

__all__ = [
    "bits_of",
    "broadcast_f32",
    "broadcast_u32",
    "device_function",
    "exchange_f32",
    "exchange_u32",
    "exp2",
    "float_of",
    "mma_bf16",
    "mma_f16",
    "product",
    "sync_warp",
]

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FIRST_WITH_E4M3 = (8, 9)
"""The first compute capability that converts e4m3 in hardware."""

_LETTERS = {types.uint16: "h", types.uint32: "r", types.float32: "f", types.uint64: "l"}
_LLVM = {types.uint16: I16, types.uint32: I32, types.float32: F32, types.uint64: I64}

# Inlined by Numba itself: a function that is compiled apart is compiled for the current device, and there may be none.
device_function: Callable[[Any], Any] = cuda.jit(device=True, inline="always")


def compute_capability() -> tuple[int, int]:
    """What is being compiled for; only inside the code generation of an intrinsic."""
    major, minor, *_ = ConfigStack.top_or_none().compute_capability
    return major, minor


def emit(
    builder: Any,
    text: str,
    results: Sequence[Any],
    operands: Sequence[Any],
    letters: str,
    *,
    volatile: bool = False,
    memory: bool = False,
) -> list[Any]:
    """Emit one asm statement; `results` are Numba types, `letters` the constraints of the operands. Returns values.

    In `text`, `$0 …` are the results, then the operands.
    """
    kinds = [_LLVM[kind] for kind in results]
    returned = ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    clobbers = ["~{memory}"] if memory else []
    # "&": a result may be written before all operands are read, where the text has several instructions.
    constraints = ",".join([*(f"=&{_LETTERS[kind]}" for kind in results), *letters, *clobbers])
    function = ir.FunctionType(returned, [operand.type for operand in operands])
    value = builder.call(ir.InlineAsm(function, text, constraints, side_effect=volatile or memory), operands)
    if len(kinds) < 2:
        return [value] * len(kinds)
    return [builder.extract_value(value, index) for index in range(len(kinds))]


def packed(context: Any, builder: Any, values: Sequence[Any]) -> Any:
    """One value as it is, none as Numba's void, several as a tuple."""
    if not values:
        return context.get_dummy_value()
    return values[0] if len(values) == 1 else cgutils.pack_array(builder, values)


def returned(results: Sequence[Any]) -> Any:
    """The Numba type of what `packed` makes."""
    if not results:
        return types.void
    return results[0] if len(results) == 1 else types.UniTuple(results[0], len(results))


def with_arity(count: int, typed: Callable[..., Any]) -> Any:
    """An intrinsic of `count` arguments: Numba reads their number from the function's own signature."""
    shapes: dict[int, Callable[..., Any]] = {
        0: lambda _typing: typed(),
        1: lambda _typing, a: typed(a),
        2: lambda _typing, a, b: typed(a, b),
        3: lambda _typing, a, b, c: typed(a, b, c),
        4: lambda _typing, a, b, c, d: typed(a, b, c, d),
        5: lambda _typing, a, b, c, d, e: typed(a, b, c, d, e),
        6: lambda _typing, a, b, c, d, e, f: typed(a, b, c, d, e, f),
    }
    return intrinsic(shapes[count])


def instruction(text: str, results: Sequence[Any], parameters: Sequence[Any], **effects: bool) -> Any:
    """An intrinsic that is one asm statement on scalars and tuples; arguments are cast to `parameters`."""
    letters = "".join(_letters(kind) for kind in parameters)

    def typed(*_given: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            operands = [
                value for arg, kind in zip(args, parameters, strict=True) for value in _flat(builder, arg, kind)
            ]
            return packed(context, builder, emit(builder, text, results, operands, letters, **effects))

        return returned(results)(*parameters), generate

    return with_arity(len(parameters), typed)


def _letters(kind: Any) -> str:
    return _LETTERS[kind.dtype] * kind.count if isinstance(kind, types.UniTuple) else _LETTERS[kind]


def _flat(builder: Any, value: Any, kind: Any) -> list[Any]:
    return cgutils.unpack_tuple(builder, value, kind.count) if isinstance(kind, types.UniTuple) else [value]


_ALL_LANES = "0xffffffff"
_WORDS4, _WORDS2 = types.UniTuple(types.uint32, 4), types.UniTuple(types.uint32, 2)
_FLOATS4 = types.UniTuple(types.float32, 4)


def _shuffle(kind: Any, mode: str) -> Any:
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, 0x1f, {_ALL_LANES};"
    return instruction(text, [kind], [kind, types.uint32], volatile=True)


def _mma(kind: str) -> Any:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return instruction(text, [types.float32] * 4, [_WORDS4, _WORDS2, _FLOATS4], volatile=True)


exchange_f32, exchange_u32 = _shuffle(types.float32, "bfly"), _shuffle(types.uint32, "bfly")
broadcast_f32, broadcast_u32 = _shuffle(types.float32, "idx"), _shuffle(types.uint32, "idx")
mma_bf16, mma_f16 = _mma("bf16"), _mma("f16")
sync_warp = instruction(f"bar.warp.sync {_ALL_LANES};", [], [], memory=True)
product = instruction("mul.rn.f32 $0, $1, $2;", [types.float32], [types.float32] * 2)
exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", [types.float32], [types.float32])


@functools.partial(with_arity, 1)
def bits_of(value: Any) -> Any:
    """The bits of a float32 as uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    del value
    return types.uint32(types.float32), generate


@functools.partial(with_arity, 1)
def float_of(word: Any) -> Any:
    """The float32 with these bits; higher bits of a wider integer are cut off."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    del word
    return types.float32(types.uint32), generate
