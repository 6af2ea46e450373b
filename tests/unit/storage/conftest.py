"""File systems that a test can have for itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on a tmpfs."""
    base = Path("/dev/shm")
    if not base.is_dir():
        pytest.skip("there is no tmpfs at /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=base, prefix="kvtierd-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounter]:
    """Mounts file systems, and unmounts them in the end."""
    mounter = Mounter(tmp_path)
    yield mounter
    mounter.undo()


class Mounter:
    def __init__(self, base: Path) -> None:
        self._base = base
        self._points: list[Path] = []

    def __call__(self, kind: str, options: str) -> Path:
        return self._mount(["-t", kind, "-o", options, "kvtierd-test"])

    def image(self, path: Path) -> Path:
        """Mount a file through a loop device."""
        return self._mount(["-o", "loop", str(path)])

    def _mount(self, arguments: list[str]) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting takes root")
        point = self._base / f"mount-{len(self._points)}"
        point.mkdir()
        command = ["mount", *arguments, str(point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {arguments} here: {done.stderr.strip()}")
        self._points.append(point)
        return point

    def remount(self, point: Path, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(point)], check=True)

    def forget(self, point: Path) -> None:
        """A test has unmounted it."""
        self._points.remove(point)

    def undo(self) -> None:
        for point in reversed(self._points):
            subprocess.run(["umount", str(point)], check=True)
