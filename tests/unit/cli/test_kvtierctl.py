"""The command framework and the commands' own logic, without a daemon."""

from __future__ import annotations

import argparse
import errno
import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtierd.cli import main as cli
from kvtierd.cli.errors import CommandError, Failure
from kvtierd.cli.stat import changes, table


def test_every_command_has_its_file_and_keeps_the_contract() -> None:
    for name, command in cli.COMMANDS.items():
        module = importlib.import_module(command.module)
        assert command.module == f"kvtierd.cli.{name}"
        module.add_arguments(argparse.ArgumentParser())
        assert callable(module.run)


def test_help_lists_all_commands_without_loading_them() -> None:
    code = (
        "import sys; from kvtierd.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print([name for name in ('zmq', 'numba', 'yaml', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, command in cli.COMMANDS.items():
        assert name in done.stdout
        assert command.summary in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["pong"],
        ["ping", "--nope"],
        ["ping", "--timeout", "0"],
        ["ping", "-c", "-3"],
        ["info", "--timeout", "-1"],
        ["info", "--timeout", "nan"],
        ["stat", "--watch", "x"],
        ["stat", "--watch", "-1"],
        ["top", "-d", "nan"],
        ["drain", "--wait", "-1"],
        ["namespaces", "-n", "-5"],
        ["blocks", "--older-than", "7"],
        ["blocks", "--older-than", "-7d"],
        ["evict", "--namespace", "m"],
        ["evict", "--tier", "nvme"],
    ],
)
def test_wrong_use_exits_64_with_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 64
    assert capsys.readouterr().err.startswith("usage: kvtierctl")


@pytest.mark.parametrize("command", ["ping", "stat", "info", "top", "watch", "slowlog", "namespaces", "drain", "flush"])
def test_without_a_daemon_there_is_one_line_and_69(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"ipc://{tmp_path}/default/none"
    assert cli.main([command, "--endpoint", endpoint, "--timeout", "0.05"]) == 69
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert str(tmp_path) in err
    assert err.count("is kvtierd running") == 1


def test_flush_says_at_once_that_no_daemon_is_there(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    assert cli.main(["flush", "--endpoint", f"ipc://{tmp_path}/default/none"]) == 69
    assert time.monotonic() - begin_s < 60  # it has 600 s for what it waits for


def test_watch_of_what_does_not_exist_names_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", "--only", "lookup,lokup"]) == 64
    assert "nothing is called lokup; there are abort, acquire," in capsys.readouterr().err


def test_bench_of_a_file_that_is_not_there_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "trace", str(tmp_path / "none")]) == 64
    assert "none is no file" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_one_line_and_74(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(_args: argparse.Namespace) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvtierd.cli.ping.run", run)
    monkeypatch.setattr("kvtierd.cli.main.os.dup2", lambda *_: None)
    assert cli.main(["ping", "--endpoint", f"ipc://{tmp_path}/default/none"]) == 74
    assert capfd.readouterr().err == "kvtierctl ping: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "code"), [(CommandError(Failure.IO, "disk gone"), 74), (KeyboardInterrupt(), 130), (BrokenPipeError(), 0)]
)
def test_errors_of_a_command_become_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(_args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("kvtierd.cli.ping.run", run)
    monkeypatch.setattr("kvtierd.cli.main.os.dup2", lambda *_: None)
    assert cli.main(["ping"]) == code
    assert capfd.readouterr().err == ("kvtierctl ping: disk gone\n" if code == 74 else "")


def test_precompile_into_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "kvtierd.cli.main", "precompile", "--config", "/dev/null"]
    done = subprocess.run(
        [*command, "--set", f"cache_dir={tmp_path / 'file' / 'x'}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 74
    assert len(done.stderr.splitlines()) == 1


def test_table_aligns_names_and_shows_sizes() -> None:
    text = table({"host_used_bytes": 64 << 20, "leases": 3, "gpu_device": "host"}, explain=True)
    assert text.splitlines() == [
        "gpu_device       host                          device of the gpu tier: host, cuda:N, or none",
        "host_used_bytes  67108864 (64.0 MiB)           slots in use in the host tier",
        "leases           3                             read leases now",
    ]
    assert "leases           3" in table({"leases": 3, "host_used_bytes": 0}).splitlines()


def test_changes_show_what_moved_and_by_how_much() -> None:
    line = changes({"a": 1, "b": 5, "t": "x"}, {"a": 4, "b": 5, "c": 2, "t": "y"})
    assert line.split(maxsplit=1)[1] == "a 4 (+3), c 2"
    assert changes({"a": 1}, {"a": 1}).endswith("nothing changed")
