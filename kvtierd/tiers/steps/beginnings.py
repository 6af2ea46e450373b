"""Which remembered request the keys of a store begin with (kvtierd.tiers.requests)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.core.keys import KEY_BYTES
from kvtierd.index.intrinsics import load_u64
from kvtierd.index.jit import compiled
from kvtierd.index.layout import KEYS, Keys


@compiled(types.int64(types.int64[::1], types.uint64[::1], types.int64[::1], types.int64, KEYS, types.int64))
def begun_by(
    sizes: npt.NDArray[np.int64],
    last_keys: npt.NDArray[np.uint64],
    began_ns: npt.NDArray[np.int64],
    newest: int,
    keys: Keys,
    young_ns: int,
) -> int:
    """Number of the newest request if `keys` ([n, 32]) begin with its blocks, else of the longest such one, or -1.

    A request is known by its number of blocks and the first word of its last key; 0 blocks are no request. One that
    began before `young_ns` does not count.
    """
    best = -1
    for step in range(sizes.size):
        number = newest - step if step <= newest else newest - step + sizes.size
        size = sizes[number]
        if size <= 0 or size > keys.shape[0] or began_ns[number] < young_ns:
            continue
        if load_u64(keys, (size - 1) * KEY_BYTES) != last_keys[number]:
            continue
        if step == 0:
            return number
        if best < 0 or size > sizes[best]:
            best = number
    return best
