"""Copies of blocks in one pass, hashed on the way, past the caches: `Client(copies=copy_streaming)`.

A plain copy reads the lines that it is about to overwrite, and what it wrote pushes everything else out of the caches;
its sums read the bytes once more. Here each cache line is loaded once, added to its part's xxh3-64 and stored without
passing the caches. It wants Numba in the caller's process (some 0.3 s and 90 MB), which the client by itself does
without; engines mostly have it. What does not begin at a cache line is copied as `core.checksum` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvtierd.core.checksum import Bytes, Sums, copy_parts
from kvtierd.core.geometry import Geometry
from kvtierd.index.jit import Word, compiled
from kvtierd.index.xxh3 import (
    BLOCK_BYTES,
    LANES,
    READ_ONLY,
    SECRET,
    SHORTEST,
    STRIPE_BYTES,
    STRIPES,
    accumulator,
    ended,
    load,
    scrambled,
    start,
    stripe,
)

AHEAD_BYTES = 2048
"""How far ahead of the copy its source is asked for: across the ends of 4 KiB pages, where processors stop by
themselves."""
_declare: Callable[..., Any] = cgutils.get_or_insert_function
_I8, _I32 = ir.IntType(8), ir.IntType(32)


def _store_streamed(builder: Any, value: Any, address: Any, offset: int) -> None:
    place = builder.inttoptr(builder.add(address, ir.Constant(ir.IntType(64), offset)), LANES.as_pointer())
    kept = builder.store(value, place, align=STRIPE_BYTES)
    kept.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


def _ask_for(builder: Any, address: Any, offset: int) -> None:
    place = builder.inttoptr(builder.add(address, ir.Constant(ir.IntType(64), offset)), _I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
    function = _declare(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [place, _I32(0), _I32(3), _I32(1)])


def _hashed_block(_context: Any, _acc: Any, _data: Any, _secret: Any, _target: Any) -> Any:
    """Add a block of 1024 bytes at address `data` to the lanes at address `acc`, and store it at `target`."""

    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        acc, data, secret, target = arguments
        place = accumulator(builder, acc)
        lanes = builder.load(place, align=8)
        for number in range(STRIPES):
            at = number * STRIPE_BYTES
            _ask_for(builder, data, at + AHEAD_BYTES)
            value = load(builder, data, at)
            _store_streamed(builder, value, target, at)
            lanes = stripe(builder, lanes, value, secret, number)
        builder.store(scrambled(builder, lanes, secret), place, align=8)
        return _codegen.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.uint64), generate


def _plain_block(_context: Any, _data: Any, _target: Any) -> Any:
    """Store a block of 1024 bytes at address `data` at `target`."""

    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        data, target = arguments
        for at in range(0, BLOCK_BYTES, STRIPE_BYTES):
            _ask_for(builder, data, at + AHEAD_BYTES)
            _store_streamed(builder, load(builder, data, at), target, at)
        return _codegen.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


def _ordered(_context: Any) -> Any:
    """Whoever is told of the copy after this sees it: stores past the caches keep no order by themselves."""

    def generate(_codegen: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return _codegen.get_dummy_value()

    return types.void(), generate


# Assigned, and not decorated: a type checker would believe the first parameter to be the caller's.
_copy_and_add: Any = intrinsic(_hashed_block)
_copy_block: Any = intrinsic(_plain_block)
_fence: Any = intrinsic(_ordered)


@compiled(
    types.void(READ_ONLY, types.int64, types.uint8[::1], types.int64, types.int64, READ_ONLY, types.uint64[::1],
               types.uint64[::1])
)  # fmt: skip
def _copy_and_sum(
    source: Word, source_step: Word, target: Word, target_step: Word, size: Word, secret: Word, acc: Word, out: Word
) -> Word:
    """Copy the parts of `size` bytes that begin every `step` bytes, and their sums into `out`."""
    keys, lanes = np.uint64(secret.ctypes.data), np.uint64(acc.ctypes.data)
    blocks = (size - 1) // BLOCK_BYTES
    for part in range(out.size):
        begin, at = part * source_step, part * target_step
        data, place = np.uint64(source.ctypes.data + begin), np.uint64(target.ctypes.data + at)
        start(acc)
        for block in range(blocks):
            offset = np.uint64(block * BLOCK_BYTES)
            _copy_and_add(lanes, data + offset, keys, place + offset)
        for i in range(blocks * BLOCK_BYTES, size):
            target[at + i] = source[begin + i]
        out[part] = ended(data, size, secret, acc)
    _fence()


@compiled(types.void(READ_ONLY, types.int64, types.uint8[::1], types.int64, types.int64, types.int64))
def _copy(source: Word, source_step: Word, target: Word, target_step: Word, size: Word, parts: Word) -> Word:
    """Copy the parts of `size` bytes that begin every `step` bytes."""
    blocks = size // BLOCK_BYTES
    for part in range(parts):
        begin, at = part * source_step, part * target_step
        data, place = np.uint64(source.ctypes.data + begin), np.uint64(target.ctypes.data + at)
        for block in range(blocks):
            offset = np.uint64(block * BLOCK_BYTES)
            _copy_block(data + offset, place + offset)
        for i in range(blocks * BLOCK_BYTES, size):
            target[at + i] = source[begin + i]
    _fence()


def copy_streaming(
    source: Bytes, source_step: int, target: Bytes, target_step: int, geometry: Geometry, out: Sums | None
) -> None:
    """As `core.checksum.copy_parts`, to the bit; larger parts in less time."""
    size, layers = geometry.layer_bytes, geometry.layers
    memory = source.flags.c_contiguous and target.flags.c_contiguous
    if not memory or size < SHORTEST or target.ctypes.data % STRIPE_BYTES or target_step % STRIPE_BYTES:
        copy_parts(source, source_step, target, target_step, geometry, out)
    elif out is None:
        _copy(_read_only(source), source_step, target, target_step, size, layers)
    else:
        sums = np.empty(layers, np.uint64)
        lanes = np.empty(8, np.uint64)
        _copy_and_sum(_read_only(source), source_step, target, target_step, size, SECRET, lanes, sums)
        out[:] = sums


def _read_only(memory: Bytes) -> Bytes:
    view = memory.view()
    view.flags.writeable = False
    return view
