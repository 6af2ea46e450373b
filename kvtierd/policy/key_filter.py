"""A bounded set of keys that forgets the oldest: which blocks were seen lately, in four bytes each.

Buckets of eight fingerprints, newest first; a ninth pushes the oldest of its bucket out. Two keys are taken for one
where their bucket and 32-bit fingerprint agree: once in about 2**29 questions. The hash has a secret, so that keys
chosen by a client do not collide at his will.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import Word, compiled, helper
from kvtierd.index.memory import reserve

WAYS = 8
KEYS_MAX = 1 << 30

Keys64 = npt.NDArray[np.uint64]
Cells = npt.NDArray[np.uint32]
U64 = np.uint64
_CELLS = types.uint32[:, ::1]


@helper
def _hash(key: Word, secret: Word) -> Word:
    value = (U64(key) ^ secret) * U64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> U64(29))) * U64(0xBF58476D1CE4E5B9)
    return value ^ (value >> U64(32))


@compiled(types.int64(_CELLS, types.uint64, types.uint64[::1], types.boolean, types.boolean[::1]))
def see(cells: Cells, secret: Word, keys: Keys64, remember: bool, seen: npt.NDArray[np.bool_]) -> int:
    """Fill `seen` [n] with which keys are known, and remember them if asked to; how many are known."""
    count = 0
    for index, key in enumerate(keys):
        value = _hash(key, secret)
        bucket = cells[np.int64(value & U64(cells.shape[0] - 1))]
        mark = np.uint32(value >> U64(32)) | np.uint32(1)  # 0 is an empty cell.
        place = 0
        while place < WAYS and bucket[place] != mark:
            place += 1
        seen[index] = place < WAYS
        count += seen[index]
        if remember:
            for way in range(min(place, WAYS - 1), 0, -1):
                bucket[way] = bucket[way - 1]
            bucket[0] = mark
    return count


class KeyFilter:
    """Remembers about the last `keys_max` keys (rounded up to a power of two), 4 bytes each.

    Raises ValueError when `keys_max` is out of range.
    """

    def __init__(self, keys_max: int, secret: int) -> None:
        if not 1 <= keys_max <= KEYS_MAX:
            raise ValueError(f"keys_max is {keys_max}; it must be in 1..{KEYS_MAX}")
        buckets = 1 << max(0, (keys_max - 1).bit_length() - 3)
        self._cells: Cells = reserve((buckets, WAYS), np.uint32)
        self._secret = np.uint64(secret % (1 << 64))

    @property
    def columns(self) -> tuple[Cells, int]:
        """Cells [n, WAYS] and the hash's secret as int64, for compiled code (`see`)."""
        return self._cells, int(self._secret.astype(np.int64))

    @property
    def capacity(self) -> int:
        """Keys that fit."""
        return int(self._cells.size)

    def add(self, keys: Keys64) -> npt.NDArray[np.bool_]:
        """Remember keys [n] uint64; which of them were known already."""
        return self._see(keys, remember=True)

    def contains(self, keys: Keys64) -> npt.NDArray[np.bool_]:
        """Which keys are known, [n]; nothing changes."""
        return self._see(keys, remember=False)

    def _see(self, keys: Keys64, *, remember: bool) -> npt.NDArray[np.bool_]:
        seen = np.empty(keys.size, np.bool_)
        see(self._cells, self._secret, np.ascontiguousarray(keys), remember, seen)
        return seen
