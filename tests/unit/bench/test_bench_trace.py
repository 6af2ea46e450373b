from __future__ import annotations

import dataclasses
import math
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError
from kvtierd.bench.trace import rows
from kvtierd.bench.trace_admission import admission_rows, replay_admission
from kvtierd.bench.trace_costs import cost_rows
from kvtierd.bench.trace_file import make_trace
from kvtierd.bench.trace_manager import ManagerReplay, chunk_blocks, manager_rows, through_the_manager
from kvtierd.bench.trace_plot import as_svg
from kvtierd.bench.trace_queues import lru_hits
from kvtierd.bench.trace_replay import SEED, Cache, replay, return_hits
from kvtierd.bench.trace_synthetic import MAKERS, synthetic_traces
from kvtierd.bench.trace_table import (
    BOUND,
    MANAGER,
    MANAGER_LRU,
    OURS,
    REFERENCES,
    Column,
    as_text,
    capacities_for,
    judged,
    measure,
    policies_of,
)
from kvtierd.policy.admission import AdmitAll, SecondAccess
from kvtierd.policy.eviction import LruEviction
from kvtierd.policy.returns import ReturnModel


@pytest.fixture(scope="module")
def traces():
    return {trace.name: trace for trace in synthetic_traces(600)}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("capacity", [10, 200, 2000])
def test_lru_through_the_interface_of_tiers_is_lru_block_by_block(traces, name, capacity):
    trace = traces[name]
    cache = Cache(trace, capacity, LruEviction(capacity + trace.accesses, 1))
    replayed = replay(trace, cache, ReturnModel(capacity, SEED, records=64))
    assert replayed == lru_hits(trace.blocks, trace.starts, trace.unique, capacity)


@pytest.mark.parametrize("name", MAKERS)
def test_a_replay_gives_the_same_each_time_and_never_more_than_the_bound(traces, name):
    trace = traces[name]
    column = measure(trace, trace.unique // 10)
    assert return_hits(trace, trace.unique // 10) == round(column.ratios[OURS] * trace.accesses)
    assert all(ratio <= column.ratios[BOUND] for ratio in column.ratios.values())


def test_the_same_seed_makes_the_same_traces():
    for first, second in zip(synthetic_traces(200, seed=7), synthetic_traces(200, seed=7), strict=True):
        assert np.array_equal(first.blocks, second.blocks)
        assert np.array_equal(first.time_ns, second.time_ns)


def test_capacities_are_those_of_the_table_or_the_same_shares_of_a_smaller_trace():
    small = make_trace("small", [(0, list(range(1000)))])
    assert capacities_for(small) == (8, 16, 55, 164, 547)
    large = dataclasses.replace(small, unique=1_000_000)
    assert capacities_for(large) == (1_000, 3_000, 10_000, 30_000, 100_000)


def column(ours: float, best: float, bound: float) -> Column:
    return Column(10, dict.fromkeys(REFERENCES, 0.1) | {"ARC": best, OURS: ours, BOUND: bound})


def test_the_figures_are_judged_over_all_capacities():
    trace = make_trace("judged", [(0, "ab")])
    columns = [column(0.25, 0.2, 0.6), column(0.296, 0.3, 0.305), column(0.5, 0.4, 0.5)]
    _, _, _, below, share = judged(trace, columns)
    assert (round(below.value, 6), below.ok) == (0.004, True)
    assert round(share.value, 6) == round((0.05 + 0.1) / (0.4 + 0.1), 6)  # The gap of .005 is not worth closing.
    *_, below, share = judged(trace, [column(0.19, 0.2, 0.6)])
    assert not below.ok
    assert not share.ok


def test_a_trace_that_nothing_hits_has_no_ratio():
    trace = make_trace("once", [(0, "ab"), (1, "cd")])
    first, below = judged(trace, [measure(trace, 8)])
    assert (first.value, first.ratio) == (0, None)
    assert below.ok


def test_the_table_has_a_line_for_each_policy(traces):
    trace = traces["repeats"]
    text = as_text(trace, [measure(trace, 50), measure(trace, 500)])
    assert [line.split()[0] for line in text.splitlines()[2:]] == [*REFERENCES, OURS, BOUND]
    assert text.splitlines()[1].split() == ["50", "500"]


def test_the_bench_replays_a_file_at_the_capacities_asked_for(tmp_path, capsys):
    path = tmp_path / "two.jsonl"
    path.write_text('{"timestamp":0,"hash_ids":[1,2]}\n{"timestamp":1,"hash_ids":[1,2,3]}\n')
    made = list(rows(Options(file=path, tier_blocks=(9, 99))))
    assert [row.value for row in made[:2]] == [0.4, 0.4]
    assert "two: 2 requests, 5 block accesses, 3 blocks" in capsys.readouterr().err


def test_admitting_all_writes_every_block_once_and_misses_only_what_is_new(traces):
    trace = traces["agents"]
    outcome = replay_admission(trace, 50, AdmitAll())
    assert outcome.writes == trace.unique / trace.accesses
    assert outcome.hits == 1 - trace.unique / trace.accesses


@pytest.mark.parametrize("name", MAKERS)
def test_second_access_writes_less_and_hits_no_more(traces, name):
    trace = traces[name]
    everything = replay_admission(trace, 50, AdmitAll())
    second = replay_admission(trace, 50, SecondAccess())
    assert second.writes < everything.writes
    assert return_hits(trace, 50) / trace.accesses * 0.8 <= second.hits <= everything.hits


def test_admission_is_judged_at_the_size_that_its_goals_are_for(traces):
    assert all(row.goal for row in admission_rows(traces["repeats"], 10_000))
    assert not any(row.goal for row in admission_rows(traces["repeats"], 100))


def test_every_decision_has_a_cost():
    found = list(cost_rows(Options(quick=True)))
    assert len(found) == 9
    assert all(row.value > 0 and row.unit == "ns a block" for row in found)


@pytest.mark.parametrize("capacity", [300, 512, 2000])
def test_the_real_manager_hits_what_the_simulator_of_its_policy_hits(traces, capacity):
    trace = traces["documents"]
    column = measure(trace, capacity)
    (replay,) = through_the_manager(trace, [column])
    assert column.ratios[OURS] > 0.05
    assert column.ratios[MANAGER_LRU] == pytest.approx(column.ratios["LRU"], abs=0.01)
    # The tiers make room for a request before its own blocks are candidates; here a request is a tenth of the tier.
    assert column.ratios[MANAGER] == pytest.approx(column.ratios[OURS], abs=0.04)
    assert replay.accesses == trace.accesses
    assert sum(replay.seconds.values()) <= replay.total_s


def test_a_replay_through_the_manager_gives_the_same_each_time(traces):
    trace = traces["agents"]
    first, second = ManagerReplay(trace, 200, "returns"), ManagerReplay(trace, 200, "returns")
    first.run_to_end(trace.requests)
    second.run_to_end(trace.requests)
    assert first.hits == second.hits > 0
    assert np.array_equal(first.kept(), second.kept())


def test_figures_of_the_manager_have_goals(traces):
    column = measure(traces["repeats"], 400)
    replays = through_the_manager(traces["repeats"], [column])
    found = {row.metric.split(": ", 1)[1]: row for row in manager_rows(traces["repeats"], [column], replays)}
    assert found["through the manager, 400 blocks: block accesses"].goal == ">= 200000"
    assert sum(bool(row.goal) for row in found.values()) == 4


@pytest.mark.parametrize(("blocks", "chunk"), [(10, 10), (100_000, 50_000), (65_537, 1)])
def test_a_tier_of_the_manager_has_exactly_the_blocks_asked_for(blocks, chunk):
    assert chunk_blocks(blocks) == chunk


def test_the_plot_is_a_drawing_with_a_line_for_each_policy(traces):
    trace = dataclasses.replace(traces["repeats"], name="a < b")
    columns = [measure(trace, capacity) for capacity in (50, 500)]
    drawn = ET.fromstring(as_svg([(trace, columns), (trace, columns[:1])]))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert set(policies_of(columns)) <= set(texts)
    assert "a < b: share of block accesses that are prefix hits" in texts
    assert all(math.isfinite(float(point)) for point in _points(drawn))


def _points(drawn):
    for element in drawn.iter("{http://www.w3.org/2000/svg}polyline"):
        yield from element.attrib["points"].replace(",", " ").split()


def test_a_plot_that_cannot_be_written_is_named(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"hash_ids":[1,2]}\n')
    with pytest.raises(BenchError, match=r"no/plot\.svg"):
        list(rows(Options(file=path, tier_blocks=(9,), plot=tmp_path / "no" / "plot.svg")))
