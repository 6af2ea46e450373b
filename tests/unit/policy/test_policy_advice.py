from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kvtierd.policy.advice import RateMeter, advise

HOST, NVME = 2, 4
BLOCK_BYTES, BLOCK_TOKENS = 1000, 100


def tiers(*names: int) -> np.ndarray:
    return np.array(names, np.uint8)


def ask(masks, *, host=1e9, nvme=1e5, prefill=1e4, latency=0.0):
    cost_s = np.full(8, math.inf)
    cost_s[HOST], cost_s[NVME] = BLOCK_BYTES / host, BLOCK_BYTES / nvme
    return advise(cost_s[masks], BLOCK_TOKENS / prefill, latency)


def test_what_loads_faster_than_it_computes_is_loaded():
    fast = ask(tiers(HOST, HOST, NVME), nvme=1e6)
    assert fast.load == 3
    assert fast.load_s == fast.total_s == pytest.approx(2 * 1e-6 + 1e-3)
    assert fast.recompute_s == pytest.approx(0.03)


def test_a_slow_disk_behind_a_fast_gpu_is_left_alone():
    slow = ask(tiers(HOST, HOST, NVME, NVME), nvme=1e4, prefill=1e4)
    assert slow.load == 2
    assert slow.load_s == pytest.approx(2e-6)
    assert slow.total_s == pytest.approx(0.02, abs=1e-4)


def test_a_slow_block_is_loaded_for_the_sake_of_those_behind_it():
    assert ask(tiers(NVME, *[HOST] * 9), nvme=5e4).load == 10
    assert ask(tiers(NVME, HOST), nvme=4e4).load == 0


def test_latency_is_paid_once_and_can_decide():
    assert ask(tiers(*[HOST] * 4), latency=0.1).load == 0
    assert ask(tiers(*[HOST] * 40), latency=0.1).load == 40


def test_of_equal_choices_the_longer_load_wins():
    assert ask(tiers(NVME, NVME), nvme=1e5, prefill=1e4).load == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_faster(seed):
    rng = np.random.default_rng(seed)
    cheapest = rng.choice([HOST, NVME], 12).astype(np.uint8)
    speeds = {HOST: 10 ** rng.uniform(4, 7), NVME: 10 ** rng.uniform(3, 6)}
    latency = rng.uniform(0, 0.02)
    found = ask(cheapest, host=speeds[HOST], nvme=speeds[NVME], latency=latency)
    loads = [BLOCK_BYTES / speeds[int(tier)] for tier in cheapest]
    totals = [
        (latency if k else 0) + sum(itertools.islice(loads, k)) + (12 - k) * BLOCK_TOKENS / 1e4 for k in range(13)
    ]
    assert found.total_s == pytest.approx(min(totals)) == pytest.approx(totals[found.load])
    assert found.load_s == pytest.approx((latency if found.load else 0) + sum(itertools.islice(loads, found.load)))


def test_nothing_stored_is_nothing_to_load():
    nothing = ask(tiers(), latency=1)
    assert (nothing.load, nothing.load_s, nothing.total_s, nothing.recompute_s) == (0, 0, 0, 0)


def test_a_tier_that_costs_nothing_is_always_loaded():
    assert ask(tiers(HOST, HOST), host=math.inf, prefill=1e12).load == 2


def test_what_cannot_be_fetched_ends_the_load():
    assert ask(tiers(HOST, 1, HOST)).load == 1


@pytest.mark.parametrize("wrong", [{"prefill": -1}, {"nvme": -1}, {"latency": -1}, {"latency": math.nan}])
def test_times_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=r"positive"):
        ask(tiers(HOST, NVME), **wrong)


def test_an_engine_that_never_gets_done_is_refused():
    with pytest.raises(ValueError, match="finite"):
        advise(np.ones(1), math.inf)


def test_a_meter_is_the_mean_of_what_moved_lately():
    meter = RateMeter(1e9, half_life_moves=10)
    assert meter.bytes_per_s == pytest.approx(1e9)
    for _ in range(200):
        meter.note(2_000_000, 1_000_000)
    assert meter.bytes_per_s == pytest.approx(2e9)
    for _ in range(10):
        meter.note(1_000_000, 1_000_000)
    assert meter.bytes_per_s == pytest.approx(1.5e9, rel=0.01)


def test_moves_of_nothing_tell_nothing():
    meter = RateMeter(1e9)
    meter.note(0, 5)
    meter.note(5, 0)
    assert meter.bytes_per_s == pytest.approx(1e9)


@pytest.mark.parametrize(("prior", "half_life"), [(0, 1), (1, 0), (-1, 1)])
def test_a_meter_without_a_prior_is_refused(prior, half_life):
    with pytest.raises(ValueError, match="positive"):
        RateMeter(prior, half_life)
