from __future__ import annotations

import pytest

from kvtierd.telemetry.counters import Counters, Metric

TABLE = (Metric("blocks_count", "gauge", "blocks now"), Metric("hits_total", "counter", "lookups that hit"))


def test_counters_start_at_zero_and_add_up() -> None:
    counters = Counters(TABLE)
    counters.add("hits_total")
    counters.add("hits_total", 4)
    counters.set("blocks_count", 9)
    counters.add("blocks_count", -2)
    assert counters.read() == {"blocks_count": 7, "hits_total": 5}


def test_name_without_a_row_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Counters(TABLE).add("hit_total")


def test_counter_cannot_be_set() -> None:
    with pytest.raises(ValueError, match="hits_total is a counter"):
        Counters(TABLE).set("hits_total", 0)


def test_reading_gives_a_copy() -> None:
    counters = Counters(TABLE)
    counters.read()["hits_total"] = 5
    assert counters.read()["hits_total"] == 0
