"""The tests marked `torture`: each a unit, run by pytest in a process of its own, from the unit's seed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from tests.torture.driver import environment
from tests.torture.parts import Part, Unit

FOLDERS = (
    "tests/fault/storage/test_killed.py",
    "tests/fault/storage/test_power_loss.py",
    "tests/gpu",
    "tests/integration/test_soak.py",
)
"""Where the marked tests are, one unit each; a test holds this list to what pytest collects."""
NOTHING_COLLECTED = 5


def run(unit: Unit) -> Iterator[str]:
    """A line for each test that failed."""
    folder = FOLDERS[unit.number]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "torture", "-p", "no:cacheprovider", folder]
    ended = subprocess.run(
        command,
        env=environment() | {"KVTIERD_SEED": str(unit.seed % 1_000_000)},
        capture_output=True,
        text=True,
        check=False,
    )
    (unit.folder / "output").write_text(ended.stdout + ended.stderr)
    if ended.returncode in {0, NOTHING_COLLECTED}:
        return
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    yield from failed or [f"pytest ended with {ended.returncode} in {folder}"]


PART = Part("suites", "suites of tests", len(FOLDERS), 0, 1, run)
