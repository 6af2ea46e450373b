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


def test_the_folder_is_named_by_constants_of_other_modules_that_kernels_freeze_in(tmp_path, monkeypatch):
    package = tmp_path / "kvtierd"
    (package / "index").mkdir(parents=True)
    (package / "tiers").mkdir()
    monkeypatch.setattr(jit, "PACKAGE", package)
    (package / "index" / "kernel.py").write_text("from kvtierd.tiers.blocks import VISIBLE\n")

    def named(blocks, flags):
        (package / "tiers" / "blocks.py").write_text(f"from kvtierd.tiers.flags import FIRST\n{blocks}\n")
        (package / "tiers" / "flags.py").write_text(f"{flags}\n")
        return jit._cache_name()

    first = named("VISIBLE = FIRST << 1", "FIRST = 1")
    assert named("VISIBLE = FIRST << 2", "FIRST = 1") != first
    assert named("VISIBLE = FIRST << 1", "FIRST = 2") != first, "what it is made of counts too"
    assert named("VISIBLE = FIRST << 1", "class Kind:\n    FIRST = 1\nFIRST = 1") != first
    assert named("VISIBLE = FIRST << 1\ndef other(): return 3", "FIRST = 1") == first, "nothing else does"


def test_constants_of_this_package_are_found():
    found = "\n".join(jit._constants())
    for name in ("VISIBLE", "TIER_HOST", "SLOT_GRANTED", "ORPHAN", "MAX_SCAN", "KEY_BYTES"):
        assert f"id='{name}'" in found, name
