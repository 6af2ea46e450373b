"""How much of the device's life is used: bytes written by cause, a day, and what that means for its rated endurance."""

from __future__ import annotations

from collections import Counter

from kvtierd.storage.stats import written_bytes

DAY_S = 86_400
LEAST_S = 600
"""A rate over less time than this says nothing about a day."""


class Endurance:
    """`rated_bytes` is what may be written in the device's life (0: not known), `before_bytes` what this store had
    written when it was opened."""

    def __init__(self, counters: Counter[str], rated_bytes: int, before_bytes: int, begun_ns: int) -> None:
        self._counters = counters
        self._rated_bytes = rated_bytes
        self._before_bytes = before_bytes
        self._begun_ns = begun_ns

    def stats(self, now_ns: int) -> dict[str, int | str]:
        """Gauges by name; see kvtierd.storage.stats."""
        written = written_bytes(self._counters)
        seconds = max((now_ns - self._begun_ns) / 1e9, LEAST_S)
        daily = int(written / seconds * DAY_S)
        total = self._before_bytes + written
        left = max(self._rated_bytes - total, 0)
        return {
            "lifetime_written_bytes": total,
            "written_bytes_a_day": daily,
            "rated_endurance_bytes": self._rated_bytes,
            "projected_life_days": left // daily if self._rated_bytes and daily else "unknown",
        }
