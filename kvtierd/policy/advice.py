"""Load or recompute: how much of a stored prefix is worth fetching for a client that says how fast it prefills.

A client either fetches a block or computes it again, and computing needs all blocks before it; so the question is
after how many leading blocks to stop fetching. Each hop of a fetch has a rate, measured on what it really moved.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import compiled

Costs = npt.NDArray[np.float64]


class RateMeter:
    """Bytes a second of a kind of move, as a mean that forgets: an old move weighs half after `half_life_moves`.

    `prior` is the rate before anything was moved. Raises ValueError unless both are positive.
    """

    def __init__(self, prior_bytes_per_s: float, half_life_moves: float = 64) -> None:
        if prior_bytes_per_s <= 0 or half_life_moves <= 0:
            raise ValueError(f"prior {prior_bytes_per_s} B/s and half-life {half_life_moves} must be positive")
        self._keep = 0.5 ** (1 / half_life_moves)
        self._seconds, self._bytes = 1e-9, prior_bytes_per_s * 1e-9

    def note(self, moved_bytes: int, elapsed_ns: int) -> None:
        """A move of so many bytes took so long; one of no length or no time tells nothing."""
        if moved_bytes > 0 and elapsed_ns > 0:
            self._bytes = self._bytes * self._keep + moved_bytes
            self._seconds = self._seconds * self._keep + elapsed_ns / 1e9

    @property
    def bytes_per_s(self) -> float:
        """The mean: bytes over time, so that long moves weigh more."""
        return self._bytes / self._seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """Fetch the first `load` blocks and compute the rest: what the fetch takes, what both take, and what computing
    everything would."""

    load: int
    load_s: float
    total_s: float
    recompute_s: float


@compiled(types.int64(types.float64[::1], types.float64, types.float64, types.float64[::1]))
def _best(fetch_s: Costs, compute_s: float, latency_s: float, out: Costs) -> int:
    """The longest of the cheapest loads; `out` gets what that load takes, and what it takes with the rest computed."""
    best, loaded_s = 0, latency_s
    out[0], out[1] = 0.0, compute_s * fetch_s.size
    for index in range(fetch_s.size):
        loaded_s += fetch_s[index]
        total_s = loaded_s + compute_s * (fetch_s.size - index - 1)
        # Sums of different order differ in their last bits: what is equal but for them is equal.
        if total_s <= out[1] * (1 + 1e-12):
            best = index + 1
            out[0], out[1] = loaded_s, total_s
    return best


def advise(fetch_s: Costs, compute_s: float, latency_s: float = 0.0) -> Advice:
    """Advice for a stored run of blocks.

    `fetch_s` [n] float64 has what fetching each takes, in seconds (infinite where it cannot be fetched), `compute_s` is
    what computing one takes, and `latency_s` is paid once if anything is fetched. Of equal choices the longer load
    wins: it leaves the engine free. Raises ValueError for times that are negative, or no time or an infinite one to
    compute.
    """
    if not (0 < compute_s < math.inf and latency_s >= 0) or not (fetch_s >= 0).all():
        raise ValueError(
            f"computing a block takes {compute_s} s, latency {latency_s} s and fetching one {fetch_s.min(initial=0)} s"
            " or more; times must be positive, and that of computing finite"
        )
    out = np.zeros(2)
    load = _best(fetch_s, compute_s, latency_s, out)
    return Advice(load, float(out[0]), float(out[1]), compute_s * fetch_s.size)
