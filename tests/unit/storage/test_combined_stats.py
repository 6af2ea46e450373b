"""Statistics of several devices as one."""

from __future__ import annotations

from kvtierd.storage.stats import COUNTERS, GAUGES, combine


def test_life_of_several_devices_is_that_of_the_first_to_end() -> None:
    base: dict[str, int | str] = dict.fromkeys((*COUNTERS, *GAUGES), 1) | {"mode": "o_direct", "state": "ok"}
    parts = [base | {"projected_life_days": days, "failed_devices": 0} for days in (900, "unknown", 700)]
    total = combine(parts, [])
    assert (total["projected_life_days"], total["devices"], total["mode"]) == (700, 3, "o_direct")
    assert (total["written_bytes"], total["segment_bytes"], total["state"]) == (3, 1, "ok")
    assert combine(parts[1:2], ["/b: broken"])["projected_life_days"] == "unknown"
    assert combine(parts[1:2], ["/b: broken"])["devices"] == 2
