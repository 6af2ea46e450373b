"""Kill -9 of a daemon under the load of several client processes: what was flushed is back, what was deleted is not.

A unit is one store that lives through its kills. In odd rounds the daemon comes back at once under clients that go on,
and is killed again; in every second unit the host tier outlives it, as under systemd. After each kill the store is
checked offline. A killed process leaves the page cache behind: this proves nothing about power (see faults).
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtierd import Client
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.storage.checker import Verdict, check_store
from kvtierd.testing.waiting import wait_for
from tests.torture.driver import environment
from tests.torture.logs import complaints
from tests.torture.parts import Part, Unit
from tests.torture.promises import Promises
from tests.torture.storing_process import PROMPTS

CLIENTS = 2
LOAD_S = (0.1, 1.0)
SETTINGS: dict[str, Any] = {
    "host__capacity": "16MiB",
    "host__chunk_bytes": "4MiB",
    "gpu__capacity": "4MiB",
    "nvme__segment_bytes": "8MiB",
    "nvme__capacity": "4GiB",
}
"""Host holds less than what the clients come back to, so that everything moves; the store holds all they write."""


class Clients:
    """Processes under load, and what they have said."""

    def __init__(self, endpoint: str, folder: Path, seed: int) -> None:
        self._logs = [folder / f"client-{number}" for number in range(CLIENTS)]
        self._processes = []
        for number, log in enumerate(self._logs):
            command = [sys.executable, "-m", "tests.torture.storing_process", endpoint]
            command += [str(seed + number), str(number * PROMPTS)]
            with log.open("wb") as said, log.with_suffix(".errors").open("wb") as errors:
                self._processes.append(subprocess.Popen(command, stdout=said, stderr=errors, env=environment()))
        wait_for(lambda: all(log.stat().st_size for log in self._logs) or self.ended())

    def ended(self) -> bool:
        """Whether one has ended by itself, which none should."""
        return any(process.poll() is not None for process in self._processes)

    def kill(self) -> None:
        """End them as a crash would."""
        for process in self._processes:
            process.kill()
            process.wait()

    def facts(self, promises: Promises) -> Iterator[str]:
        """Take in what they said; a client that ended by itself is a finding."""
        for process, log in zip(self._processes, self._logs, strict=True):
            if process.returncode != -signal.SIGKILL:
                last = log.with_suffix(".errors").read_text().splitlines()[-1:]
                yield f"a client ended with {process.returncode}: {' '.join(last)}"
            for line in log.read_text().splitlines():
                promises.take(line)


def run(unit: Unit) -> Iterator[str]:
    """Kill a daemon `unit.amount` times."""
    rng, promises = random.Random(unit.seed), Promises()
    make = EmbeddedDaemon.warm if unit.number % 2 else EmbeddedDaemon
    daemon = make(unit.folder / "d", **SETTINGS)
    kills = 0
    try:
        while kills < unit.amount:
            twice = kills % 4 == 3 and kills + 1 < unit.amount
            yield from one_round(daemon, unit, promises, rng, twice=twice)
            kills += 1 + twice
        yield from checked(daemon, promises)
        daemon.stop()
        if not any(promises.must.values()):
            yield "nothing was ever flushed: the unit proves nothing"
    finally:
        daemon.close()
    yield from complaints(daemon.log_path)


def one_round(
    daemon: EmbeddedDaemon, unit: Unit, promises: Promises, rng: random.Random, *, twice: bool
) -> Iterator[str]:
    """Start, check, load, kill; `twice` brings it back under the same clients and kills it again."""
    yield from checked(daemon, promises)
    clients = Clients(daemon.endpoint, unit.folder, rng.getrandbits(40))
    try:
        time.sleep(rng.uniform(*LOAD_S))
        daemon.kill()
        if twice:
            daemon.start()
            time.sleep(rng.uniform(*LOAD_S) + 1)
            daemon.kill()
    finally:
        clients.kill()
    yield from clients.facts(promises)
    report = asyncio.run(check_store(daemon.data_dir, verify_data=True))
    if report.verdict is not Verdict.CLEAN:
        yield f"the store is {report.verdict.name} after a kill: {report.findings[:1]}"


def checked(daemon: EmbeddedDaemon, promises: Promises) -> Iterator[str]:
    """Start the daemon, and ask it for everything that was promised."""
    daemon.start()
    with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=60) as client:
        wait_for(lambda: client.stats()["host_ready_bytes"] == client.stats()["host_capacity_bytes"])
        yield from promises.check(client)


PART = Part("kills", "kills", 100, 2, 10, run)
