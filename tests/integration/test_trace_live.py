"""The trace bench against a daemon, with real bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError
from kvtierd.bench.trace_file import make_trace
from kvtierd.bench.trace_live import live_rows, replay_live
from kvtierd.bench.workload import daemon_and_client


@pytest.fixture(scope="module")
def trace():
    return make_trace("live", [(i, [f"p{i % 7}.{k}" for k in range(3 + i % 7)]) for i in range(60)])


def test_a_live_replay_finds_all_that_fits(tmp_path, trace):
    ratio, requests, accesses, dropped = live_rows(Options(directory=tmp_path), trace)
    assert ratio.value == pytest.approx(1 - trace.unique / trace.accesses)
    assert ratio.ratio == pytest.approx(1)
    assert requests.value > 0
    assert accesses.value > requests.value
    assert dropped.value == 0
    assert not list(tmp_path.iterdir())


def test_a_live_replay_goes_to_the_endpoint_given_and_finds_nothing_of_the_one_before(tmp_path, trace):
    with daemon_and_client(tmp_path, 1, gpu__capacity=0, nvme__directory="", host__capacity="64MiB") as (daemon, _):
        for _ in range(2):
            ratio, *_others = live_rows(Options(endpoint=daemon.endpoint), trace)
            assert ratio.value == pytest.approx(1 - trace.unique / trace.accesses)


def test_a_live_replay_notices_wrong_bytes(tmp_path, trace, monkeypatch):
    with daemon_and_client(tmp_path, 1, gpu__capacity=0, nvme__directory="", host__capacity="64MiB") as (_, client):
        fetch = client.fetch

        def torn(*arguments):
            found = fetch(*arguments)
            found.blocks[-1, 100] ^= np.uint8(1)
            return found

        monkeypatch.setattr(client, "fetch", torn)
        with pytest.raises(BenchError, match="other bytes"):
            replay_live(client, trace, trace.requests)
