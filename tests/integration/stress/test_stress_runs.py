"""The stress against real daemons and client processes: it passes where all is well, and finds what is planted."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.stress import chaos, loading
from kvtierd.stress.options import Options
from kvtierd.stress.processes import StressError
from kvtierd.stress.rig import Found
from kvtierd.stress.run import run_stress

SHAPE = Geometry(block_size=64, layers=2, kv_heads=2, k_dim=64, v_dim=64)  # 64 KiB a block
SMALL = Options(
    tokens=256 * 64, geometry="custom", shape=SHAPE, heads=4, gpu_bytes=2 * MIB, host_bytes=8 * MIB, quick=True, seed=3
)


@pytest.fixture(autouse=True)
def short_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "QUICK_MIXED_S", 1.0)


def run(tmp_path: Path, **changes: Any) -> Found:
    return run_stress(dataclasses.replace(SMALL, nvme=tmp_path, **changes), io.StringIO())


@pytest.mark.timeout(300)
def test_the_quick_form_passes_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "kvtierd.cli.main", "stress", "--quick", "--json", "--nvme", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass"
    assert report["findings"] == []
    assert report["tokens"] == 131_072
    assert report["counts"]["verify"]["blocks"] == 1024
    assert report["counts"]["sample"]["missing"] == report["counts"]["verify"]["wrong"] == 0
    steps, layers, contexts = 2, 2, 1 + 8
    assert report["counts"]["attends_checked"] == steps * layers * contexts
    assert 0 < report["figures"]["memory_peak"] <= report["figures"]["memory_budget"]
    metrics = [row["metric"] for row in report["rows"]]
    assert any("decode step" in metric for metric in metrics)
    assert not list(tmp_path.iterdir()), "something was left on the disk"


def test_fp8_is_checked_to_the_bit(tmp_path: Path) -> None:
    found = run(tmp_path, fp8=True)
    assert found.passed, found.findings
    assert found.counts["verify"]["lossy"] > 0
    assert found.figures["attend_lossy_error"] > found.figures["attend_error"]
    assert 1.5 < found.figures["fp8_ratio"] < 2.0


PLANTS: tuple[tuple[dict[str, Any], dict[int, str]], ...] = (
    ({"kind": "flipped bit", "blocks": [70], "offset": 12_345, "bit": 3}, {70: "1 elements of layer 0"}),
    ({"kind": "swapped block", "blocks": [11, 12]}, {11: "elements of layer 1", 12: "elements of layer 0"}),
    ({"kind": "dropped layer", "blocks": [200], "layer": 1}, {200: "elements of layer 1"}),
    ({"kind": "stale scale", "blocks": [99], "layer": 1, "head": 1}, {99: "elements of layer 1"}),
)


def test_every_planted_fault_is_found(tmp_path: Path) -> None:
    found = run(tmp_path, plants=tuple(plant for plant, _ in PLANTS))
    assert not found.passed
    expected = {block: what for _, blocks in PLANTS for block, what in blocks.items()}
    verified = [finding for finding in found.findings if finding.startswith("verify: ")]
    assert found.counts["verify"]["wrong"] == len(expected) == len(verified)
    for block, what in expected.items():
        assert any(f"block {block} of stream 0 is wrong" in finding and what in finding for finding in verified)
    decoded = [finding for finding in found.findings if finding.startswith("decode: ")]
    assert any("layer 1" in finding for finding in decoded), "a layer was dropped, and a scale was stale"
    assert not found.ended_at, "it went on"


def test_chaos_loses_nothing_that_was_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "QUICK_CHAOS_S", 12.0)
    monkeypatch.setattr(chaos, "FAULTY_S", 0.7)
    monkeypatch.setattr(chaos, "PAUSE_S", 0.5)
    found = run(tmp_path, chaos=True)
    assert found.passed, found.findings
    what = found.counts["chaos"]
    assert what["disk faults"] + what.get("daemon killed", 0) + what.get("clients killed", 0) >= 3
    assert found.counts["verify after chaos"]["blocks"] == 256
    assert found.counts["ledger after chaos"]["missing"] == found.counts["ledger after chaos"]["wrong"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": "ipc:///nowhere", "chaos": True}, "--endpoint"),
        ({"clients": 0}, "--clients"),
        ({"tokens": 64}, "clients want more"),
        ({"host_bytes": MIB // 4}, "--host"),
        ({"geometry": "custom", "shape": None}, "--block-size"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(StressError, match=words):
        run(tmp_path, **changes)
