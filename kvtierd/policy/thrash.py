"""Thrashing: a tier that evicts what is asked for again right away, because more is in use than it holds.

The sign is the share of blocks that need a place in the tier and had left it not long ago. Evictions of the last
`capacity` blocks are remembered; a block that comes back while it is among them would have stayed in a tier of twice
the size. Hysteresis: the state begins above one share and ends below a lower one, each judged over a window that is as
long as it takes to fill a part of the tier, so that small and large tiers change their state equally fast in their own
terms. What was refused while the state lasts counts too: it shows that the load is still there.

While a tier thrashes, admission control keeps what was used within `protect_ns` (Denning's working set: twice the time
in which the tier's capacity was asked for), and lets everything else pass through a small part of it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.policy.key_filter import KeyFilter

Keys64 = npt.NDArray[np.uint64]

SECOND_NS = 1_000_000_000
PROTECT_NS_MIN, PROTECT_NS_MAX = 2 * SECOND_NS, 300 * SECOND_NS
"""Times of use are known to the second; and whoever waits longer than some minutes has gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """When thrashing begins and ends, as shares of the blocks that need a place, judged over a window of at least
    `window` of the capacity and `window_min` blocks: a few blocks say nothing of a small tier."""

    begin: float = 0.5
    end: float = 0.25
    window: float = 0.25
    window_min: int = 32


def judge(share: float, *, active: bool, limits: Limits) -> bool:
    """Whether a tier thrashes, from the share of refetched blocks and whether it did before."""
    return share > (limits.end if active else limits.begin)


class ThrashGuard:
    """Watches one tier of `capacity` blocks. Raises ValueError for limits out of order or no capacity."""

    def __init__(self, capacity: int, secret: int, now_ns: int = 0, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        if not 0 <= self._limits.end <= self._limits.begin <= 1 or not self._limits.window > 0:
            raise ValueError(f"{self._limits}: must be 0 <= end <= begin <= 1 and window > 0")
        self._secret = secret
        self.evicted_keys = KeyFilter(capacity, secret)
        """What left the tier lately."""
        self._began_ns = now_ns
        self._wanted = self._refetched = 0
        self.capacity = capacity
        self.share = 0.0
        """Share of refetched blocks in the last window."""
        self.active = False
        """Whether the tier thrashes."""
        self.episodes = 0
        """How often it has begun to."""
        self.protect_ns = PROTECT_NS_MIN
        """How long what was used stays out of reach of newcomers while the tier thrashes."""

    def resize(self, capacity: int) -> None:
        """The tier has another size now; what was evicted is remembered only while the filter's size stays."""
        if capacity == self.capacity:
            return
        self.capacity = capacity
        evicted = KeyFilter(capacity, self._secret)
        if evicted.capacity != self.evicted_keys.capacity:
            self.evicted_keys = evicted

    def evicted(self, keys: Keys64) -> None:
        """Blocks left the tier; keys [n] uint64."""
        self.evicted_keys.add(keys)

    def wanted(self, keys: Keys64, now_ns: int) -> int:
        """Blocks need a place in the tier, whether they get it or not; how many of them had left it lately."""
        refetched = self.lately_evicted(keys)
        self.count(keys.size, refetched, now_ns)
        return refetched

    def lately_evicted(self, keys: Keys64) -> int:
        """How many blocks left the tier lately, and are remembered; keys [n] uint64."""
        return int(self.evicted_keys.contains(keys).sum())

    def count(self, wanted: int, refetched: int, now_ns: int) -> None:
        """So many blocks need a place in the tier, and so many of them had left it lately."""
        self._wanted += wanted
        self._refetched += refetched
        if self._wanted >= self._window:
            self._end_window(self._refetched / self._wanted, now_ns)

    def tick(self, now_ns: int) -> None:
        """Judge a window that has lasted too long for thrashing by what there was: so the state ends by itself."""
        if self.active and now_ns - self._began_ns > self.protect_ns:
            self._end_window(self._refetched / self._window, now_ns)

    def retry_after_ms(self, blocks: int) -> int:
        """When to ask again for so many blocks: once as many have gone through the tier, within 10 ms and 10 s."""
        residence_ns = self.protect_ns / 2
        return int(min(10_000, max(10, residence_ns * blocks / self.capacity / 1e6)))

    @property
    def _window(self) -> int:
        return max(1, self._limits.window_min, round(self.capacity * self._limits.window))

    def _end_window(self, share: float, now_ns: int) -> None:
        self.share = share
        was, self.active = self.active, judge(share, active=self.active, limits=self._limits)
        if self.active and not was:
            self.episodes += 1
            residence_ns = (now_ns - self._began_ns) * self.capacity // self._wanted
            self.protect_ns = min(PROTECT_NS_MAX, max(PROTECT_NS_MIN, 2 * residence_ns))
        self._wanted = self._refetched = 0
        self._began_ns = now_ns
