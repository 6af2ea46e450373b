"""LMCache on this host, in an environment of its own: its server in CPU mode, and its adapters for files.

It is measured by its own command, `lmcache bench`, whose figures come as JSON; bytes are verified there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtierd.bench.peer_environments import free_ports
from kvtierd.bench.rows import BenchError
from kvtierd.core.units import MIB

READY_S = 120.0
RUN_S = 180.0
REQUEST_TOKENS, CHUNK_TOKENS, LAYERS = 4096, 256, 8
SHAPE = f"(2,512,16,8,128):bfloat16:{LAYERS}"
"""Of a request of 128 MiB: K and V, 512 pages of 16 tokens, 8 heads of 128, 8 layers."""
REQUESTS = 6
PAUSE_S = 0.3
"""Between requests: without it what it has just stored is mostly not found yet."""


class LmcacheServer:
    """A server, asked by `lmcache bench server` for requests that nobody asked before."""

    def __init__(self, program: str, zmq_port: int, http_port: int, folder: Path) -> None:
        self._folder = folder
        self._command = [program, "bench", "server", "--rpc-url", f"tcp://localhost:{zmq_port}", "--mode", "cpu"]
        self._command += ["--transfer-mode", "lmcache_driven", "--num-tokens", str(REQUEST_TOKENS)]
        self._command += ["--kvcache-shape-spec", SHAPE, "--interval", str(PAUSE_S)]
        self._command += ["--url", f"http://127.0.0.1:{http_port}"]
        self._next = 0
        self.retrieved = self.asked = 0

    def round(self) -> dict[str, float]:
        """Median seconds of `lookup` (the faster of a miss and a hit), `store` and `retrieve` of 128 MiB."""
        begin, self._next = self._next, self._next + REQUESTS
        results = _run([*self._command, "--start", str(begin), "--end", str(self._next)], self._folder)
        if results["results"]["checksum_fail"]:
            raise BenchError(f"LMCache returned other bytes: {results['results']}")
        self.asked += REQUESTS
        self.retrieved += int(results["results"]["checksum_ok"])
        lookups = [results[f"{kind}_lookup"][f"{kind}_lookup_p50"] for kind in ("cold", "warm")]
        return {
            "lookup": min(lookups) / 1e3,
            "store": results["cold_store"]["cold_store_p50"] / 1e3,
            "retrieve": results.get("warm_retrieve", {}).get("warm_retrieve_p50", math.nan) / 1e3,
        }


@contextlib.contextmanager
def lmcache_server(python: Path, folder: Path, memory_gib: int) -> Iterator[LmcacheServer]:
    """A server with `memory_gib` of memory and files below `folder`, for the length of the block."""
    zmq_port, http_port = free_ports(2)
    program = str(python.with_name("lmcache"))
    adapter = json.dumps({"type": "fs", "base_path": str(folder / "l2")})
    command = [program, "server", "--transport", "zmq", "--host", "127.0.0.1", "--port", str(zmq_port)]
    command += ["--l1-size-gb", str(memory_gib), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    command += ["--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "LRU", "--l2-adapter", adapter]
    log = folder / "server.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=_quiet()) as process:
        try:
            _await(f"http://127.0.0.1:{http_port}/", process, log)
            yield LmcacheServer(program, zmq_port, http_port, folder)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def load_rate(python: Path, folder: Path, kind: str, objects: int, object_bytes: int) -> float:
    """Bytes a second that an adapter of files (`fs`, `fs_native`) loads: the median round, from the page cache."""
    adapter = json.dumps({"type": kind, "base_path": str(folder / kind)})
    command = [str(python.with_name("lmcache")), "bench", "l2", "--l2-adapter", adapter, "--rounds", "4"]
    command += ["--num-keys", str(objects), "--data-size-kb", str(object_bytes // 1024), "--in-flight", "2"]
    command += ["--l1-align-bytes", "4096", "--no-skip-verify"]
    results = _run(command, folder)
    load = next(each for name, each in results.items() if name.startswith("op_") and each["operation"] == "Load")
    if load["total_success"] != load["total_keys"]:
        raise BenchError(f"LMCache's {kind} adapter loaded {load['total_success']} of {load['total_keys']} objects")
    return float(results["config"]["data_per_round_mb"]) * MIB / (float(load["duration_p50_ms"]) / 1e3)


def median(rounds: list[dict[str, float]], what: str) -> float:
    """Of the rounds that have it; NaN where none does."""
    figures = [each[what] for each in rounds if not math.isnan(each[what])]
    return statistics.median(figures) if figures else math.nan


def _run(command: list[str], folder: Path) -> dict[str, Any]:
    output = folder / "result.json"
    output.unlink(missing_ok=True)
    ended = subprocess.run(
        [*command, "--format", "json", "--output", str(output)],
        env=_quiet(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if not output.exists():
        last = (ended.stdout + ended.stderr).splitlines()[-1:]
        raise BenchError(f"{' '.join(command[1:3])} ended with {ended.returncode}: {' '.join(last)}")
    metrics: dict[str, Any] = json.loads(output.read_text())["metrics"]
    return metrics


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            last = log.read_text(errors="replace").splitlines()[-1:]
            raise BenchError(f"LMCache's server ended with {process.returncode}: {' '.join(last)}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:
            return  # it answers, if only that there is no such page
        except OSError:
            time.sleep(0.2)
    raise BenchError(f"LMCache's server was not ready within {READY_S:.0f} s")


def _quiet() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "LMCACHE_DISABLE_BANNER": "1"}
