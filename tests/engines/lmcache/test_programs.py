"""LMCache's own programs on the adapter: its L2 bench, which compares the bytes, and its server."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request

from kvtierd import Client
from kvtierd.testing.waiting import wait_for

PLUGIN = {"type": "plugin", "module_path": "kvtierd.connectors.lmcache", "class_name": "KvtierdL2Adapter"}


def test_bench_l2_verifies_every_byte(daemon, command):
    spec = {**PLUGIN, "adapter_params": {"endpoint": daemon.endpoint, "lookup_timeout_ms": 20000}}
    size = ["--num-keys", "16", "--data-size-kb", "2048", "--rounds", "2", "--in-flight", "2"]
    more = ["--no-skip-verify", "--lookup-max-hit-rate", "0.5"]
    run = subprocess.run(
        [command["program"], "bench", "l2", "--l2-adapter", json.dumps(spec), *size, *more],
        env=command["env"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "All 32 keys data verified OK" in run.stdout
    assert run.stdout.count("success_keys=32/32") == 3
    assert run.stdout.count("loaded=32/32") == 3
    assert run.stdout.count("found=16/32") == 3


class Server:
    """`lmcache server` with a first level in memory and the adapter as the second, until the `with` block ends."""

    def __init__(self, command, endpoint, log):
        spec = {**PLUGIN, "adapter_params": {"endpoint": endpoint, "lookup_timeout_ms": 20000}}
        self._command, self._log = command, log
        self.port, self.http = free_port(), free_port()
        options = {
            "transport": "zmq",
            "host": "127.0.0.1",
            "port": self.port,
            "l1-size-gb": 0.5,
            "http-host": "127.0.0.1",
            "http-port": self.http,
            "chunk-size": 256,
            "eviction-policy": "LRU",
            "l2-adapter": json.dumps(spec),
        }
        self._arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]

    def __enter__(self):
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [self._command["program"], "server", *self._arguments], env=self._command["env"], stdout=log, stderr=log
            )
        wait_for(self._answers, 90)
        return self

    def __exit__(self, *error):
        self._process.terminate()
        self._process.wait(30)

    def _answers(self):
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/healthcheck", timeout=5):
                return True
        except OSError:
            return False

    def bench(self):
        """Each request is looked up, stored where it is not found, and retrieved, with a checksum of what came."""
        options = {
            "rpc-url": f"tcp://localhost:{self.port}",
            "mode": "cpu",
            "transfer-mode": "lmcache_driven",
            "num-tokens": 1024,
            "kvcache-shape-spec": "(2,512,16,8,128):bfloat16:8",
            "start": 0,
            "end": 2,
            "interval": 0,
            "url": f"http://127.0.0.1:{self.http}",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        run = subprocess.run(
            [self._command["program"], "bench", "server", *arguments],
            env=self._command["env"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sums(output, which):
    return re.findall(rf"\[(seq \d)/{which}\] CHECKSUM: (\w+)", output)


def test_after_a_restart_of_the_server_all_chunks_come_from_the_second_level(daemon, command, tmp_path):
    log = tmp_path / "server.log"
    with Client(daemon.endpoint, timeout_s=20) as probe:
        before = probe.stats()["committed_blocks"]
        with Server(command, daemon.endpoint, log) as server:
            first = server.bench()
            wait_for(lambda: probe.stats()["committed_blocks"] >= before + 8)
    assert first.count("cold] LOOKUP: 0/4") == 2
    with Server(command, daemon.endpoint, log) as server:
        again = server.bench()
    assert again.count("cold] LOOKUP: 4/4") == 2
    assert len(sums(first, "cold")) == 2, first
    assert sums(again, "warm") == sums(first, "cold")
    assert "(0 L1, 4 L2)" in log.read_text()
    assert "second level at" in log.read_text()
