"""What a block is worth keeping, from how blocks of its kind have returned: the fit that the ring's counts go through.

1. For every kind and age bin: how many returned at that age, of how many that reached it (Kaplan and Meier's estimate,
   with half a bin for those still waiting in it). Sums go to the parents.
2. From the parents down, a kind's hazard (the chance to return within a bin, once there) is shrunk to its parent's by
   as many pseudo-observations as SHRINKAGE; bins are smoothed with their neighbours.
3. The index of an age is the best rate of return for the space that a block takes from now on: the maximum over all
   times to give up of (chance to return until then) / (expected time until then or the return). That is Gittins' index
   (J. Gittins, 1979) for one cache slot; it differs from the hazard by seeing a return that is still ahead, as after a
   think time. All ages at once: the slopes of the upper concave hull of (expected time, chance).
4. Its logarithm is the level, in quarter octaves, by which blocks of all kinds are compared. Of a shared kind it is
   relative to the block's own mean interval, and a little higher the more often its blocks were used: of two blocks
   that seem equally likely to return, the one that has proved it more often is.

Without data the hazard is the same in each bin, the index falls with age, and the order is that of LRU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import Word, compiled, helper, subroutine
from kvtierd.policy.ages import BINS, RELATIVE_ONE, age_bin, elapsed, relative_bin
from kvtierd.policy.history import (
    COUNTS_TYPE,
    DUE,
    FILLED,
    FRESH,
    HEAD,
    OBSERVED,
    OPEN,
    RECORDS_TYPE,
    STATE_TYPE,
    Counts,
    Records,
    State,
)
from kvtierd.policy.kinds import ANY_SHARED, KINDS, NO_PARENT, NODES, SHARED, Parents, is_relative, uses_doubled

SHRINKAGE = 40.0
LEVELS_AN_OCTAVE = 4
LEVEL_ZERO = 112
"""Level of a rate of one return a tick."""
LEVEL_MAX = 126
PACE_LEVELS = LEVELS_AN_OCTAVE // 2
"""Levels by which a block's rate falls for each bin (half an octave) of its pace."""

_PROVEN_LEVELS = 1
"""Levels that a shared kind gains for each doubling of its blocks' uses."""
_BLIND_HAZARD = 0.02
"""Chance to return within a bin of half an octave before anything is known; with the weight of one observation."""
_BLIND_SHARED = 0.15
_BLIND_SHARED_WEIGHT = 5.0

FIT_EVERY = 1024
"""Observations between two fits, at least: a fit takes some tenths of a millisecond."""
RING_PARTS = 64
"""A larger ring is fitted once in so many parts of it: what a fit walks through grows with the ring."""
FIRST_FIT_EVERY = 64
"""The same while little is known."""
FIRST_FITS_UNTIL = 4096

Levels = npt.NDArray[np.int16]
Widths = npt.NDArray[np.float64]
Scratch = npt.NDArray[np.float32]


@helper
def level_of(levels: Levels, kind: Word, pace: Word, age: Word) -> Word:
    """Level of a block, 0..LEVEL_MAX."""
    if is_relative(kind):
        level = np.int64(levels[kind, relative_bin(age, pace)]) - PACE_LEVELS * np.int64(pace)
    else:
        level = np.int64(levels[kind, age_bin(age)])
    return min(LEVEL_MAX, max(0, level))


@helper
def _add_waiting(ring: Records, state: State, waiting: Scratch, now: Word) -> None:
    """Count the open observations of the newer half of the ring by the age that they have reached."""
    for behind in range(1, min(state[FILLED], ring.size // 2) + 1):
        record = ring[(state[HEAD] - behind) % ring.size]
        if record.state == OPEN:
            age = elapsed(record.at, now)
            bin_ = relative_bin(age, record.interval) if is_relative(record.kind) else age_bin(age)
            waiting[record.kind, bin_] += record.weight


@helper
def _pool(parents: Parents, events: Scratch, waiting: Scratch, seen: Word) -> None:
    """Add every node's counts to its parent's, and note which have any."""
    for node in range(NODES):
        total = np.float32(0.0)
        for bin_ in range(BINS):
            total += events[node, bin_] + waiting[node, bin_]
        seen[node] = total > 0
        if seen[node] and parents[node] != NO_PARENT:
            for bin_ in range(BINS):
                events[parents[node], bin_] += events[node, bin_]
                waiting[parents[node], bin_] += waiting[node, bin_]


@helper
def _blind(node: Word, bin_: Word, widths: Widths) -> Word:
    if node != ANY_SHARED:
        return _BLIND_HAZARD
    return _BLIND_SHARED if bin_ > RELATIVE_ONE + 3 else 0.5 * widths[1, bin_] / (1.0 + widths[1, bin_])


@helper
def _shrink(node: Word, parent: Word, events: Scratch, waiting: Scratch, widths: Widths, hazards: Word) -> None:
    at_risk = 0.0
    for bin_ in range(BINS - 1, -1, -1):
        at_risk += events[node, bin_] + waiting[node, bin_]
        if parent == NO_PARENT:
            prior = _blind(node, bin_, widths)
            weight = _BLIND_SHARED_WEIGHT if node == ANY_SHARED else 1.0
        else:
            prior, weight = hazards[parent, bin_], SHRINKAGE
        exposed = at_risk - 0.5 * waiting[node, bin_]
        hazards[node, bin_] = (events[node, bin_] + weight * prior) / (exposed + weight)


@helper
def _curve(hazard: Word, widths: Word, times: Word, chances: Word) -> None:
    """Expected time and chance of return until the end of each bin, from 0; hazards smoothed on the way."""
    time, chance, waiting, before = 0.0, 0.0, 1.0, hazard[0]
    times[0] = chances[0] = 0.0
    for bin_ in range(BINS):
        smooth = 0.25 * before + 0.5 * hazard[bin_] + 0.25 * hazard[min(BINS - 1, bin_ + 1)]
        before = hazard[bin_]
        time += waiting * (1.0 - 0.5 * smooth) * widths[bin_]
        chance += waiting * smooth
        waiting *= 1.0 - smooth
        times[bin_ + 1], chances[bin_ + 1] = time, chance


@helper
def _index_levels(times: Word, chances: Word, hull: Word, levels: Word) -> None:
    """Slopes of the hull that lies over the curve, from each bin's beginning on, as levels."""
    top = 0
    hull[0] = BINS
    for bin_ in range(BINS - 1, -1, -1):
        time, chance = times[bin_], chances[bin_]
        while top > 0:
            near, far = hull[top], hull[top - 1]
            if (chances[near] - chance) * (times[far] - time) > (chances[far] - chance) * (times[near] - time):
                break
            top -= 1
        span = times[hull[top]] - time
        rate = (chances[hull[top]] - chance) / span if span > 1e-12 else 1e-12
        levels[bin_] = np.int16(np.floor(np.log2(rate + 1e-12) * LEVELS_AN_OCTAVE)) + LEVEL_ZERO
        top += 1
        hull[top] = bin_


@subroutine
def _fit(
    ring: Records, returned: Counts, unreturned: Counts, state: State, parents: Parents, widths: Widths,
    scratch: Scratch, levels: Levels, now: Word,
) -> None:  # fmt: skip
    """Make `levels` [NODES, BINS] int16 anew. `widths` is [2, BINS], `scratch` [3, NODES, BINS] float32."""
    events, waiting, hazards = scratch[0], scratch[1], scratch[2]
    events[:KINDS], waiting[:KINDS] = returned, unreturned
    events[KINDS:] = waiting[KINDS:] = np.float32(0.0)
    _add_waiting(ring, state, waiting, now)
    seen = np.zeros(NODES, np.bool_)
    _pool(parents, events, waiting, seen)
    times, chances = np.empty(BINS + 1), np.empty(BINS + 1)
    hull = np.empty(BINS + 1, np.int64)
    for node in range(NODES - 1, -1, -1):
        parent = parents[node]
        if parent != NO_PARENT and not seen[node]:
            hazards[node] = hazards[parent]
            levels[node] = levels[parent]
        else:
            _shrink(node, parent, events, waiting, widths, hazards)
            _curve(hazards[node], widths[np.int64(is_relative(node))], times, chances)
            _index_levels(times, chances, hull, levels[node])
        if SHARED <= node < KINDS:
            levels[node] += np.int16(_PROVEN_LEVELS * uses_doubled(node))


@compiled(
    types.void(
        RECORDS_TYPE, COUNTS_TYPE, COUNTS_TYPE, STATE_TYPE, types.int32[::1], types.float64[:, ::1],
        types.float32[:, :, ::1], types.int16[:, ::1], types.uint32,
    )
)  # fmt: skip
def fit_if_due(
    ring: Records, returned: Counts, unreturned: Counts, state: State, parents: Parents, widths: Widths,
    scratch: Scratch, levels: Levels, now: int,
) -> None:  # fmt: skip
    """Make `levels` anew once enough was observed since the last time, and the first time."""
    if state[FRESH] < state[DUE]:
        return
    state[OBSERVED] += state[FRESH]
    state[FRESH] = 0
    state[DUE] = FIRST_FIT_EVERY if state[OBSERVED] < FIRST_FITS_UNTIL else max(FIT_EVERY, ring.size // RING_PARTS)
    _fit(ring, returned, unreturned, state, parents, widths, scratch, levels, now)
