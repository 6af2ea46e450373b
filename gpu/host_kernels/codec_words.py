"""bf16 to e4m3 in lanes of 16 bits: the codec's fastest loop. See `codec_vectors` for what is common to all loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from kvtierd.gpu.host_kernels.codec_vectors import (
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    LOST,
    TABLE_LOOKUPS,
    TOTAL,
    WORDS,
    WORST,
    Lanes,
    data,
    element_pointer,
    function,
    intrinsic,
    larger,
    load,
    multiply_add,
    prefetch,
    splat,
    store,
    store_streamed,
    strided,
)

_WIDE_BYTES, _LINE = ir.VectorType(I8, 2 * LANES), ir.VectorType(I8, 4 * LANES)
_PLACES = ir.VectorType(I32, 4 * LANES)
AT_ONCE = 2 * LANES
"""Elements of which a run is to be a multiple."""

DOT_PRODUCTS = bool(llvm.get_host_cpu_features().get("avx512bf16", False))
"""Whether it adds up products of pairs of bf16 (vdpbf16ps)."""


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's name for bf16, which llvmlite has not."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def _errors_by_low_bits() -> npt.NDArray[np.uint16]:
    last, rest = np.arange(32) >> 4, np.arange(32) & 15
    down = (rest < 8) | ((rest == 8) & (last == 0))
    units = np.where(down, rest, 16 - rest).astype(np.float32)
    bits = (units / 128).view(np.uint32) >> 16
    return np.where(units == 0, 0xFFFF, 0x3F80 - bits.astype(np.int64)).astype(np.uint16)


ERRORS_BY_LOW_BITS = _errors_by_low_bits()
"""By the 5 lowest bits of a bf16 whose 4 lowest are rounded off: the bf16 bits of its exponent alone less those of the
error's magnitude; more than any exponent where there is no error. uint16 [32]."""


@intrinsic
def encode_bf16_words(
    _typing: Any, source: Any, codes: Any, _begin: Any, _end: Any, _smallest: Any, _home: Any, errors: Any,
    _ahead: Any, _stream: Any,
) -> Any:  # fmt: skip
    """`encode_bf16_words(source, codes, begin, end, smallest, home, errors, ahead, stream)`: as `encode_bf16_run`.

    In fewer instructions: unscaled, in lanes of 16 bits, and 64 elements at once that have none below `smallest`, the
    scaled 2^-6 as bf16 bits. Of these, the code's last bit and the 4 bits behind it say how they are rounded and which
    error that leaves: `errors` is `ERRORS_BY_LOW_BITS`. Elements are finite, of at most 448 scales, and scales and
    elements of a size that squares of float32 hold; end - begin is a multiple of 32, and errors are in units of the
    elements. What lies `ahead` elements further (0: nothing) is asked for. `stream`: codes are written past the caches,
    for which both they and begin are multiples of 64.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        origin, target, table = (data(context, builder, signature.args[i], args[i]) for i in (0, 1, 6))
        home = builder.inttoptr(args[5], I32.as_pointer())
        smallest = _same_words(builder, args[4])
        lost, total = Lanes(builder, home, LOST, FLOATS), Lanes(builder, home, TOTAL, FLOATS)
        worst = Lanes(builder, home, WORST, WORDS)
        know = _Sums(builder, lost, total, worst)

        def small(at: Any) -> None:
            _encode_words(builder, know, load(builder, element_pointer(builder, origin, at, WORDS)), smallest,
                          element_pointer(builder, target, at, _WIDE_BYTES))  # fmt: skip

        def wide(streamed: bool) -> Callable[[Any], None]:
            def step(at: Any) -> None:
                places = at, builder.add(at, I64(2 * LANES))
                words = [load(builder, element_pointer(builder, origin, place, WORDS)) for place in places]
                prefetch(builder, element_pointer(builder, origin, builder.add(at, args[7]), I8))
                prefetch(builder, element_pointer(builder, origin, builder.add(places[1], args[7]), I8))
                exponents = [builder.and_(word, _words(0x7F80)) for word in words]
                least = builder.select(builder.icmp_unsigned("<", *exponents), *exponents)
                plain = builder.icmp_unsigned("==", _any(builder, builder.icmp_unsigned("<", least, smallest)), I32(0))
                with builder.if_else(plain, likely=True) as (then, otherwise):
                    with then:
                        entries = load(builder, element_pointer(builder, table, I64(0), WORDS))
                        made = [_plain_words(builder, know, *two, smallest, entries) for two in
                                zip(words, exponents, strict=True)]  # fmt: skip
                        both = builder.shuffle_vector(*made, ir.Constant(_PLACES, list(range(1, 128, 2))))
                        place = element_pointer(builder, target, at, both.type)
                        store_streamed(builder, both, place) if streamed else store(builder, both, place)
                    with otherwise:
                        for place in places:
                            small(place)

            return step

        whole = args[2]
        if TABLE_LOOKUPS:
            whole = builder.add(args[2], builder.and_(builder.sub(args[3], args[2]), I64(-4 * LANES)))
            with builder.if_else(args[8]) as (streaming, caching):
                with streaming:
                    strided(builder, args[2], whole, 4 * LANES, wide(streamed=True))
                with caching:
                    strided(builder, args[2], whole, 4 * LANES, wide(streamed=False))
        strided(builder, whole, args[3], 2 * LANES, small)
        for part in (lost, total, worst):
            part.write_back()
        return context.get_dummy_value()

    return types.void(
        source, codes, types.int64, types.int64, types.uint16, types.uint64, errors, types.int64, types.boolean
    ), generate


def _plain_words(builder: Any, know: _Sums, words: Any, exponents: Any, smallest: Any, entries: Any) -> Any:
    """32 elements that become normal numbers of e4m3: the code is the upper byte of each word."""
    # Four bits further left the code's bits are the upper byte's, and what lies above them falls off. Half a step less
    # one, and one more where the last bit is set, make of cutting off a rounding to nearest even.
    offset = builder.sub(_words(0x70 + 0x800), builder.shl(smallest, _words(4)))
    code = builder.add(builder.shl(words, _words(4)), offset)
    code = builder.add(code, builder.and_(words, _words(0x10)))
    lookup = function(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, [WORDS, WORDS])
    saturating = function(builder, f"llvm.usub.sat.v{2 * LANES}i16", WORDS, [WORDS, WORDS])
    error = builder.call(saturating, [exponents, builder.call(lookup, [entries, words])])
    know.add(words, error)
    return builder.bitcast(builder.or_(code, builder.and_(words, _words(0x8000))), _LINE)


def _encode_words(builder: Any, know: _Sums, words: Any, smallest: Any, place: Any) -> None:
    """32 elements, those among them that become denormal numbers of e4m3 or 0: the sum that rounds is a float32's."""
    magnitudes = builder.and_(words, _words(0x7FFF))
    exponents = larger(builder, builder.and_(words, _words(0x7F80)), smallest)
    added = _halves(builder, builder.add(exponents, _words(20 << 7)))
    sums, errors = [], []
    for size, steps in zip(_halves(builder, magnitudes), added, strict=True):
        rounded = builder.fadd(size, steps)
        sums.append(builder.bitcast(rounded, INTS))
        errors.append(builder.bitcast(builder.fsub(size, builder.fsub(rounded, steps)), INTS))
    # The lower half of a sum's bits is the count of steps: the upper bits of its fraction are zero.
    counts = builder.or_(builder.and_(sums[0], splat(0xFFFF)), builder.shl(sums[1], splat(16)))
    code = builder.add(builder.bitcast(counts, WORDS), builder.lshr(exponents, _words(4)))
    code = builder.sub(code, builder.lshr(smallest, _words(4)))
    code = builder.or_(code, builder.and_(builder.lshr(words, _words(8)), _words(0x80)))
    store(builder, builder.trunc(code, _WIDE_BYTES), place)
    # What is left of 8 bits of fraction has no more of them: as bf16 the error is exact.
    both = builder.or_(builder.lshr(errors[0], splat(16)), builder.and_(errors[1], splat(0xFFFF0000)))
    know.add(words, builder.and_(builder.bitcast(both, WORDS), _words(0x7FFF)))


class _Sums:
    """What is known of a group whose elements and errors come as bf16."""

    def __init__(self, builder: Any, lost: Lanes, total: Lanes, worst: Lanes) -> None:
        self._builder, self._lost, self._total, self._worst = builder, lost, total, worst

    def add(self, words: Any, errors: Any) -> None:
        """Add 32 elements and the magnitudes of their errors."""
        self._total.update(lambda seen: _squares(self._builder, words, seen))
        self._lost.update(lambda seen: _squares(self._builder, errors, seen))
        self._worst.update(lambda seen: larger(self._builder, errors, seen))


def _squares(builder: Any, words: Any, total: Any) -> Any:
    """Add the squares of 32 bf16 to 16 sums."""
    if DOT_PRODUCTS:
        numbers = ir.VectorType(BFloat(), 2 * LANES)
        dot = function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, numbers, numbers])
        values = builder.bitcast(words, numbers)
        return builder.call(dot, [total, values, values])
    for half in _halves(builder, words):
        total = multiply_add(builder, half, half, total)
    return total


def _any(builder: Any, flags: Any) -> Any:
    return builder.bitcast(flags, I32)


def _words(value: int) -> Any:
    return ir.Constant(WORDS, [value] * (2 * LANES))


def _same_words(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(WORDS, ir.Undefined), value, I32(0))
    places = ir.Constant(ir.VectorType(I32, 2 * LANES), None)
    return builder.shuffle_vector(one, ir.Constant(WORDS, ir.Undefined), places)


def _halves(builder: Any, words: Any) -> tuple[Any, Any]:
    """The even and the odd bf16 of a vector as float32."""
    pairs = builder.bitcast(words, INTS)
    parts = builder.shl(pairs, splat(16)), builder.and_(pairs, splat(0xFFFF0000))
    return builder.bitcast(parts[0], FLOATS), builder.bitcast(parts[1], FLOATS)
