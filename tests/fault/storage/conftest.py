"""A folder where syncing costs nothing: what survives a loss of power is asked of a model, not of this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    base = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="kvtierd-test-", dir=base if base.is_dir() else None))
    yield path
    shutil.rmtree(path)
