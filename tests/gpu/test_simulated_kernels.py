"""Runs each file of tests/gpu/simulated in a process of its own with Numba's CUDA simulator.

A process of its own, because the simulator is chosen when numba.cuda is first imported. Together they take under a
minute; a file that grows beyond its share is split or made smaller.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "simulated"
ROOT = FOLDER.parents[2]
FILES = sorted(FOLDER.glob("sim_*.py"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_in_the_simulator_agree_with_the_oracle(file: Path) -> None:
    simulate(file, "not torture")


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_attention_in_the_simulator_agrees_with_the_oracle_in_long_runs_too() -> None:
    simulate(FOLDER / "sim_attention.py", "torture")


def simulate(file: Path, marker: str) -> None:
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    # NumPy warns of what CUDA does silently: overflow and NaN in arithmetic on scalars.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "--timeout", "400", "-m", marker]
    command = [sys.executable, "-m", "pytest", str(file), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_there_are_files_to_run() -> None:
    assert FILES
