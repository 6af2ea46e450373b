"""A counter that threads take numbers from."""

from __future__ import annotations

from typing import Any

from numba import types

from kvtierd.gpu.host_kernels.attention_vectors import I64, address, intrinsic


@intrinsic
def take(_typing: Any, _counter: Any) -> Any:
    """`take(address) -> int64`: the int64 there, which is one more afterwards, in one atomic step."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", address(builder, args[0], I64(0), I64), I64(1), "monotonic")

    return types.int64(types.uint64), codegen
