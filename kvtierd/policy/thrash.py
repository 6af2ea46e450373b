"""Thrashing: a tier that evicts what is asked for again right away, because more is in use than it holds.

The sign is the share of blocks brought into the tier that had left it not long ago. Evictions of the last `capacity`
blocks are remembered; a block that comes back while it is among them would have stayed in a tier of twice the size.
Hysteresis: the state begins above one share and ends below a lower one, each judged over a window that is as long as
it takes to fill a part of the tier, so that small and large tiers change their state equally fast in their own terms.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.policy.key_filter import KeyFilter

Keys64 = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """When thrashing begins and ends, as shares of the blocks that came in; `window` is a share of the capacity."""

    begin: float = 0.5
    end: float = 0.25
    window: float = 0.25


def judge(share: float, *, active: bool, limits: Limits) -> bool:
    """Whether a tier thrashes, from the share of refetched blocks and whether it did before."""
    return share > (limits.end if active else limits.begin)


class ThrashGuard:
    """Watches one tier of `capacity` blocks. Raises ValueError for limits out of order or no capacity."""

    def __init__(self, capacity: int, secret: int, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        if not 0 <= self._limits.end <= self._limits.begin <= 1 or not self._limits.window > 0:
            raise ValueError(f"{self._limits}: must be 0 <= end <= begin <= 1 and window > 0")
        self._evicted = KeyFilter(capacity, secret)
        self._window = max(1, round(capacity * self._limits.window))
        self._came = self._refetched = 0
        self.share = 0.0
        """Share of refetched blocks in the last full window."""
        self.active = False
        """Whether the tier thrashes."""
        self.episodes = 0
        """How often it has begun to."""

    def evicted(self, keys: Keys64) -> None:
        """Blocks left the tier; keys [n] uint64."""
        self._evicted.add(keys)

    def inserted(self, keys: Keys64) -> int:
        """Blocks came into the tier; how many of them had left it lately."""
        refetched = int(self._evicted.contains(keys).sum())
        self._came += keys.size
        self._refetched += refetched
        if self._came >= self._window:
            self.share = self._refetched / self._came
            was = self.active
            self.active = judge(self.share, active=was, limits=self._limits)
            self.episodes += self.active and not was
            self._came = self._refetched = 0
        return refetched

    def retry_after_ms(self, bytes_asked: int, bytes_per_second: float) -> int:
        """When to ask again for so many bytes: once as many have gone through the tier, within 10 ms and 10 s."""
        if bytes_per_second <= 0:
            return 1000
        return int(min(10_000, max(10, 1000 * bytes_asked / bytes_per_second)))
