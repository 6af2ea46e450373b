"""`kvtierctl bench overhead`: what it costs to look: metrics, slow log and a watcher on, against all of it off.

What is compared: two daemons of the same settings but for `metrics`, and one client process that looks up 32 stored
keys at a time, pipelined, in turns at the one and at the other. The one that is looked at notes every request, has a
`kvtierctl watch` at its operators' socket, and is scraped once a second, which is fifteen times as often as usual.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from kvtierd.bench.options import Options
from kvtierd.bench.protocol import LookupLoad
from kvtierd.bench.rounds import alternate
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import daemon_and_client
from kvtierd.core.units import MIB
from kvtierd.daemon.embedded import EmbeddedDaemon

SCRAPE_EVERY_S = 1.0
BATCHES = 8
"""Batches of lookups in one measurement: about a second, so that a scrape and some watching fall into each."""
LISTEN = "127.0.0.1:19464"


def rows(options: Options) -> Iterator[Row]:
    """Measure both rates."""
    rounds = options.rounds(15, 5)
    common = {"nvme__directory": "", "host__capacity": 64 * MIB, "gpu__capacity": 0}
    on, off = {"metrics__listen": LISTEN}, {"metrics__requests": False}
    with (
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as folder,
        daemon_and_client(Path(folder) / "on", 1, **common, **on) as (looked_at, client),
        daemon_and_client(Path(folder) / "off", 1, **common, **off) as (_, other),
        _watching(looked_at),
        _scraping(),
    ):
        ours, theirs = LookupLoad(client), LookupLoad(other)
        rate, reference = alternate([lambda: _rate(ours), lambda: _rate(theirs)], rounds)
        _check(looked_at)
    yield make_row(
        "overhead",
        "lookups of 32 keys, pipelined, while metrics, slow log and a watcher look on",
        rate,
        "lookups/s",
        reference=reference,
        reference_name="the same with metrics off",
        goal=">= 0.95",
    )


def _rate(load: LookupLoad) -> float:
    return sum(load.rate() for _ in range(BATCHES)) / BATCHES


@contextlib.contextmanager
def _watching(daemon: EmbeddedDaemon) -> Iterator[None]:
    command = [sys.executable, "-m", "kvtierd.cli.main", "watch", "-q", "--endpoint", daemon.endpoint]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield
        finally:
            if process.poll() is not None:
                raise BenchError(f"the watcher ended with {process.returncode} before the bench did")
            process.terminate()


@contextlib.contextmanager
def _scraping() -> Iterator[None]:
    done = threading.Event()

    def scrape() -> None:
        while not done.wait(SCRAPE_EVERY_S):
            _metrics()

    thread = threading.Thread(target=scrape, name="scraper")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _metrics() -> str:
    with urllib.request.urlopen(f"http://{LISTEN}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _check(daemon: EmbeddedDaemon) -> None:
    """What was measured must have been noted, or the figure means nothing."""
    counted = [line for line in _metrics().splitlines() if line.startswith("kvtierd_request_seconds_count{")]
    if not any('operation="lookup"' in line and float(line.split()[-1]) > 1000 for line in counted):
        raise BenchError(f"the daemon of pid {daemon.pid} did not note the lookups")
