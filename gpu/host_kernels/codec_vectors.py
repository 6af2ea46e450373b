"""The inner loops of the codec in LLVM's portable vectors: what Numba does not vectorise by itself.

Everything here runs while a kernel is compiled and emits instructions; nothing runs on a request. Vectors have as many
lanes as fill a cache line of float32; LLVM splits them where the processor's registers are narrower. What is left of a
run behind the last whole vector is done lane by lane by the caller. Memory is read and written at any address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

from kvtierd.gpu.host_kernels.e4m3 import BF16, FP16, FP32

LANES = 16
I8, I16, I32, I64, _F32, _F16 = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType(), ir.HalfType()
INTS, FLOATS, _BYTES = (ir.VectorType(kind, LANES) for kind in (I32, _F32, I8))
_ELEMENTS = {BF16: I16, FP16: _F16, FP32: _F32}
WORDS, _WIDE_BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 2 * LANES)

TABLE_LOOKUPS = bool(llvm.get_host_cpu_features().get("avx512bw", False))
"""Whether the processor looks up 32 and 64 entries of 16 bits at once (vpermw, vpermi2w)."""


def intrinsic(typing: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's decorator; what it makes is called without the typing context, which its own annotation does not say."""
    made: Callable[..., Any] = _numba_intrinsic(typing)
    return made


def splat(value: int) -> Any:
    """A vector of one integer."""
    return ir.Constant(INTS, [value] * LANES)


def element_pointer(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """A pointer to `kind` at element `index` of a typed base pointer, reinterpreted."""
    return builder.bitcast(builder.gep(base, [index]), kind.as_pointer())


def load(builder: Any, pointer: Any) -> Any:
    """Load without a promise of alignment: overstated alignment crashes vector code."""
    value = builder.load(pointer)
    value.align = 1
    return value


def store(builder: Any, value: Any, pointer: Any) -> None:
    """Store without a promise of alignment."""
    builder.store(value, pointer).align = 1


def store_streamed(builder: Any, value: Any, pointer: Any) -> None:
    """Store a whole aligned cache line past the caches: it is not read first, and nothing else is pushed out.

    Another thread sees it after the next locked instruction of this one, which every hand-over has.
    """
    kept = builder.store(value, pointer)
    kept.align = 64
    kept.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))


def prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the cache line at a pointer to come into the second-level cache; never faults."""
    kind = [pointer.type, I32, I32, I32]
    builder.call(function(builder, "llvm.prefetch.p0", ir.VoidType(), kind), [pointer, I32(0), I32(2), I32(1)])


def function(builder: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """One of LLVM's own functions."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """Pointer to the first element of an array."""
    return context.make_array(kind)(context, builder, array).data


def widened(builder: Any, kind: int, pointer: Any) -> Any:
    """LANES elements of a kind as float32."""
    values = load(builder, builder.bitcast(pointer, ir.VectorType(_ELEMENTS[kind], LANES).as_pointer()))
    if kind == FP16:
        return builder.fpext(values, FLOATS)
    if kind == BF16:
        return builder.bitcast(builder.shl(builder.zext(values, INTS), splat(16)), FLOATS)
    return values


def larger(builder: Any, left: Any, right: Any) -> Any:
    """Unsigned maximum."""
    return builder.select(builder.icmp_unsigned(">", left, right), left, right)


def strided(builder: Any, begin: Any, end: Any, step: int, body: Callable[[Any], None]) -> None:
    """`for index in range(begin, end - step + 1, step): body(index)`."""
    index = cgutils.alloca_once_value(builder, begin)
    check, inside, after = (builder.append_basic_block(name) for name in ("check", "inside", "after"))
    builder.branch(check)
    builder.position_at_end(check)
    at = builder.load(index)
    fits = builder.icmp_signed("<=", builder.add(at, I64(step)), end)
    builder.cbranch(fits, inside, after)
    builder.position_at_end(inside)
    body(at)
    builder.store(builder.add(at, I64(step)), index)
    builder.branch(check)
    builder.position_at_end(after)


class Lanes:
    """A vector that a loop changes: read from memory before it, written back behind it, in registers meanwhile."""

    def __init__(self, builder: Any, home: Any, offset: int, kind: Any) -> None:
        self._builder = builder
        self._home = element_pointer(builder, home, I64(offset), kind)
        self._place = cgutils.alloca_once(builder, kind)
        builder.store(load(builder, self._home), self._place)

    def update(self, change: Callable[[Any], Any]) -> None:
        """Replace the value by `change(value)`."""
        self._builder.store(change(self._builder.load(self._place)), self._place)

    def write_back(self) -> None:
        """Put it where it came from."""
        store(self._builder, self._builder.load(self._place), self._home)


LOST, TOTAL, WORST, LARGEST = (LANES * index for index in range(4))
"""Where the lanes lie in the memory (`home`, an address) that a group's loops share: squared errors, squares (both
float32), errors, elements (both bits)."""
LANE_WORDS = 4 * LANES


def _encoder(kind: int) -> Any:
    @intrinsic
    def encode(_typing: Any, source: Any, codes: Any, _begin: Any, _end: Any, _factor: Any, _home: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            origin, target = (data(context, builder, signature.args[i], args[i]) for i in (0, 1))
            home = builder.inttoptr(args[5], I32.as_pointer())
            factors = _broadcast(builder, args[4])
            lost, total = Lanes(builder, home, LOST, FLOATS), Lanes(builder, home, TOTAL, FLOATS)
            worst = Lanes(builder, home, WORST, INTS)

            def step(at: Any) -> None:
                values = builder.fmul(widened(builder, kind, builder.gep(origin, [at])), factors)
                code, error, size = _round(builder, values)
                store(builder, code, element_pointer(builder, target, at, _BYTES))
                _account(builder, size, error, lost, total, worst)

            strided(builder, args[2], args[3], LANES, step)
            for part in (lost, total, worst):
                part.write_back()
            return context.get_dummy_value()

        return types.void(source, codes, types.int64, types.int64, types.float32, types.uint64), generate

    return encode


def _round(builder: Any, values: Any) -> tuple[Any, Any, Any]:
    """Codes, errors and magnitudes of finite values of at most 448; as `e4m3.code_of` says."""
    bits = builder.bitcast(values, INTS)
    magnitude = builder.and_(bits, splat(0x7FFFFFFF))
    exponent = larger(builder, builder.and_(bits, splat(0x7F800000)), splat(121 << 23))
    steps = builder.add(exponent, splat(20 << 23))
    added, size = builder.bitcast(steps, FLOATS), builder.bitcast(magnitude, FLOATS)
    rounded = builder.fadd(size, added)
    error = builder.fsub(size, builder.fsub(rounded, added))
    code = builder.sub(builder.bitcast(rounded, INTS), steps)
    code = builder.add(code, builder.lshr(exponent, splat(20)))
    code = builder.sub(code, splat(1128 - 160))
    code = builder.or_(code, builder.and_(builder.lshr(bits, splat(24)), splat(0x80)))
    return builder.trunc(code, _BYTES), error, size


def _account(builder: Any, size: Any, error: Any, lost: Lanes, total: Lanes, worst: Lanes) -> None:
    """Add a vector of magnitudes and of errors to what is known of a group."""
    lost.update(lambda seen: multiply_add(builder, error, error, seen))
    total.update(lambda seen: multiply_add(builder, size, size, seen))
    bits = builder.and_(builder.bitcast(error, INTS), splat(0x7FFFFFFF))
    worst.update(lambda seen: larger(builder, bits, seen))


def multiply_add(builder: Any, left: Any, right: Any, start: Any) -> Any:
    """left * right + start, fused where that is as fast."""
    fma = function(builder, f"llvm.fmuladd.v{LANES}f32", FLOATS, [FLOATS] * 3)
    return builder.call(fma, [left, right, start])


def _broadcast(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, ir.Constant(FLOATS, ir.Undefined), ir.Constant(INTS, None))


encode_bf16_run, encode_fp16_run, encode_fp32_run = (_encoder(kind) for kind in (BF16, FP16, FP32))
"""`encode_…_run(source, codes, begin, end, factor, home)` over the whole vectors of begin..end."""


def _finder(bits: int) -> Any:
    """Largest magnitude (the element without its sign bit) by lanes of `bits`."""
    vector = ir.VectorType(ir.IntType(bits), 512 // bits)

    @intrinsic
    def find(_typing: Any, source: Any, _begin: Any, _end: Any, _home: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            origin = data(context, builder, signature.args[0], args[0])
            home = builder.inttoptr(args[3], I32.as_pointer())
            most = Lanes(builder, home, LARGEST, vector)
            mask = ir.Constant(vector, [(1 << (bits - 1)) - 1] * vector.count)

            def step(at: Any) -> None:
                values = builder.and_(load(builder, element_pointer(builder, origin, at, vector)), mask)
                most.update(lambda seen: larger(builder, values, seen))

            strided(builder, args[1], args[2], vector.count, step)
            most.write_back()
            return context.get_dummy_value()

        return types.void(source, types.int64, types.int64, types.uint64), generate

    return find


largest_of_16_bits, largest_of_32_bits = _finder(16), _finder(32)
"""`largest_of_…(source, begin, end, home)` over the whole vectors (64 bytes each) of begin..end."""


@intrinsic
def decode_run(_typing: Any, codes: Any, target: Any, table: Any, _begin: Any, _end: Any, _sign_nan: Any) -> Any:
    """`decode_run(codes, target, table, begin, end, sign_nan)` over the whole vectors of begin..end.

    `table` is uint16 [128], of the codes without a sign; the sign goes to the topmost bit, that of NaN if wanted.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        origin, result, entries = (data(context, builder, signature.args[index], args[index]) for index in range(3))
        quarters = [load(builder, element_pointer(builder, entries, I64(32 * part), WORDS)) for part in range(4)]
        lookup = function(builder, "llvm.x86.avx512.vpermi2var.hi.512", WORDS, [WORDS] * 3)
        wide = ir.VectorType(I8, 2 * LANES)
        flags = ir.VectorType(ir.IntType(1), 2 * LANES)
        all_signs = builder.select(
            args[5], ir.Constant(flags, [1] * flags.count), ir.Constant(flags, [0] * flags.count)
        )

        def constant(value: int) -> Any:
            return ir.Constant(WORDS, [value] * (2 * LANES))

        def step(at: Any) -> None:
            code = builder.zext(load(builder, element_pointer(builder, origin, at, wide)), WORDS)
            low, high = (builder.call(lookup, [first, code, second]) for first, second in (quarters[:2], quarters[2:]))
            upper = builder.icmp_unsigned("!=", builder.and_(code, constant(64)), constant(0))
            value = builder.select(upper, high, low)
            number = builder.icmp_unsigned("!=", builder.and_(code, constant(0x7F)), constant(0x7F))
            signs = builder.select(builder.or_(number, all_signs), constant(0x8000), constant(0))
            sign = builder.and_(builder.shl(code, constant(8)), signs)
            store(builder, builder.or_(value, sign), element_pointer(builder, result, at, WORDS))

        strided(builder, args[3], args[4], 2 * LANES, step)
        return context.get_dummy_value()

    return types.void(codes, target, table, types.int64, types.int64, types.boolean), generate
