"""A real daemon, and clients in processes of their own that stop at every step."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtierd import Client
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.testing.waiting import wait_for

SCRIPT = Path(__file__).with_name("client_process.py")
ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("client_process", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ClientProcess:
    """A spawned client_process.py."""

    def __init__(self, endpoint, *arguments, **environment):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), endpoint, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )

    def line(self, timeout_s=60):
        """The next line it prints."""
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError("the client said nothing")
        text = self.process.stdout.readline()
        assert text, f"the client ended with {self.process.wait()}"
        return json.loads(text)

    def go_on(self):
        """Let it take its next step."""
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def until(self, step):
        """Let it go on until it says that it took a step."""
        while (line := self.line())["step"] != step:
            self.go_on()
        return line

    def send(self, number):
        self.process.send_signal(number)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def script():
    return load_script()


@pytest.fixture
def daemon(tmp_path):
    """Small tiers, so that everything moves: 32 blocks of 512 KiB in host."""
    overrides = {"host__capacity": "16MiB", "host__chunk_bytes": "4MiB", "gpu__capacity": "8MiB"}
    overrides |= {"nvme__segment_bytes": "16MiB", "leases__reservation_ttl_ms": 500, "nvme__capacity": "512MiB"}
    with EmbeddedDaemon(tmp_path, **overrides) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.endpoint, timeout_s=2) as connected:
        wait_for(lambda: connected.stats()["host_ready_bytes"] == 16 << 20)
        yield connected


@pytest.fixture
def spawn(daemon):
    """Start client processes; all are gone at the end."""
    started = []

    def begin(*arguments, **environment):
        started.append(ClientProcess(daemon.endpoint, *arguments, **environment))
        return started[-1]

    yield begin
    for each in started:
        each.end()
