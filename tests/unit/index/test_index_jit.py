from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtierd.index import jit

LOAD = """
import sys
from pathlib import Path
from kvtierd.index.jit import cache_state, configure_cache
print(configure_cache(Path(sys.argv[1])).note)
import kvtierd.index.lru
assert kvtierd.index.lru.LruLists(4, 1).length(0) == 0
print(sum(kernel.stats.cache_hits.__len__() for kernel in (kvtierd.index.lru._push, kvtierd.index.lru._touch)))
"""


def load(folder: Path, **environment: str) -> list[str]:
    command = [sys.executable, "-c", LOAD, str(folder)]
    env = {**os.environ, **environment}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=jit.PACKAGE.parent)
    return done.stdout.splitlines()


def compiled_files(folder: Path) -> set[Path]:
    return set(folder.rglob("*.nbc"))


def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    folder = tmp_path / "cache"
    note, hits = load(folder)
    assert note.startswith("kernels are cached in")
    assert hits == "0"
    assert folder.stat().st_mode & 0o777 == 0o700
    made = compiled_files(folder)
    assert made
    note, hits = load(folder)
    assert hits == "2"
    assert compiled_files(folder) == made


def test_torn_cache_files_are_compiled_again(tmp_path):
    load(tmp_path / "cache")
    for file in (tmp_path / "cache").rglob("*.nb[ic]"):
        file.write_bytes(b"")
    assert load(tmp_path / "cache")[1] == "0"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_open_to_others_is_not_used(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    state = jit._prepare(folder)
    assert state.directory is None
    assert f"{folder} has mode 0{mode:o}" in state.note
    assert "chmod 0700" in state.note
    assert not compiled_files(folder)


def test_a_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    state = jit._prepare(tmp_path)
    assert state.directory is None
    assert "not 12345" in state.note


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    state = jit._prepare(tmp_path / "file" / "cache")
    assert state.directory is None
    assert str(tmp_path / "file") in state.note


def test_the_folder_is_named_by_every_kernel_source(tmp_path, monkeypatch):
    (tmp_path / "index").mkdir()
    monkeypatch.setattr(jit, "PACKAGE", tmp_path)
    names = [jit._cache_name()]
    for path, text in [
        ("index/a.py", "x = 1"),
        ("index/a.py", "x = 2"),
        ("policy/b.py", ""),
        ("gpu/host_kernels/c.py", ""),
    ]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        names.append(jit._cache_name())
    assert len(set(names)) == len(names)


def test_once_kernels_are_loaded_the_folder_is_fixed(tmp_path):
    before = jit.cache_state()
    assert jit.configure_cache(tmp_path / "other") == before
    assert not (tmp_path / "other").exists()


def test_the_default_folder_is_the_services_or_the_users(monkeypatch):
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/kvtierd:/elsewhere")
    assert jit.default_cache_directory() == Path("/var/cache/kvtierd")
    monkeypatch.delenv("CACHE_DIRECTORY")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/u/.c")
    assert jit.default_cache_directory() == Path("/home/u/.c/kvtierd")
