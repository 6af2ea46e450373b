"""Ages of blocks in ticks, and the bins that they are counted in.

A tick is 2**20 ns, about a millisecond; times are uint32 and wrap after 52 days, which ages survive as long as they are
shorter. Bins are half octaves: bin 0 is an age of no tick, bin j holds ages from 2**((j-1)/2) up to 2**(j/2) ticks. An
age may also be counted relative to a pace, another age: then RELATIVE_ONE is the bin where they are equal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.index.intrinsics import leading_zeros
from kvtierd.index.jit import Word, helper

TICK_SHIFT = 20
BINS = 64
RELATIVE_ONE = 40
"""More room below than above: what matters of a block much older than its pace is only that it is."""


def ticks(now_ns: int) -> int:
    """A time in nanoseconds as ticks, wrapped to 32 bits."""
    return (now_ns >> TICK_SHIFT) & 0xFFFFFFFF


def bin_widths() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Width of each bin, [BINS] float64: in ticks, and relative to a pace in the middle of its own bin."""
    edges = np.concatenate([[0.0], 2.0 ** (np.arange(BINS) / 2)])
    relative = np.concatenate([[0.0], 2.0 ** ((np.arange(BINS) - RELATIVE_ONE + 0.5) / 2)])
    return np.diff(edges), np.diff(relative)


@helper
def bit_length(value: Word) -> Word:
    """Bits of a non-negative integer; 0 of 0."""
    return 64 - leading_zeros(value)


@helper
def age_bin(age: Word) -> Word:
    """Bin of an age in ticks, 0..BINS-1."""
    if age <= 0:
        return 0
    octave = bit_length(age)
    square = np.uint64(age) * np.uint64(age)
    upper = square >= np.uint64(1) << np.uint64(2 * octave - 1)
    return min(BINS - 1, 2 * octave - 1 + upper)


@helper
def relative_bin(age: Word, pace: Word) -> Word:
    """Bin of an age in ticks relative to a pace, which is given by its bin."""
    return min(BINS - 1, max(0, age_bin(age) - pace + RELATIVE_ONE))


@helper
def elapsed(since: Word, now: Word) -> Word:
    """Ticks between two times, as int64."""
    return (np.int64(now) - np.int64(since)) & 0xFFFFFFFF
