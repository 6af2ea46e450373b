"""What more memory would bring: hits that an LRU tier of other sizes would have had, estimated while it runs.

Stack distances (R. Mattson et al., 1970) of a sample of the blocks, chosen by hash (SHARDS with a fixed sample size:
C. Waldspurger et al., FAST'15): a block used again after d other sampled blocks, with a share r of all blocks sampled,
would have been a hit in every LRU tier of more than d / r blocks. Blocks of different sizes count in units of size.
When the sample is full, blocks used longer ago than the largest size asked about reaches are dropped, and where that is
not enough, r is lowered. How many units were used since is counted in a Fenwick tree over the times of the sampled
blocks' last uses. A few blocks that are used all the
time (system prompts) may be in the sample or not, which would bias it: as in the paper, what the sample has too few or
too many of all accesses is taken to be such short distances.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import Word, compiled, helper, subroutine

MULTIPLES: Final = (1.0, 1.25, 1.5, 2.0, 4.0)
"""Sizes that are asked about, in capacities of the tier."""

_HASH_BITS = 24
_EVERYTHING = 1 << _HASH_BITS
_KEPT_EIGHTHS = 6
"""Of eight sampled blocks so many stay when the sample is full."""
_TIMES_A_SAMPLE = 4
"""Times that pass before they are numbered anew, in samples."""

_SAMPLED, _TIME, _LIMIT, _SECRET, _UNITS, _ACCESSES = range(6)
"""Words of `state`: blocks in the sample, next time, hashes below which a block is sampled, the hash's secret, units
of all blocks in the sample, blocks used so far."""

Keys64 = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Links = npt.NDArray[np.int32]
U64 = np.uint64


@helper
def _spread(key: Word, secret: Word) -> Word:
    value = (U64(key) ^ U64(secret)) * U64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> U64(29))) * U64(0xBF58476D1CE4E5B9)
    return value ^ (value >> U64(32))


@helper
def _is_sampled(state: Numbers, key: Word) -> Word:
    return np.int64(_spread(key, state[_SECRET]) >> U64(64 - _HASH_BITS)) < state[_LIMIT]


@helper
def _bucket(state: Numbers, links: Links, key: Word) -> Word:
    """Place of the head of a key's chain: the second half of `links` has the heads, the first the following ones."""
    half = links.size // 2
    return half + np.int64(_spread(key, state[_SECRET]) & U64(half - 1))


@helper
def _find(state: Numbers, keys: Keys64, links: Links, key: Word) -> Word:
    place = links[_bucket(state, links, key)] - 1
    while place >= 0 and keys[place] != key:
        place = links[place] - 1
    return place


@helper
def _chain(state: Numbers, keys: Keys64, links: Links, place: Word) -> None:
    bucket = _bucket(state, links, keys[place])
    links[place], links[bucket] = links[bucket], place + 1


@helper
def _count(tree: Numbers, time: Word, amount: Word) -> None:
    """Note units at a sample's time, or that they are there no more."""
    node = time + 1
    while node < tree.size:
        tree[node] += amount
        node += node & -node


@helper
def _used_until(tree: Numbers, time: Word) -> Word:
    """Units of the samples that were last used at this time or before."""
    total, node = 0, time + 1
    while node > 0:
        total += tree[node]
        node -= node & -node
    return total


@subroutine
def _within_reach(state: Numbers, units: Numbers, order: Numbers, size_max: Word) -> Word:
    """How many of the sampled blocks, youngest first, the largest size asked about could hold."""
    weight, held, count = _EVERYTHING / state[_LIMIT], 0.0, 0
    while count < order.size and held <= size_max:
        count += 1
        held += units[order[order.size - count]] * weight
    return count


@subroutine
def _renumber(
    state: Numbers, keys: Keys64, units: Numbers, times: Numbers, links: Links, tree: Numbers, size_max: Word
) -> None:
    """Drop what is beyond reach or does not belong to the sample any more, and number the rest by time from 0."""
    count = state[_SAMPLED]
    order = np.argsort(times[:count])
    reach = _within_reach(state, units, order, size_max)
    if count == keys.size and reach > keys.size * _KEPT_EIGHTHS // 8:
        state[_LIMIT] = max(1, state[_LIMIT] * _KEPT_EIGHTHS // 8)
    old, old_units = keys[:count].copy(), units[:count].copy()
    links[:], tree[:] = 0, 0
    kept = 0
    state[_UNITS] = 0
    for place in order[count - reach :]:
        # By chance all may belong to the smaller sample: then the oldest makes room.
        if _is_sampled(state, old[place]) and not (place == order[0] and reach == keys.size):
            keys[kept], units[kept], times[kept] = old[place], old_units[place], kept
            _chain(state, keys, links, kept)
            _count(tree, kept, old_units[place])
            state[_UNITS] += old_units[place]
            kept += 1
    state[_SAMPLED] = state[_TIME] = kept


@compiled(
    types.void(
        types.int64[::1], types.uint64[::1], types.int64[::1], types.int64[::1], types.int32[::1], types.int64[::1],
        types.uint64[::1], types.int64, types.float64[::1], types.float64[::1],
    )
)  # fmt: skip
def access(
    state: Numbers, keys: Keys64, units: Numbers, times: Numbers, links: Links, tree: Numbers, used: Keys64,
    used_units: int, sizes: npt.NDArray[np.float64], hits: npt.NDArray[np.float64],
) -> None:  # fmt: skip
    """Blocks `used`, in prefix order and of `used_units` each, are used; the rest are the columns of GhostHits."""
    state[_ACCESSES] += used.size
    for index in range(used.size - 1, -1, -1):
        key = used[index]
        if not _is_sampled(state, key):
            continue
        weight = _EVERYTHING / state[_LIMIT]
        hits[sizes.size] += weight
        place = _find(state, keys, links, key)
        if place >= 0:
            _count(tree, times[place], -units[place])
            state[_UNITS] -= units[place]
            younger = state[_UNITS] - _used_until(tree, times[place])
            for size in range(sizes.size):
                if younger * weight + used_units <= sizes[size]:
                    hits[size] += weight
        else:
            place = state[_SAMPLED]
            keys[place] = key
            _chain(state, keys, links, place)
            state[_SAMPLED] += 1
        times[place], units[place] = state[_TIME], used_units
        _count(tree, state[_TIME], used_units)
        state[_UNITS] += used_units
        state[_TIME] += 1
        if state[_SAMPLED] == keys.size or state[_TIME] + 1 == tree.size:
            _renumber(state, keys, units, times, links, tree, sizes[sizes.size - 1])


class GhostHits:
    """Estimates for one tier of `capacity` units, from at most `samples` blocks (64 bytes each).

    A unit is what the caller takes it for, as long as blocks are counted in the same: a block, or bytes of one.
    Raises ValueError for a capacity below 1 or fewer than 8 samples.
    """

    def __init__(self, capacity: int, secret: int, samples: int = 8192) -> None:
        if capacity < 1 or samples < 8:
            raise ValueError(f"capacity is {capacity} and samples {samples}; they must be at least 1 and 8")
        size = 1 << (samples - 1).bit_length()
        self._keys = np.zeros(size, np.uint64)
        self._units = np.zeros(size, np.int64)
        self._times = np.zeros(size, np.int64)
        self._links = np.zeros(2 * size, np.int32)
        self._tree = np.zeros(_TIMES_A_SAMPLE * size + 1, np.int64)
        self._state = np.array([0, 0, _EVERYTHING, secret % (1 << 63), 0, 0], np.int64)
        self._sizes = np.floor(np.array(MULTIPLES) * capacity)
        self._hits = np.zeros(len(MULTIPLES) + 1)

    @property
    def accesses(self) -> int:
        """Blocks used so far."""
        return int(self._state[_ACCESSES])

    @property
    def columns(self) -> tuple[Any, ...]:
        """What `access` works on: state, keys, units, times, links, tree, sizes and hits."""
        return self._state, self._keys, self._units, self._times, self._links, self._tree, self._sizes, self._hits

    def accessed(self, keys: Keys64, units: int = 1) -> None:
        """A request used these blocks of `units` each, [n] uint64 in prefix order, whether the tier has them or not."""
        access(
            self._state, self._keys, self._units, self._times, self._links, self._tree, np.ascontiguousarray(keys),
            units, self._sizes, self._hits,
        )  # fmt: skip

    def hits(self) -> dict[float, float]:
        """Blocks that would have been hits so far, by multiple of the tier's capacity."""
        *found, seen = self._hits.tolist()
        return {
            multiple: min(max(0.0, hits + self.accesses - seen), float(self.accesses))
            for multiple, hits in zip(MULTIPLES, found, strict=True)
        }

    @property
    def sampled_share(self) -> float:
        """Share of all blocks that is sampled now."""
        return float(self._state[_LIMIT]) / _EVERYTHING
