"""Client processes that die, fork, or hash differently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.testing.fake_daemon import ThreadDaemon
from tests.fault.protocol.conftest import ROOT, python, until


@pytest.mark.parametrize("what", ["lease", "reservation"])
def test_case_15_what_a_killed_client_held_is_free_again(folder: Path, what: str) -> None:
    with ThreadDaemon(folder) as daemon:
        command = ("-m", "tests.fault.protocol.client_process", daemon.endpoint, what)
        process = python(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "holding\n"
        service = daemon.service
        assert daemon.call(lambda: len(service.leases)) == 1
        assert daemon.call(lambda: len(service.reservations)) == (what == "reservation")
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: "gone 1" in service.log or (what == "lease" and "detached 1" in service.log))
        assert not daemon.call(lambda: service.leases or service.reservations)
        assert len(service.chunk.free) == 61
        assert not daemon.call(lambda: len(daemon.server.sessions))
        arena = daemon.server.arena
        assert arena is not None
        until(lambda: daemon.call(lambda: not arena._processes and not arena._connections))
        process.stdin.close()
        process.stdout.close()


def test_a_stopped_client_keeps_its_reservation(folder: Path) -> None:
    with ThreadDaemon(folder) as daemon:
        command = ("-m", "tests.fault.protocol.client_process", daemon.endpoint, "reservation")
        process = python(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "holding\n"
        os.kill(process.pid, signal.SIGSTOP)
        peer = daemon.call(lambda: next(iter(daemon.server.sessions)))
        daemon.call(lambda: daemon.server.sessions.end(peer))
        assert daemon.service.log[-1] == "detached 1"
        assert len(daemon.service.reservations) == 1
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.close()
        process.wait()
        until(lambda: daemon.service.log[-1] == "gone 1")
        assert not daemon.service.reservations
        process.stdout.close()


def test_a_forked_child_has_a_connection_of_its_own(start: Callable[[], object], endpoint: str) -> None:
    start()
    process = python("-m", "tests.fault.protocol.fork_process", endpoint, stdout=subprocess.PIPE)
    assert process.communicate()[0] == "fine\n"
    assert process.returncode == 0


def test_case_08_two_interpreters_with_different_hash_seeds_make_equal_keys() -> None:
    code = (
        "from kvtierd import Geometry, Namespace, block_keys;"
        "g = Geometry(block_size=4, layers=2, kv_heads=2, k_dim=8, v_dim=8);"
        "n = Namespace(model='m', revision='r', geometry=g);"
        "print(n.digest().hex(), block_keys(n.digest(), range(64), 4, extras={1: b'image'}).tobytes().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(outputs) == 1
