"""Real daemon processes, spawned as users of EmbeddedDaemon spawn them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from kvtierd import Client, Geometry, Namespace, block_keys
from kvtierd.cli.stat import meanings
from kvtierd.daemon.embedded import EmbeddedDaemon, EmbeddedDaemonError
from kvtierd.protocol.endpoint import EVENTS_NAME, SOCKET_NAME

SMALL = {"host__capacity": "8MiB", "host__chunk_bytes": "4MiB", "gpu__capacity": "4MiB", "nvme__segment_bytes": "4MiB"}


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., EmbeddedDaemon]]:
    made: list[EmbeddedDaemon] = []

    def make(folder: str | Path = "d", **overrides: object) -> EmbeddedDaemon:
        made.append(EmbeddedDaemon(tmp_path / folder, **{**SMALL, **overrides}))
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_it_serves_stops_with_0_and_starts_again_on_the_same_endpoint(spawn) -> None:
    daemon = spawn().start()
    endpoint, pid = daemon.endpoint, daemon.pid
    with Client(endpoint, timeout_s=5) as client:
        assert client.ping() > 0
        assert client.stats()["host_capacity_bytes"] == 8 << 20
    assert daemon.stop() == 0
    assert not _alive(pid)
    assert not list(daemon.runtime_dir.rglob("*.sock"))
    daemon.start()
    assert daemon.endpoint == endpoint
    assert daemon.pid != pid
    assert daemon.restart().endpoint == endpoint
    assert daemon.logs().count("READY on") == 3
    assert "ERROR" not in daemon.logs()


def test_events_are_published_once_somebody_subscribes(spawn) -> None:
    daemon = spawn().start()
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
        Client(daemon.endpoint, timeout_s=5) as client,
    ):
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(daemon.endpoint.replace(SOCKET_NAME, EVENTS_NAME))
        namespace = client.register(
            Namespace(model="m", geometry=Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64))
        )
        begin = 0
        while not subscriber.poll(50):  # a subscription takes a moment to arrive
            keys = block_keys(namespace.namespace.digest(), list(range(begin, begin + 16)), 16)
            client.store(
                namespace, keys, np.ones((1, namespace.namespace.geometry.block_bytes), np.uint8), timeout_s=10
            )
            begin += 16
        assert b"BlockStored" in subscriber.recv_multipart()[2]
        assert client.stats()["server_event_batches_total"] > 0


def test_every_statistic_has_a_row_with_its_meaning(spawn) -> None:
    daemon = spawn().start()
    with Client(daemon.endpoint, timeout_s=5) as client:
        namespace = client.register(
            Namespace(model="m", geometry=Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64))
        )
        keys = block_keys(namespace.namespace.digest(), list(range(64)), 16)
        client.store(namespace, keys, np.ones((4, namespace.namespace.geometry.block_bytes), np.uint8), timeout_s=10)
        client.flush(timeout_s=10)
        assert client.lookup(namespace, keys).count == 4
        stats = client.stats()
    assert stats["committed_blocks"] == 4
    assert stats["daemon_pid"] == daemon.pid
    assert stats["server_event_batches_total"] == 0
    assert stats["server_requests_total"] > 4
    assert set(stats) - set(meanings()) == set()


def test_case_06_second_daemon_on_a_runtime_folder_is_refused_and_the_first_serves_on(spawn) -> None:
    first = spawn("a").start()
    second = spawn("b", server__runtime_dir=first.runtime_dir)
    with pytest.raises(EmbeddedDaemonError, match=f"exit code 75(.|\n)*pid {first.pid},"):
        second.start()
    assert second.exit_code == 75
    with Client(first.endpoint, timeout_s=5) as client:
        assert client.ping() > 0


def test_case_06_second_daemon_on_a_data_folder_is_refused(spawn) -> None:
    first = spawn("a").start()
    second = spawn("b", nvme__directory=first.data_dir)
    with pytest.raises(EmbeddedDaemonError, match="exit code 75"):
        second.start()


def test_killed_daemon_leaves_nothing_that_stops_the_next(spawn) -> None:
    daemon = spawn().start()
    daemon.kill()
    assert list(daemon.runtime_dir.rglob("*.sock"))
    assert daemon.exit_code == -signal.SIGKILL
    daemon.restart()
    with Client(daemon.endpoint, timeout_s=5) as client:
        assert client.ping() > 0


@pytest.mark.timeout(900)  # all kernels: 100 s on two quiet processors
def test_start_compiles_nothing_after_precompile(spawn, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    command = [sys.executable, "-m", "kvtierd.cli.main", "precompile", "--config", os.devnull]
    done = subprocess.run([*command, f"--set=cache_dir={folder}"], capture_output=True, text=True, check=True)
    assert f"kernels are cached in {folder}" in done.stdout
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")}
    assert made
    daemon = spawn(cache_dir=folder).start()
    assert f"kernels are cached in {folder}" in daemon.logs()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")} == made


def test_wrong_setting_ends_with_78_and_says_which(spawn) -> None:
    with pytest.raises(EmbeddedDaemonError, match=r"exit code 78(.|\n)*host\.watermark: 7 is out of range"):
        spawn(host__watermark=7).start()


@pytest.mark.parametrize("place", ["file/data", "/proc/data"])
def test_data_folder_that_cannot_be_made_ends_with_74_and_one_line(spawn, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    daemon = spawn(nvme__directory=tmp_path / place)
    with pytest.raises(EmbeddedDaemonError):
        daemon.start()
    assert daemon.exit_code == 74
    errors = [line for line in daemon.logs().splitlines() if "ERROR" in line]
    assert len(errors) == 1
    assert "Traceback" not in daemon.logs()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize(("options", "word"), [("size=64k", "the disk is full"), ("size=64m,ro", "")])
def test_full_or_read_only_file_system_ends_with_74_and_one_line(
    spawn, tmp_path: Path, options: str, word: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this sandbox does not mount: {mounted.stderr!r}")
    try:
        daemon = spawn(nvme__directory=disk / "data" if ",ro" in options else disk)
        with pytest.raises(EmbeddedDaemonError):
            daemon.start()
        assert daemon.exit_code == 74
        errors = [line for line in daemon.logs().splitlines() if "ERROR" in line]
        assert len(errors) == 1
        assert word in errors[0]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_daemon_ends_when_its_owner_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time; from kvtierd.daemon.embedded import EmbeddedDaemon\n"
        f"daemon = EmbeddedDaemon(sys.argv[1], **{SMALL!r}).start()\n"
        "print(daemon.pid, flush=True); time.sleep(100)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert _alive(pid)
        owner.kill()
        owner.wait()
    for _ in range(600):
        if not _alive(pid):
            break
        time.sleep(0.05)
    assert not _alive(pid)
    assert "stopped" in (tmp_path / "log").read_text()


def test_long_folder_gets_a_short_runtime_folder_that_is_removed(spawn) -> None:
    daemon = spawn("x" * 120).start()
    runtime = daemon.runtime_dir
    assert not runtime.is_relative_to(daemon.directory)
    with Client(daemon.endpoint, timeout_s=5) as client:
        assert client.ping() > 0
    daemon.close()
    assert not runtime.exists()


def test_temporary_folder_is_removed_with_its_daemon() -> None:
    with EmbeddedDaemon(**SMALL) as daemon:
        folder = daemon.directory
        assert folder.exists()
    assert not folder.exists()


def test_sockets_are_for_the_group_only(spawn) -> None:
    daemon = spawn().start()
    folders = {entry.name: entry for entry in daemon.runtime_dir.iterdir() if entry.is_dir()}
    assert set(folders) == {"admin", "default"}  # the operators' socket, and the tenant's
    assert folders["admin"].stat().st_mode & 0o777 == 0o700
    folder = folders["default"]
    assert folder.stat().st_mode & 0o777 == 0o750
    sockets = [entry for entry in folder.iterdir() if entry.is_socket()]
    assert sockets
    assert all(entry.stat().st_mode & 0o007 == 0 for entry in sockets)


def test_each_state_is_told_to_the_service_manager(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind(str(tmp_path / "n"))
        settings = SMALL | {"nvme__directory": tmp_path / "d", "server__runtime_dir": tmp_path / "r"}
        settings |= {"metrics__listen": ""}
        options = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtierd.daemon.main", "--config", os.devnull, *options],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "400000"},
            stderr=subprocess.DEVNULL,
        )

        def heard_until(wanted: str) -> list[str]:
            """What it says up to a line with this beginning."""
            lines: list[str] = []
            while not any(line.startswith(wanted) for line in lines):
                lines += manager.recv(4096).decode().splitlines()
            return lines

        try:
            starting = heard_until("READY=1")
            assert starting[0] == "STATUS=starting"
            assert "STATUS=recovering the nvme tier" in starting
            assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in starting)
            assert f"MAINPID={process.pid}" in starting
            assert heard_until("WATCHDOG=1")
            process.send_signal(signal.SIGHUP)
            reloading = heard_until("READY=1")
            begin = reloading.index("RELOADING=1")
            assert re.fullmatch(r"MONOTONIC_USEC=\d+", reloading[begin + 1])
            process.send_signal(signal.SIGINT)
            assert heard_until("STOPPING=1")
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
