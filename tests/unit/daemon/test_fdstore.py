"""Descriptors for the next life: what is announced in the environment, and who keeps them where there is no systemd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtierd.daemon import fdstore
from kvtierd.daemon.fdstore import NotifyKeeper, passed_files
from kvtierd.daemon.holder import DescriptorHolder

SHOW = """
import os
from kvtierd.daemon.fdstore import passed_files
for name, fd in passed_files(os.environ):
    print(name, os.pread(fd, 20, 0).decode(), os.get_inheritable(fd))
print(sorted(name for name in os.environ if name.startswith("LISTEN")))
print(sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in range(3, 200)))
"""


def memory(text: str) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = DescriptorHolder(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(made.path))
    yield made
    made.close()


def test_what_is_kept_is_passed_to_the_next_life_and_what_is_forgotten_is_not(holder: DescriptorHolder) -> None:
    files = {name: memory(name) for name in ("t", "c1", "c2", "g1")}
    for name, fd in files.items():
        NotifyKeeper().keep(name, fd)
        os.close(fd)
    NotifyKeeper().forget("c2")
    holder.settle()
    assert [name for name, _ in holder.held] == ["t", "c1", "g1"]
    command, inherited = holder.command([sys.executable, "-c", SHOW])
    done = subprocess.run(command, pass_fds=inherited, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["t t False", "c1 c1 False", "g1 g1 False", "[]", "3"]


def test_full_stop_drops_everything(holder: DescriptorHolder) -> None:
    fd = memory("x")
    NotifyKeeper().keep("c1", fd)
    os.close(fd)
    holder.drop()
    assert holder.held == []
    command, inherited = holder.command([sys.executable, "-c", SHOW])
    done = subprocess.run(command, pass_fds=inherited, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "0"]


@pytest.mark.parametrize(
    "environment",
    [{}, {"LISTEN_PID": "1", "LISTEN_FDS": "2"}, {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x"}],
)
def test_files_of_another_process_or_no_number_are_none(environment: dict[str, str]) -> None:
    assert passed_files(environment) == []
    assert environment == {}


def test_announced_file_that_is_not_there_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fd = memory("x")
    monkeypatch.setattr(fdstore, "FIRST_FD", fd)
    with os.fdopen(fd, "rb"):
        found = passed_files({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2000", "LISTEN_FDNAMES": "a"})
    assert found[0] == ("a", fd)
    assert all(name == "unknown" for name, _ in found[1:])
    assert len(found) < 2000
    assert "was announced and is not there" in caplog.text


def test_keeper_without_a_manager_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    NotifyKeeper().keep("c1", 0)
    assert "did not take 'c1'" in caplog.text
