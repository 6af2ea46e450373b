"""Commands against a daemon that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.daemon.embedded import EmbeddedDaemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedDaemon]:
    folder: Path = tmp_path_factory.mktemp("d")
    with EmbeddedDaemon(folder, host__capacity="8MiB", host__chunk_bytes="4MiB", nvme__directory="") as running:
        yield running


@pytest.fixture
def kvtierctl(daemon: EmbeddedDaemon) -> Callable[..., str]:
    def run(*words: str) -> str:
        command = [sys.executable, "-m", "kvtierd.cli.main", *words, "--endpoint", daemon.endpoint, "--timeout", "10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_ping_says_who_answers_and_how_fast(kvtierctl, daemon: EmbeddedDaemon) -> None:
    line = kvtierctl("ping", "--count", "3")
    assert line.startswith(f"{daemon.endpoint} answers; 3 round trips: median ")
    assert len(line.splitlines()) == 1


def test_stat_is_one_json_object_on_request(kvtierctl, daemon: EmbeddedDaemon) -> None:
    stats = json.loads(kvtierctl("stat", "--json"))
    assert stats["daemon_pid"] == daemon.pid
    assert stats["host_capacity_bytes"] == 8 << 20
    assert "nvme_mode" not in stats


def test_stat_explains_every_row(kvtierctl) -> None:
    rows = kvtierctl("stat", "--explain").splitlines()
    assert len(rows) > 30
    assert [row for row in rows if len(row.split("  ")) < 3] == []


def test_watch_goes_on_until_it_is_interrupted(daemon: EmbeddedDaemon) -> None:
    # Whoever runs the tests in the background may have SIGINT ignored, which children inherit.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "kvtierd.cli.main"]
    command += ["stat", "--json", "--watch", "0.01"]
    with subprocess.Popen([*command, "--endpoint", daemon.endpoint], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline())["server_requests_total"] for _ in range(3)]
        process.send_signal(2)
        process.stdout.read()
        assert process.wait(30) == 130
    assert seen == sorted(set(seen))


def test_watch_ends_quietly_when_its_reader_has_gone(daemon: EmbeddedDaemon) -> None:
    command = f"{sys.executable} -m kvtierd.cli.main stat --watch 0.01 --endpoint {daemon.endpoint} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
