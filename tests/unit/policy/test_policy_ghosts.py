"""Ghost hits against the LRU tiers that they stand for."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest

from kvtierd.bench.trace_file import Trace
from kvtierd.bench.trace_replay import block_keys64
from kvtierd.bench.trace_synthetic import synthetic_traces
from kvtierd.policy.ghosts import MULTIPLES, GhostHits


def lru_hits(prompts: list[np.ndarray], capacity: float) -> int:
    """Block by block, tail first, as tiers touch them."""
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = 0
    for prompt in prompts:
        for key in prompt[::-1].tolist():
            hits += key in cache
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def popular_prompts(count: int, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    names = rng.integers(0, 1 << 64, (700, 12), np.uint64)
    weight = np.arange(1, 701) ** -0.7
    return [names[i, : 1 + i % 12] for i in rng.choice(700, count, p=weight / weight.sum())]


@pytest.mark.parametrize("capacity", [1, 40, 300, 3000])
def test_with_all_blocks_sampled_the_hits_are_those_of_lru(capacity):
    prompts = popular_prompts(1500)
    ghosts = GhostHits(capacity, secret=2, samples=1 << 15)
    for prompt in prompts:
        ghosts.accessed(prompt)
    assert ghosts.sampled_share == 1
    assert ghosts.hits() == {multiple: lru_hits(prompts, int(multiple * capacity)) for multiple in MULTIPLES}


def test_a_small_sample_comes_close():
    prompts = popular_prompts(6000)
    ghosts = GhostHits(600, secret=2, samples=1024)
    for prompt in prompts:
        ghosts.accessed(prompt)
    assert ghosts.sampled_share < 0.5
    for multiple, hits in ghosts.hits().items():
        true = lru_hits(prompts, int(600 * multiple)) / ghosts.accesses
        assert hits / ghosts.accesses == pytest.approx(true, abs=0.04)


def test_a_block_that_everybody_uses_counts_whether_it_is_sampled_or_not():
    rng = np.random.default_rng(4)
    shares = []
    for secret in range(6):
        ghosts = GhostHits(50, secret=secret, samples=32)
        for _ in range(3000):
            ghosts.accessed(np.append(np.uint64(9), rng.integers(0, 1 << 64, 3, np.uint64)))
        shares.append(ghosts.hits()[1.0] / ghosts.accesses)
    assert shares == pytest.approx([0.25] * 6, abs=0.02)


def byte_lru_hits(accesses: list[tuple[int, int]], capacity: float) -> int:
    """Blocks of (key, units) one by one; a hit is what an LRU tier of so many units would hold."""
    cache: collections.OrderedDict[int, int] = collections.OrderedDict()
    hits = 0
    for key, units in accesses:
        older = list(cache.items())
        younger, found = 0, False
        for name, size in reversed(older):
            if name == key:
                found = True
                break
            younger += size
        hits += found and younger + units <= capacity
        cache[key] = units
        cache.move_to_end(key)
    return hits


def test_blocks_of_different_sizes_count_by_their_size():
    rng = np.random.default_rng(5)
    names = rng.integers(0, 1 << 64, 90, np.uint64)
    ghosts, accesses = GhostHits(120, secret=2), []
    for pick in rng.zipf(1.3, 800) % 90:
        units = 1 if pick % 2 else 7
        ghosts.accessed(names[pick : pick + 1], units)
        accesses.append((int(pick), units))
    assert ghosts.hits() == {multiple: byte_lru_hits(accesses, int(multiple * 120)) for multiple in MULTIPLES}


@pytest.mark.parametrize("secret", range(40))
def test_a_tiny_sample_stays_within_its_bounds(secret):
    ghosts = GhostHits(1000, secret=secret, samples=8)
    for prompt in popular_prompts(300):
        ghosts.accessed(prompt)
    assert ghosts._state[0] < 8


def test_more_memory_never_hits_less_and_nothing_hits_more_than_was_used():
    ghosts = GhostHits(20, secret=1, samples=16)
    for prompt in popular_prompts(3000, seed=8):
        ghosts.accessed(prompt)
    hits = list(ghosts.hits().values())
    assert hits == sorted(hits)
    assert 0 <= hits[0] <= hits[-1] <= ghosts.accesses


def test_nothing_used_nothing_hit():
    ghosts = GhostHits(20, secret=1)
    ghosts.accessed(np.empty(0, np.uint64))
    assert set(ghosts.hits().values()) == {0}


@pytest.mark.parametrize(("capacity", "samples"), [(0, 100), (10, 4)])
def test_sizes_out_of_range_are_refused(capacity, samples):
    with pytest.raises(ValueError, match="capacity is"):
        GhostHits(capacity, 1, samples)


def block_lru_hits(trace: Trace, capacity: int) -> float:
    """Share of all block accesses that an LRU tier of so many blocks hits."""
    prompts = [trace.blocks[begin:end] for begin, end in itertools.pairwise(trace.starts.tolist())]
    return lru_hits(prompts, capacity) / trace.accesses


@pytest.mark.parametrize("capacity", [200, 800])
def test_on_traces_a_small_sample_comes_close_to_exact_lru(capacity):
    for trace in synthetic_traces(2500):
        ghosts = GhostHits(capacity, secret=7, samples=1024)
        keys = block_keys64(trace.unique)[trace.blocks]
        for begin, end in itertools.pairwise(trace.starts.tolist()):
            ghosts.accessed(keys[begin:end])
        for multiple, hits in ghosts.hits().items():
            exact = block_lru_hits(trace, int(multiple * capacity))
            assert hits / trace.accesses == pytest.approx(exact, abs=0.05), (trace.name, multiple)
