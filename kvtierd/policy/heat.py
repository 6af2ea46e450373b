"""Heat: how often a block has been used lately, as a number that halves with time.

A block's heat is the sum over its uses of 2**(-age / half-life): one use counts 1 now, 1/2 after a half-life. Two
columns hold it, the heat at the last use (uint16, in steps of 1 / UNITS) and when that was (uint32, seconds); the decay
since then is applied when somebody looks, so that a block that nobody uses costs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import Word, compiled, helper

UNITS = 64
"""Steps of heat that the column tells apart in one use; the largest heat is 65535 / UNITS, about a thousand."""
_MAX = 65535

Heat = npt.NDArray[np.uint16]
Seconds = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.int32]
_COLUMNS: Any = (types.uint16[:], types.uint32[:], types.int32[::1], types.uint32, types.float64)
"""Columns may be fields of records, and so have any stride."""


@helper
def decayed(units: Word, since_s: Word, now_s: Word, half_life_s: Word) -> Word:
    """Heat in the column's steps, after the time that has gone by since it was written."""
    # A clock that was read in another order than the column was written shows no age, not a huge one.
    age_s = max(np.int64(0), np.int64(now_s) - np.int64(since_s))
    return np.float64(units) if age_s == 0 else units * 0.5 ** (age_s / half_life_s)


@helper
def heated(units: Word) -> Word:
    """Heat after one use more, in the column's steps."""
    return min(_MAX, int(units + UNITS + 0.5))


@compiled(types.void(*_COLUMNS))
def touch_heat(heat: Heat, since_s: Seconds, rows: Rows, now_s: int, half_life_s: float) -> None:
    """The blocks in these rows are used: decay what their columns `heat` and `since_s` hold, add one use, and stamp.

    A row named twice is used twice. `half_life_s` must be positive.
    """
    for row in rows:
        heat[row] = np.uint16(heated(decayed(heat[row], since_s[row], now_s, half_life_s)))
        since_s[row] = now_s


@compiled(types.float32[::1](*_COLUMNS))
def heat_of(heat: Heat, since_s: Seconds, rows: Rows, now_s: int, half_life_s: float) -> npt.NDArray[np.float32]:
    """Heat of the blocks in these rows now, [n] float32, in uses. Changes nothing."""
    now = np.empty(rows.size, np.float32)
    for index, row in enumerate(rows):
        now[index] = decayed(heat[row], since_s[row], now_s, half_life_s) / UNITS
    return now
