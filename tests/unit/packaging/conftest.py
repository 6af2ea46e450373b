"""One build of sdist and wheel, from a copy of the sources without anything that git ignores."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Built:
    """The two distributions, and a wheel that was built from the sdist."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    _copy_sources(source)
    sdist, wheel = _build(source, folder / "a", "--sdist"), _build(source, folder / "a", "--wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(sdist, wheel, _build(unpacked, folder / "b", "--wheel"))


def _copy_sources(target: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in sorted(filter(None, set(names))):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def _build(source: Path, target: Path, kind: str) -> Path:
    # Without isolation: the test must not depend on a network, and setuptools is part of the dev extra.
    command = [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = target.glob("*.whl" if kind == "--wheel" else "*.tar.gz")
    return made
