from __future__ import annotations

import pytest

from kvtierd.index.selfbench import LookupBench, filled, growth, random_keys


def test_the_lookup_bench_measures_a_full_table():
    bench = LookupBench(20_000, probes=5000, with_dict=True)
    assert bench.pages.stats()["load"] >= 0.949
    for rate in (bench.lookups_per_second, bench.gathered_lines_per_second, bench.dict_lookups_per_second):
        assert rate() > 0
    assert bench.bytes_per_block() <= 160
    assert bench.pages.stats()["buckets_touched_max"] == 2


def test_a_bench_of_a_broken_table_gives_no_figure():
    bench = LookupBench(1000, probes=1000)
    found = bench.pages.lookup(bench._probes, 7)
    bench.pages.delete(found[found >= 0][:1])
    with pytest.raises(RuntimeError, match="keys were found"):
        bench.lookups_per_second()
    with pytest.raises(RuntimeError, match="with_dict"):
        bench.dict_lookups_per_second()


def test_growth_reaches_its_load_without_refusing():
    grown = growth(1000, 20_000, replays=2)
    assert 0.95 <= grown.load_before_growth <= 0.951
    assert grown.refused == 0
    assert 0 < grown.pause_ms <= grown.pause_once_ms
    assert 0 < grown.searched_max <= 256


def test_keys_that_are_not_there_fill_nothing():
    blocks, pages = filled(random_keys(0, 1), capacity=10)
    assert len(blocks) == len(pages) == 0
