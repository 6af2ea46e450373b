"""Inline PTX that touches memory: vector loads and stores, shared memory, asynchronous copies, ldmatrix.

Addresses are (array, byte offset). Alignment to the access is the caller's to keep, as in CUDA C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba.cuda import types
from numba.cuda.cudadrv import nvvm
from numba.cuda.cudaimpl import _generic_array, _get_unique_smem_id
from numba.cuda.extending import _intrinsic, intrinsic

from kvtierd.gpu.kernels.ptx import I8, I32, I64, emit, instruction, packed, returned, with_arity

__all__ = [
    "copy_async",
    "copy_commit",
    "copy_wait",
    "ldmatrix",
    "ldmatrix_transposed",
    "load_pair",
    "load_u8",
    "load_u16",
    "load_word",
    "load_words",
    "set_shared_words",
    "shared_bytes",
    "shared_words",
    "store_pair",
    "store_u8",
    "store_u16",
    "store_word",
    "store_words",
]

SHARED_ALIGNMENT = 128
"""Enough for cp.async (16), for ldmatrix rows, and for swizzles that count in lines of 128 bytes."""
_literal_intrinsic: Any = _intrinsic(prefer_literal=True, target="cuda")  # `intrinsic` takes no options
_VECTORS = {1: "", 2: ".v2", 4: ".v4"}


def _address(context: Any, builder: Any, kind: Any, array: Any, offset: Any, space: int) -> Any:
    """The address of a byte as an integer of the width that its address space has in PTX: l (global), r (shared)."""
    base = builder.bitcast(context.make_array(kind)(context, builder, array).data, I8.as_pointer())
    there = builder.addrspacecast(builder.gep(base, [offset]), I8.as_pointer(space))
    return builder.ptrtoint(there, I64 if space == nvvm.ADDRSPACE_GLOBAL else I32)


def _access(text: str, space: int, results: Sequence[Any], stored: int = 0) -> Any:
    """An intrinsic of (array, byte, *words): `text` with the address as the first operand behind the results."""
    letter = "l" if space == nvvm.ADDRSPACE_GLOBAL else "r"
    memory = not text.startswith("ld.global.nc")

    def typed(array: Any, *_rest: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operands = [_address(context, builder, signature.args[0], args[0], args[1], space), *args[2:]]
            letters = letter + "r" * stored
            return packed(context, builder, emit(builder, text, results, operands, letters, memory=memory))

        return returned(results)(array, types.int64, *[types.uint32] * stored), generate

    return with_arity(2 + stored, typed)


def _group(first: int, count: int) -> str:
    inner = ",".join(f"${first + index}" for index in range(count))
    return f"{{{inner}}}" if count > 1 else inner


def _load(where: str, space: int, count: int) -> Any:
    text = f"{where}{_VECTORS[count]}.u32 {_group(0, count)}, [${count}];"
    return _access(text, space, [types.uint32] * count)


def _store(where: str, space: int, count: int) -> Any:
    return _access(f"{where}{_VECTORS[count]}.u32 [$0], {_group(1, count)};", space, [], stored=count)


load_words, load_pair, load_word = (_load("ld.global.nc", nvvm.ADDRSPACE_GLOBAL, count) for count in (4, 2, 1))
store_words, store_pair, store_word = (_store("st.global", nvvm.ADDRSPACE_GLOBAL, count) for count in (4, 2, 1))
# PTX lets a register be wider than what is loaded into it (the rest is zero) or stored from it.
load_u16, load_u8 = (
    _access(f"ld.global.nc.{kind} $0, [$1];", nvvm.ADDRSPACE_GLOBAL, [types.uint32]) for kind in ("u16", "u8")
)
store_u16, store_u8 = (
    _access(f"st.global.{kind} [$0], $1;", nvvm.ADDRSPACE_GLOBAL, [], stored=1) for kind in ("u16", "u8")
)
shared_words = _load("ld.shared", nvvm.ADDRSPACE_SHARED, 4)
set_shared_words = _store("st.shared", nvvm.ADDRSPACE_SHARED, 4)


def _ldmatrix(suffix: str) -> Any:
    text = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {_group(0, 4)}, [$4];"
    return _access(text, nvvm.ADDRSPACE_SHARED, [types.uint32] * 4)


ldmatrix, ldmatrix_transposed = _ldmatrix(""), _ldmatrix(".trans")
copy_commit = instruction("cp.async.commit_group;", [], [], memory=True)


@intrinsic
def copy_async(_typing: Any, shared: Any, byte: Any, array: Any, at: Any, valid: Any) -> Any:
    """`copy_async(shared, byte, array, at, valid)`: 16 bytes, past the L1 cache; only `valid` of them are read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _address(context, builder, signature.args[0], args[0], args[1], nvvm.ADDRSPACE_SHARED)
        source = _address(context, builder, signature.args[2], args[2], args[3], nvvm.ADDRSPACE_GLOBAL)
        text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        return packed(context, builder, emit(builder, text, [], [to, source, args[4]], "rlr", memory=True))

    del byte, at, valid
    return types.void(shared, types.int64, array, types.int64, types.uint32), generate


@_literal_intrinsic
def copy_wait(_typing: Any, pending: Any) -> Any:
    """`copy_wait(n)`: wait until at most the last n groups of this thread are under way; n is a literal."""
    if not isinstance(pending, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        emit(builder, f"cp.async.wait_group {pending.literal_value};", [], [], "", memory=True)
        return context.get_dummy_value()

    return types.void(pending), generate


@_literal_intrinsic
def shared_bytes(_typing: Any, count: Any) -> Any:
    """`shared_bytes(count)`: uint8 [count] in shared memory, aligned to 128; count is a literal or a constant."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        return _generic_array(
            context,
            builder,
            shape=(count.literal_value,),
            dtype=types.uint8,
            symbol_name=_get_unique_smem_id("kvtierd_shared"),
            addrspace=nvvm.ADDRSPACE_SHARED,
            alignment=SHARED_ALIGNMENT,
        )

    return types.Array(types.uint8, 1, "C")(count), generate
