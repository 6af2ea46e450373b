"""Mooncake Store over TCP on this host, in an environment of its own, driven round by round."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtierd.bench.peer_environments import free_ports
from kvtierd.bench.rows import BenchError

READY_S = 60.0
ROUND_S = 60.0
_CLIENT = "kvtierd.bench.peer_mooncake_client"
"""Run as a file: its interpreter has no kvtierd."""


class Mooncake:
    """A client process; `seconds` carries out one round."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self._answer(READY_S)

    def seconds(self, work: str) -> float:
        """Seconds of `store`, `load` or `lookup`. Raises BenchError with the last line of its log."""
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return float(self._answer(ROUND_S)["seconds"])

    def _answer(self, timeout_s: float) -> dict[str, float]:
        assert self._process.stdout is not None
        while True:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                raise BenchError(f"Mooncake said nothing for {timeout_s} s; see {self._log}")
            line = self._process.stdout.readline()
            if not line:
                last = self._log.read_text(errors="replace").splitlines()[-1:]
                raise BenchError(f"Mooncake's client ended with {self._process.wait()}: {' '.join(last)}")
            if line.startswith("{"):  # it logs to standard output too
                answer: dict[str, float] = json.loads(line)
                return answer


@contextlib.contextmanager
def mooncake(python: Path, objects: int, object_bytes: int) -> Iterator[Mooncake]:
    """A master, its metadata server and one client, for the length of the block."""
    rpc, http, metrics = free_ports(3)
    master = [str(python.with_name("mooncake_master")), f"--rpc_port={rpc}", "--enable_http_metadata_server=true"]
    master += ["--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={http}"]
    master += [f"--metrics_port={metrics}"]
    script = Path(__file__).with_name(_CLIENT.rpartition(".")[2] + ".py")
    client = [str(python), str(script), *map(str, (rpc, http, objects, object_bytes))]
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as folder, contextlib.ExitStack() as stack:
        log = Path(folder) / "client.log"
        quiet = stack.enter_context((Path(folder) / "master.log").open("wb"))
        errors = stack.enter_context(log.open("wb"))
        environment = {**os.environ, "GLOG_logtostderr": "1"}
        server = stack.enter_context(subprocess.Popen(master, stdout=quiet, stderr=quiet, env=environment))
        stack.callback(server.kill)
        process = stack.enter_context(
            subprocess.Popen(client, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)
        )
        stack.callback(process.kill)
        yield Mooncake(process, log)
