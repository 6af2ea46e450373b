"""The files that the rules are about: what git tracks or would track, links left out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("kvtierd", "gpu", "storage", "protocol", "tests")


def listed(*patterns: str) -> list[Path]:
    """Files by git pathspec, relative to the root; links are not followed, so no file is listed twice."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    paths = (Path(name) for name in sorted(set(found)) if name)
    return [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def python_files() -> list[Path]:
    return listed("*.py")


@pytest.fixture(scope="session")
def library_files(python_files: list[Path]) -> list[Path]:
    return [path for path in python_files if path.parts[0] in OURS and path.parts[0] != "tests"]


@pytest.fixture(scope="session")
def text_files() -> list[Path]:
    """Everything that people read or run."""
    return [path for path in listed() if path.suffix not in {".png", ".bin", ".json"} and path.name != "LICENSE"]
