"""xxh3-64 of many parts at once, without the GIL: for threads that verify what they have read.

The library that `kvtierd.core.checksum` uses keeps the GIL while it hashes, so threads that verify take turns, and hold
up the loop. This is the same function (seed 0, its default secret) for parts of more than 240 bytes, in vectors of
eight 64-bit lanes. Source: the specification of XXH3 in the xxHash project (doc/xxhash_spec.md, "XXH3-64 with input
larger than 240 bytes").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvtierd.core.checksum import Bytes
from kvtierd.index.jit import Word, compiled, helper

SHORTEST = 241
"""Bytes of the shortest part that `sums_of` can hash: shorter ones have another algorithm."""

SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
_START = np.array(
    [
        0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
        0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
    ],
    np.uint64,
)  # fmt: skip
_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
STRIPE_BYTES, STRIPES, BLOCK_BYTES = 64, 16, 1024

LANES = ir.VectorType(ir.IntType(64), 8)
_SWAP = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])


def _constant(value: int) -> ir.Constant:
    return ir.Constant(LANES, [value] * 8)


def load(builder: Any, address: Any, offset: int) -> Any:
    """64 bytes at any address."""
    place = builder.add(address, ir.Constant(ir.IntType(64), offset))
    return builder.load(builder.inttoptr(place, LANES.as_pointer()), align=1)


def stripe(builder: Any, acc: Any, value: Any, secret: Any, number: int) -> Any:
    """Add 64 bytes: each lane takes its neighbour's data and the product of its own halves."""
    key = builder.xor(value, load(builder, secret, number * 8))
    product = builder.mul(builder.and_(key, _constant(0xFFFFFFFF)), builder.lshr(key, _constant(32)))
    swapped = builder.shuffle_vector(value, ir.Constant(LANES, ir.Undefined), _SWAP)
    return builder.add(builder.add(acc, swapped), product)


def scrambled(builder: Any, acc: Any, secret: Any) -> Any:
    """What follows each block."""
    value = builder.xor(acc, builder.lshr(acc, _constant(47)))
    value = builder.xor(value, load(builder, secret, 192 - STRIPE_BYTES))
    return builder.mul(value, _constant(0x9E3779B1))


def accumulator(builder: Any, address: Any) -> Any:
    """The eight lanes at an address."""
    return builder.inttoptr(address, LANES.as_pointer())


def _block(_context: Any, _acc: Any, _data: Any, _secret: Any) -> Any:
    """Add a block of 1024 bytes at address `data` to the accumulator at address `acc`, and scramble it."""

    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        acc, data, secret = arguments
        place = accumulator(builder, acc)
        value = builder.load(place, align=8)
        for number in range(STRIPES):
            value = stripe(builder, value, load(builder, data, number * STRIPE_BYTES), secret, number)
        builder.store(scrambled(builder, value, secret), place, align=8)
        return _codegen.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


def _one_stripe(_context: Any, _acc: Any, _data: Any, _secret: Any) -> Any:
    """Add 64 bytes."""

    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        acc, data, secret = arguments
        place = accumulator(builder, acc)
        builder.store(stripe(builder, builder.load(place, align=8), load(builder, data, 0), secret, 0), place, align=8)
        return _codegen.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


# Assigned, and not decorated: a type checker would believe the first parameter to be the caller's.
_add_block: Any = intrinsic(_block)
_add_stripe: Any = intrinsic(_one_stripe)


@helper
def _folded(one: Word, other: Word) -> Word:
    """Both halves of the 128-bit product, xored."""
    mask = np.uint64(0xFFFFFFFF)
    low, high = one & mask, one >> np.uint64(32)
    low_other, high_other = other & mask, other >> np.uint64(32)
    first = low * low_other
    middle = high * low_other + (first >> np.uint64(32))
    cross = low * high_other + (middle & mask)
    upper = high * high_other + (middle >> np.uint64(32)) + (cross >> np.uint64(32))
    return upper ^ (first & mask | cross << np.uint64(32))


@helper
def _word(secret: Word, offset: Word) -> Word:
    """Eight bytes of the secret, little endian."""
    found = np.uint64(0)
    for i in range(8):
        found |= np.uint64(secret[offset + i]) << np.uint64(8 * i)
    return found


@helper
def start(acc: Word) -> Word:
    """Set the eight lanes to what every sum begins with."""
    for i in range(8):
        acc[i] = _START[i]


@helper
def ended(data: Word, size: Word, secret: Word, acc: Word) -> Word:
    """The sum, when all whole blocks but the last bytes are in `acc`."""
    keys, place = np.uint64(secret.ctypes.data), np.uint64(acc.ctypes.data)
    blocks = (size - 1) // BLOCK_BYTES
    stripes = (size - 1 - blocks * BLOCK_BYTES) // STRIPE_BYTES
    rest = data + np.uint64(blocks * BLOCK_BYTES)
    for stripe in range(stripes):
        _add_stripe(place, rest + np.uint64(stripe * STRIPE_BYTES), keys + np.uint64(8 * stripe))
    _add_stripe(place, data + np.uint64(size - STRIPE_BYTES), keys + np.uint64(192 - STRIPE_BYTES - 7))
    found = np.uint64(size) * _PRIME_1
    for i in range(4):
        key = 11 + 16 * i
        found += _folded(acc[2 * i] ^ _word(secret, key), acc[2 * i + 1] ^ _word(secret, key + 8))
    found ^= found >> np.uint64(37)
    found *= np.uint64(0x165667919E3779F9)
    return found ^ (found >> np.uint64(32))


@helper
def _sum_at(data: Word, size: Word, secret: Word, acc: Word) -> Word:
    """xxh3-64 of the bytes at an address; `acc` is room for the eight lanes."""
    keys, place = np.uint64(secret.ctypes.data), np.uint64(acc.ctypes.data)
    start(acc)
    for block in range((size - 1) // BLOCK_BYTES):
        _add_block(place, data + np.uint64(block * BLOCK_BYTES), keys)
    return ended(data, size, secret, acc)


READ_ONLY = types.Array(types.uint8, 1, "C", readonly=True)


@compiled(types.void(types.uint64[::1], types.int64, READ_ONLY, types.uint64[::1], types.uint64[::1]))
def _sums(addresses: Word, size: Word, secret: Word, acc: Word, out: Word) -> Word:
    for part in range(addresses.size):
        out[part] = _sum_at(addresses[part], size, secret, acc)


@compiled(
    types.int64(
        types.Array(types.uint64, 2, "C", readonly=True),
        types.Array(types.uint64, 1, "C", readonly=True),
        READ_ONLY,
        types.uint64[::1],
    )
)
def _first_other(rows: Word, sums: Word, secret: Word, acc: Word) -> Word:
    size, data = rows.shape[1] * 8, np.uint64(rows.ctypes.data)
    for row in range(rows.shape[0]):
        if _sum_at(data + np.uint64(row * size), size, secret, acc) != sums[row]:
            return row
    return -1


def first_other(rows: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]) -> int:
    """The first of `rows` ([n, words], C order) whose xxh3-64 is not the one in `sums` ([n]), or -1.

    Raises ValueError for rows of less than SHORTEST bytes.
    """
    if rows.shape[1] * rows.itemsize < SHORTEST:
        raise ValueError(f"rows have {rows.shape[1] * rows.itemsize} bytes; {SHORTEST} are the least that is hashed so")
    return int(_first_other(rows, sums, SECRET, np.empty(8, np.uint64)))


def sums_of(addresses: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint64]:
    """xxh3-64 of the `size` bytes at each of these addresses, [n]. Raises ValueError for less than SHORTEST bytes.

    The memory must be there, and stay as it is, until this returns.
    """
    if size < SHORTEST:
        raise ValueError(f"parts have {size} bytes; {SHORTEST} are the least that is hashed so")
    out = np.empty(addresses.size, np.uint64)
    _sums(np.ascontiguousarray(addresses), size, SECRET, np.empty(8, np.uint64), out)
    return out


def sums_of_parts(parts: Sequence[Bytes], size: int) -> list[int]:
    """xxh3-64 of the first `size` bytes of each of these arrays; without the GIL where that is not tiny."""
    if size < SHORTEST:
        return [xxhash.xxh3_64_intdigest(part[:size].data) for part in parts]
    found: list[int] = sums_of(np.array([part.ctypes.data for part in parts], np.uint64), size).tolist()
    return found
