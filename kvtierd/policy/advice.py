"""Load or recompute: how much of a stored prefix is worth fetching for a client that says how fast it prefills.

A client either fetches a block or computes it again, and computing needs all blocks before it; so the question is
after how many leading blocks to stop fetching. Each tier has a rate, measured on what it really moved.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Tiers = npt.NDArray[np.uint8]


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
    """Fetch the first `load` blocks and compute the rest; what that takes, and what computing everything would."""

    load: int
    seconds: float
    recompute_seconds: float


def advise(
    cheapest: Tiers, rates: dict[int, float], block_bytes: int, block_tokens: int, prefill_tokens_per_s: float,
    latency_s: float = 0.0,
) -> Advice:  # fmt: skip
    """Advice for a stored run of blocks whose cheapest copy lies in tier `cheapest[i]`, [n] uint8.

    `rates` maps each tier to bytes a second (infinite for one that costs nothing), `latency_s` is paid once if
    anything is fetched. Of equal choices the longer load wins: it leaves the engine free. Raises ValueError for a
    speed that is not positive and a tier without a rate.
    """
    if prefill_tokens_per_s <= 0 or block_tokens <= 0 or block_bytes <= 0:
        raise ValueError(
            f"prefill at {prefill_tokens_per_s} tokens/s of blocks of {block_tokens} tokens and {block_bytes} bytes:"
            " each must be positive"
        )
    unknown = set(np.unique(cheapest).tolist()) - rates.keys()
    if unknown or any(rate <= 0 for rate in rates.values()):
        raise ValueError(f"tiers {sorted(unknown)} have no rate among {rates}; each needs a positive one")
    compute_s = block_tokens / prefill_tokens_per_s
    rate_of = np.ones(256)
    rate_of[list(rates)] = list(rates.values())
    load_s = block_bytes / rate_of[cheapest]
    total_s = np.concatenate([[0.0], latency_s + np.cumsum(load_s)])
    total_s += compute_s * np.arange(cheapest.size, -1, -1)
    load = int(cheapest.size - np.argmin(total_s[::-1]))
    return Advice(load, float(total_s[load]), compute_s * cheapest.size)
