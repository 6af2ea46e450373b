"""The reference policies against plain Python, on random prefix trees and on small cases by hand."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from kvtierd.bench.rows import BenchError
from kvtierd.bench.trace_arc import arc_hits
from kvtierd.bench.trace_bound import bound_hits
from kvtierd.bench.trace_file import Trace, make_trace, read_traces
from kvtierd.bench.trace_queues import fifo_hits, lru_hits, s3fifo_hits, sieve_hits
from kvtierd.bench.trace_tinylfu import tinylfu_hits

REPLAYS = [fifo_hits, lru_hits, sieve_hits, s3fifo_hits, arc_hits, tinylfu_hits, bound_hits]


def random_trace(seed: int, requests: int = 300) -> Trace:
    rng = np.random.default_rng(seed)
    paths = [[int(rng.integers(3))] for _ in range(30)]
    made = []
    for number in range(requests):
        path = paths[int(rng.integers(len(paths)))]
        path += rng.integers(0, 100, rng.integers(0, 3)).tolist()
        if len(path) > 12:
            del path[int(rng.integers(1, 4)) :]
        made.append((number, list(path)))
    return make_trace(f"random {seed}", made)


def hits(replay, trace: Trace, capacity: int) -> int:
    return int(replay(trace.blocks, trace.starts, trace.unique, capacity))


def requests_of(trace: Trace) -> list[list[int]]:
    return [trace.blocks[a:b].tolist() for a, b in zip(trace.starts[:-1], trace.starts[1:], strict=True)]


def model_hits(trace: Trace, capacity: int, *, refresh: bool) -> int:
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    found = 0
    for blocks in requests_of(trace):
        run = next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        found += run
        for block in reversed(blocks):
            if block in cache:
                if refresh:
                    cache.move_to_end(block)
                continue
            if len(cache) == capacity:
                cache.popitem(last=False)
            cache[block] = None
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [1, 7, 40, 1000])
def test_lru_and_fifo_are_those_of_an_ordered_dict(seed, capacity):
    trace = random_trace(seed)
    assert hits(lru_hits, trace, capacity) == model_hits(trace, capacity, refresh=True)
    assert hits(fifo_hits, trace, capacity) == model_hits(trace, capacity, refresh=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [1, 2, 7, 40, 1000])
def test_no_policy_beats_the_bound(seed, capacity):
    trace = random_trace(seed)
    bound = hits(bound_hits, trace, capacity)
    assert all(hits(replay, trace, capacity) <= bound for replay in REPLAYS)


@pytest.mark.parametrize("replay", REPLAYS)
def test_a_cache_that_holds_all_hits_whatever_was_seen_before(replay):
    trace = random_trace(5)
    seen: set[int] = set()
    expected = 0
    for blocks in requests_of(trace):
        expected += sum(block in seen for block in blocks)
        seen.update(blocks)
    capacity = trace.unique * (200 if replay is tinylfu_hits else 1)  # Its window is a hundredth of the capacity.
    assert hits(replay, trace, capacity) == expected


def test_the_bound_drops_the_tail_of_what_comes_back_last():
    trace = make_trace("by hand", [(0, "abc"), (1, "xy"), (2, "xy"), (3, "abc")])
    assert hits(bound_hits, trace, 4) == 2 + 2
    assert hits(bound_hits, trace, 3) == 2 + 1


def test_hits_end_at_the_first_miss():
    trace = make_trace("a hole", [(0, "ab"), (1, "xyz"), (2, "ab")])
    assert hits(fifo_hits, trace, 4) == 1  # Inserted were b a z y x: b is gone, and a still counts.
    trace = make_trace("a hole at the head", [(0, "ab"), (1, "a"), (2, "xy"), (3, "ab")])
    assert hits(lru_hits, trace, 3) == 1 + 1


def test_s3fifo_remembers_what_left_its_small_queue():
    scan = [(i, [f"s{i}"]) for i in range(2, 40)]
    trace = make_trace("ghost", [(0, "a"), *scan[:10], (12, "a"), *scan[12:], (60, "a")])
    assert hits(s3fifo_hits, trace, 10) == 1
    assert hits(lru_hits, trace, 10) == 0


def test_a_trace_numbers_blocks_by_their_whole_prefix_in_order_of_time():
    trace = make_trace("order", [(5_000, ["b", "c"]), (2_000, ["a", "c"]), (9_000, []), (7_000, ["b", "c"])])
    assert trace.starts.tolist() == [0, 2, 4, 6]
    assert trace.blocks.tolist() == [0, 1, 2, 3, 2, 3]
    assert trace.time_ns.tolist() == [0, 3_000, 5_000]
    assert (trace.unique, trace.requests, trace.accesses) == (4, 3, 6)


def test_a_file_with_families_gives_a_trace_of_each(tmp_path):
    path = tmp_path / "agents.jsonl"
    path.write_text(
        '{"family":"b","timestamp_us":2000000,"hash_ids":[1,2],"output_bytes":3}\n'
        '{"family":"a","timestamp_us":1000000,"hash_ids":[1,3]}\n\n'
    )
    whole, first, second = read_traces(path)
    assert (whole.name, whole.requests, whole.time_ns.tolist()) == ("agents", 2, [0, 1_000_000_000])
    assert (first.name, first.accesses) == ("agents:a", 2)
    assert second.name == "agents:b"


def test_a_file_without_time_is_one_request_a_second(tmp_path):
    path = tmp_path / "plain.jsonl"
    path.write_text('{"hash_ids":[1]}\n{"hash_ids":[1]}\n')
    (trace,) = read_traces(path)
    assert trace.time_ns.tolist() == [0, 1_000_000_000]


@pytest.mark.parametrize(
    ("text", "named"),
    [('{"hash_ids":[1]}\n{"hash_ids":7}\n', "request 2"), ('{"other":[1]}\n', "hash_ids"), ("", "no request")],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, text, named):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=named) as error:
        read_traces(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BenchError, match=r"nowhere\.jsonl"):
        read_traces(tmp_path / "nowhere.jsonl")
