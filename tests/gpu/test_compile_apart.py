"""Kernels compiled in a process of their own: kept for the daemon, and every way in which that fails is named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtierd.gpu.kernels import binaries, compile_apart
from kvtierd.gpu.kernels.attention import MERGE
from kvtierd.gpu.kernels.compile_apart import Apart
from kvtierd.gpu.kernels.registry import ARCHITECTURES, architecture_name, architecture_of
from kvtierd.index import jit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test."""
    tmp_path.chmod(0o700)
    found = tmp_path / jit._cache_name()
    found.mkdir(mode=0o700)
    monkeypatch.setattr(jit, "_state", jit.CacheState(found, ""))
    return found


def test_kernels_compiled_apart_are_loaded_and_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not binaries.is_kept(MERGE, (9, 0))
    assert Apart().fill([MERGE], (9, 0)) == ""
    assert [file.suffix for file in folder.iterdir()] == [".cubin"], "nothing half written is left"
    monkeypatch.setattr(binaries, "compile_kernel", None)
    assert binaries.binary_of(MERGE, (9, 0)).cubin[:4] == b"\x7fELF"
    monkeypatch.setattr(subprocess, "Popen", None)
    assert Apart().fill([MERGE], (9, 0)) == "", "what is there begins no process"


@pytest.mark.usefixtures("folder")
def test_a_failure_of_the_process_is_told_with_what_it_said() -> None:
    problem = Apart()._run([str(os.getpid()), "/proc/none", "sm_90", MERGE.name])
    assert "could not be kept: kernels are not cached" in problem
    problem = Apart()._run([str(os.getpid()), "/proc/none", "sm_90", "no_such_kernel"])
    assert problem.endswith("no_such_kernel is in no table of kernels")
    problem = Apart()._run([str(os.getppid()), "/proc/none", "sm_90", MERGE.name])
    assert "that wanted these kernels has ended" in problem


def test_without_a_cache_folder_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    state = jit.CacheState(None, "kernels are not cached: it is not ours")
    monkeypatch.setattr(binaries, "cache_state", lambda: state)
    monkeypatch.setattr(compile_apart, "cache_state", lambda: state)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert Apart().fill([MERGE], (9, 0)) == "kernels are not cached: it is not ours"


@pytest.mark.usefixtures("folder")
def test_a_process_that_is_killed_is_told_and_after_a_stop_none_is_begun() -> None:
    apart, found = Apart(), []
    thread = threading.Thread(target=lambda: found.append(apart.fill([MERGE], (9, 0))))
    thread.start()
    while apart._process is None:
        time.sleep(0.001)
    apart.stop()
    thread.join(60)
    assert found == ["the compiler's process was ended by signal 9"]
    assert apart.fill([MERGE], (9, 0)) == "it was stopped"
    assert apart._process is None


def test_the_process_ends_with_whoever_began_it(tmp_path: Path) -> None:
    begin = (
        "import subprocess, sys, threading, time\n"
        "from kvtierd.gpu.kernels.compile_apart import Apart\n"
        "apart = Apart()\n"
        f"arguments = ['0', {str(tmp_path)!r}, 'sm_90', 'attention_merge']\n"
        "import os\n"
        "arguments[0] = str(os.getpid())\n"
        "threading.Thread(target=apart._run, args=(arguments,), daemon=True).start()\n"
        "while apart._process is None: time.sleep(0.001)\n"
        "print(apart._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", begin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 100
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(child)
    assert not list(tmp_path.rglob("*.cubin"))


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def test_names_of_architectures_are_read_as_they_are_written() -> None:
    for architecture in ARCHITECTURES:
        assert architecture_of(architecture_name(architecture)) == architecture
    for name in ("sm_9", "sm90", "sm_90ab", ""):
        with pytest.raises(ValueError, match="looks like sm_90"):
            architecture_of(name)
