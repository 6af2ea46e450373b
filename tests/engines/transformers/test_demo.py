"""The demonstration on a short prompt: every tier serves, every answer is the cold one, nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtierd.bench.rows import as_json
from kvtierd.connectors import demo_rig
from kvtierd.connectors.demo import bench_rows, run_demo
from kvtierd.connectors.demo_table import as_table, bench_row

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

TOKENS = 520  # 4 blocks of 128, and 8 tokens to compute


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_rig, "NEW_TOKENS", 4)


def test_every_tier_serves_before_and_after_a_restart(tmp_path: Path) -> None:
    steps: list[str] = []
    lines = list(run_demo(steps.append, tmp_path, TOKENS))
    assert [line.name for line in lines] == [
        "cold prefill",
        "gpu",
        "host",
        "nvme",
        "nvme after a restart",
        "host after a restart",
        "gpu after a restart",
    ]
    assert all(line.ok for line in lines), as_table(lines)
    assert all(line.sources == {line.tier: 4} and line.tokens_found == 512 for line in lines[1:])
    assert list(tmp_path.iterdir()) == []
    assert any("cold prefill of 520 tokens" in step for step in steps)
    fields = {"bench", "metric", "value", "unit", "reference", "reference_name", "ratio", "goal", "ok"}
    assert set(json.loads(as_json(bench_row(lines[2])))) == fields


def test_the_bench_measures_what_the_demo_shows(tmp_path: Path) -> None:
    steps: list[str] = []
    rows = list(bench_rows(quick=True, directory=tmp_path, progress=steps.append, prompt_tokens=TOKENS))
    assert [(row.metric, row.goal) for row in rows] == [
        ("time to first token from host", "<= 0.15"),
        ("time to first token from nvme after a restart", "<= 0.3"),
    ]
    assert all(row.ratio is not None and row.ratio > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
    assert "round 1 of 1" in steps
