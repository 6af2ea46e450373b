"""Full pools for long: clients that do everything at random, while memory, descriptors and threads must stand still.

Host, gpu and nvme are much smaller than what the clients ask for, so that every step makes room, writes behind, brings
up and recycles. Each byte and each result of attention is checked by the client that got it. When it is over nothing
may be held, and the accounts must say so.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtierd import Client
from kvtierd.bench.smaps import resident_bytes
from kvtierd.core.units import MIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.testing.waiting import wait_for
from tests.torture.cycles import count_of
from tests.torture.driver import environment
from tests.torture.logs import complaints
from tests.torture.parts import Part, Unit

CLIENTS = 3
SETTINGS: dict[str, Any] = {
    "host__capacity": "16MiB",
    "host__chunk_bytes": "4MiB",
    "gpu__capacity": "4MiB",
    "nvme__capacity": "48MiB",
    "nvme__segment_bytes": "4MiB",
    "attention__staging_bytes": "2MiB",
    "leases__reservation_ttl_ms": 2000,
}
EVERY_S = 2.0
GROWTH_BYTES = 16 * MIB
"""Beside the pools, from the second third of the time to the last: what an allocator's luck may make of it."""
QUIET = ("leases", "reservations", "quarantined_reservations", "sequences", "pinned_bytes", "write_queue_bytes",
         "sequence_host_kept_bytes", "sequence_gpu_kept_bytes", "attend_running",
         "attend_staging_used_bytes")  # fmt: skip
"""What must be nothing when nobody asks for anything."""
NEVER = ("host_corrupt_blocks", "gpu_corrupt_blocks", "onboard_corrupt_blocks", "nvme_corrupt_reads",
         "nvme_failed_writes", "nvme_failed_syncs", "offload_failed_blocks")  # fmt: skip
"""What a sound disk and sound memory give no reason for. Reads that find their segment recycled are no fault."""


def run(unit: Unit) -> Iterator[str]:
    """Soak for `unit.amount` seconds."""
    with EmbeddedDaemon(unit.folder / "d", **SETTINGS) as daemon, Client(daemon.endpoint, timeout_s=20) as client:
        wait_for(lambda: client.stats()["host_ready_bytes"] == client.stats()["host_capacity_bytes"])
        logs = [unit.folder / f"client-{number}" for number in range(CLIENTS)]
        processes = [_spawn(daemon.endpoint, unit, number, log) for number, log in enumerate(logs)]
        try:
            samples = list(_samples(daemon, processes, unit.amount))
            codes = [process.wait(60) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for log, code in zip(logs, codes, strict=True):
            yield from _told(log, code)
        yield from _grown(samples)
        yield from _accounts(client)
    yield from complaints(daemon.log_path)


def _spawn(endpoint: str, unit: Unit, number: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.torture.soak_process", endpoint]
    command += [str(unit.seed + number), str(unit.amount)]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment())


def _samples(
    daemon: EmbeddedDaemon, processes: list[subprocess.Popen[bytes]], seconds: float
) -> Iterator[dict[str, int]]:
    """What the daemon holds, while clients work."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and all(process.poll() is None for process in processes):
        total, pools = resident_bytes(daemon.pid)
        yield {
            "bytes beside the pools": total - pools,
            "descriptors": count_of(daemon.pid, "fd"),
            "threads": count_of(daemon.pid, "task"),
        }
        time.sleep(min(EVERY_S, seconds / 20))


def _told(log: Path, code: int) -> Iterator[str]:
    lines = log.read_text(errors="replace").splitlines()
    yield from (line for line in lines if line.startswith("wrong"))
    if code:
        yield f"a client ended with {code}: {lines[-1] if lines else ''}"
    tallies = [line.split() for line in lines if line.startswith("tally")]
    done = dict(zip(tallies[-1][1::2], map(int, tallies[-1][2::2]), strict=True)) if tallies else {}
    for name in ("stored", "fetched", "leased", "attended"):
        if not done.get(name):
            yield f"nothing was {name} by a client: {done}"
    if done.get("unavailable", 0) > 2:
        yield f"a client found no daemon {done['unavailable']} times"


def _grown(samples: list[dict[str, int]]) -> Iterator[str]:
    third = len(samples) // 3
    if not third:
        yield f"there are {len(samples)} samples: the soak was too short"
        return
    for name, most in {"bytes beside the pools": GROWTH_BYTES, "descriptors": 6, "threads": 4}.items():
        middle = statistics.median(sample[name] for sample in samples[third : 2 * third])
        last = statistics.median(sample[name] for sample in samples[2 * third :])
        if last - middle > most:
            yield f"{name} grew from {middle:,.0f} to {last:,.0f} while pools were full"


def _accounts(client: Client) -> Iterator[str]:
    """When clients have gone, nothing is held; what is in use fits into the pools."""
    end_s = time.monotonic() + 20
    while any(client.stats()[name] for name in QUIET) and time.monotonic() < end_s:
        time.sleep(0.1)
    stats = client.stats()
    yield from (f"when it was over {name} was {stats[name]}" for name in QUIET if stats[name])
    yield from (f"{name} is {stats[name]} on a sound disk" for name in NEVER if stats.get(name))
    for tier in ("gpu", "host", "nvme"):
        used, capacity = stats[f"{tier}_used_bytes"], stats[f"{tier}_capacity_bytes"]
        if used > capacity:
            yield f"{tier} has {used:,} bytes in use of {capacity:,}"
    for name in ("host_evicted_blocks", "nvme_reclaimed_segments", "onboarded_blocks"):
        if not stats[name]:
            yield f"{name} is 0: the pools were never full, and the soak proves nothing"


PART = Part("soak", "seconds of soak", 1800, 9, 1800, run)
