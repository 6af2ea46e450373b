"""The benches of attention, run small: rows come out valid and say what they are measured against."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from kvtierd.bench import accuracy, attention
from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError
from kvtierd.gpu.attend_host import HostAttention


def test_without_torch_the_bench_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BenchError, match="pip install"):
        list(attention.rows(Options()))


def test_rows_against_the_streaming_read():
    found = list(attention.rows_of(512, 1, 2, with_torch=False))
    assert [row.goal for row in found] == [">= 0.5", "<= 1.0", ""]
    assert found[0].reference is not None


def test_bf16_and_fp8_blocks_of_the_bench_hold_the_same():
    kv = attention.Kv(1024)
    ours = attention.Ours(kv.query, 1)
    exact, small = ours.run(kv.bf16)[0], ours.run(kv.fp8)[0]
    assert np.linalg.norm(exact - small) < 0.1 * np.linalg.norm(exact)
    assert not np.array_equal(exact, small)


def test_every_shape_of_the_matrix_is_exact():
    device = HostAttention()
    for case in accuracy.matrix():
        errors = accuracy.measure(case, 150, device)
        assert errors["bf16"] <= 1e-5, case
        assert errors["fp8"] <= 1e-5, case
        assert 1e-4 < errors["loss"] < 1, case
