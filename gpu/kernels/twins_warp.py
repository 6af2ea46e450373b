"""Twins of what a warp does together, for Numba's simulator.

Each lane leaves its part on a board that its warp shares, waits for the others at a barrier, and reads. The barrier is
of the warp alone: Numba's own `syncthreads` would hang when warps go different ways.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.gpu.kernels.twins import Words, load_words, thread
from kvtierd.gpu.kernels.twins_formats import floats_of_bf16, floats_of_f16

__all__ = [
    "broadcast_f32",
    "broadcast_u32",
    "exchange_f32",
    "exchange_u32",
    "ldmatrix",
    "ldmatrix_transposed",
    "mma_bf16",
    "mma_f16",
    "sync_warp",
]

LANES = 32
_PATIENCE_S = 30.0
"""A lane that raised never comes to the barrier; its warp gives up then, and the error shows."""
_making = threading.Lock()


@dataclasses.dataclass
class Warp:
    """What the lanes of one warp share."""

    barrier: threading.Barrier
    board: list[Any]


def _warp() -> Warp:
    me = thread()
    number = me.thread_id // LANES
    with _making:
        warps: dict[int, Warp] = me._manager.__dict__.setdefault("kvtierd_warps", {})
        if number not in warps:
            threads = int(np.prod(me._manager._block_dim))
            lanes = min(LANES, threads - number * LANES)
            warps[number] = Warp(threading.Barrier(lanes, timeout=_PATIENCE_S), [None] * lanes)
        return warps[number]


def lane() -> int:
    """Number of this thread in its warp."""
    return int(thread().thread_id % LANES)


def gather(value: Any) -> list[Any]:
    """What every lane of this warp brought to this call."""
    warp = _warp()
    warp.board[lane()] = value
    warp.barrier.wait()
    seen = list(warp.board)
    warp.barrier.wait()  # nobody may leave the next value before all have read this one
    return seen


def sync_warp() -> None:
    """Wait for the other lanes."""
    _warp().barrier.wait()


def exchange_u32(value: int, mask: int) -> int:
    """The value of the lane whose number differs by `mask`; one's own where there is none."""
    seen = gather(value)
    other = lane() ^ int(mask)
    return int(seen[other if other < len(seen) else lane()])


def exchange_f32(value: float, mask: int) -> np.float32:
    """The same for a float32."""
    seen = gather(np.float32(value))
    other = lane() ^ int(mask)
    return np.float32(seen[other if other < len(seen) else lane()])


def broadcast_u32(value: int, source: int) -> int:
    """The value of lane `source`."""
    return int(gather(value)[int(source)])


def broadcast_f32(value: float, source: int) -> np.float32:
    """The same for a float32."""
    return np.float32(gather(np.float32(value))[int(source)])


def ldmatrix(shared: Any, byte: int) -> Words:
    """Lane 8i + r gives the address of row r of matrix i; lane l gets elements 2(l % 4) and the next of row l / 4."""
    rows = gather(load_words(shared, byte))
    row, word = lane() // 4, lane() % 4
    return tuple(rows[8 * matrix + row][word] for matrix in range(4))


def ldmatrix_transposed(shared: Any, byte: int) -> Words:
    """As `ldmatrix`, of the transposed matrices."""
    rows = gather(load_words(shared, byte))
    column, first = lane() // 4, lane() % 4 * 2
    return tuple(
        _half(rows[8 * matrix + first], column) | _half(rows[8 * matrix + first + 1], column) << 16
        for matrix in range(4)
    )


def mma_bf16(a: Words, b: Words, c: tuple[float, ...]) -> tuple[np.float32, ...]:
    """16 by 8 float32 plus the product of 16 by 16 and 16 by 8 bf16, in the lanes that PTX ISA 9.7.14.5 names."""
    return _mma(a, b, c, floats_of_bf16)


def mma_f16(a: Words, b: Words, c: tuple[float, ...]) -> tuple[np.float32, ...]:
    """The same for f16."""
    return _mma(a, b, c, floats_of_f16)


def _mma(a: Words, b: Words, c: tuple[float, ...], floats: Any) -> tuple[np.float32, ...]:
    left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    for number, (a_words, b_words) in enumerate(gather((a, b))):
        group, quad = number // 4, number % 4
        for index, word in enumerate(a_words):
            column = 2 * quad + 8 * (index // 2)
            left[group + 8 * (index % 2), column : column + 2] = floats(word)
        for index, word in enumerate(b_words):
            row = 2 * quad + 8 * index
            right[row : row + 2, group] = floats(word)
    product: npt.NDArray[np.float32] = (left @ right).astype(np.float32)
    group, column = lane() // 4, lane() % 4 * 2
    places = ((group, column), (group, column + 1), (group + 8, column), (group + 8, column + 1))
    return tuple(np.float32(start) + product[place] for start, place in zip(c, places, strict=True))


def _half(words: Words, index: int) -> int:
    return words[index // 2] >> 16 * (index % 2) & 0xFFFF
