"""Reads while write-behind runs, against reads alone; and writes then, against writes alone.

Two clients acquire blocks of 2 MiB that lie in nvme alone, in requests of 8 MiB, each blocks of its own, and drop the
host copies after each pass. A third client stores new blocks so that the queue of the write-behind is always full; more
would be dropped there, and their copies would only take the processors from everybody. Its rate is what the daemon says
it wrote to the disk. Latencies are of a client's requests, from the call to the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.copies import private_memory
from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import BLOCK_BYTES, LARGE, TIMEOUT_S, daemon_and_client, expect, random_keys
from kvtierd.core.keys import Keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client

READERS = 2
READ_BLOCKS = 4
"""Blocks of one request."""
PASS_BLOCKS = 128
"""Blocks of one reader, read in turn."""
STORE_BLOCKS = 16
QUEUE_BYTES = 256 * MIB
"""Most that waits to be written: the writer keeps it full."""
POLL_S = 0.01
"""How often it looks whether there is room; the disk empties a small part of the queue meanwhile."""


class Reader:
    """A client with blocks on disk that it acquires again and again."""

    def __init__(self, client: Client, number: int) -> None:
        self._client = client
        self._handle = client.register(Namespace(model=f"kvtierd-bench-reader-{number}", geometry=LARGE))
        self._keys = random_keys(PASS_BLOCKS, seed=1000 + number)
        self.latencies_s: list[float] = []
        self._source = private_memory(PASS_BLOCKS * BLOCK_BYTES, seed=number).reshape(PASS_BLOCKS, BLOCK_BYTES)

    def renew(self) -> None:
        """Store its blocks anew: what a round writes may fill the store once, and would recycle older ones."""
        self._client.purge(self._handle)
        expect("stored", self._client.store(self._handle, self._keys, self._source).stored, PASS_BLOCKS)
        self._client.flush()

    def run(self, until: Callable[[], bool]) -> None:
        """Read until told to stop."""
        while True:
            self._client.purge(self._handle, tiers=["gpu", "host"])
            for at in range(0, PASS_BLOCKS, READ_BLOCKS):
                if until():
                    return
                begin = time.perf_counter()
                self._bring(self._keys[at : at + READ_BLOCKS])
                self.latencies_s.append(time.perf_counter() - begin)

    def _bring(self, keys: Keys) -> None:
        """All of these blocks, however often the daemon has room for only a part of them."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(keys):
            with self._client.acquire(self._handle, keys) as lease:
                keys = keys[lease.count :]
            if len(keys) and time.monotonic() > deadline:
                raise BenchError(f"{len(keys)} blocks were not onboarded in {TIMEOUT_S} s")


class Writer:
    """A client that stores new blocks without end."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._handle = client.register(Namespace(model="kvtierd-bench-writer", geometry=LARGE))
        self._source = private_memory(STORE_BLOCKS * BLOCK_BYTES, seed=99).reshape(STORE_BLOCKS, BLOCK_BYTES)
        self._stored = 0

    def run(self, until: Callable[[], bool]) -> None:
        """Keep the queue of the write-behind full until told to stop."""
        while not until():
            if self._queued_bytes() > QUEUE_BYTES - STORE_BLOCKS * BLOCK_BYTES:
                time.sleep(POLL_S)
                continue
            keys = random_keys(STORE_BLOCKS, seed=10_000 + self._stored)
            self._stored += 1
            if self._client.store(self._handle, keys, self._source).stored < STORE_BLOCKS:
                time.sleep(POLL_S)

    def _queued_bytes(self) -> int:
        return int(self._client.stats()["write_queue_bytes"])

    def written_bytes(self) -> int:
        """Bytes of blocks that the daemon has put on disk so far."""
        return int(self._client.stats()["nvme_written_bytes"])

    def settle(self) -> None:
        """Wait until what was stored is on disk, and forget it."""
        self._client.flush()
        self._client.purge(self._handle)


@dataclasses.dataclass(slots=True)
class Period:
    """What a period came to: bytes a second, and the latencies of its read requests."""

    read_rate: float = 0.0
    write_rate: float = 0.0
    latencies_s: list[float] = dataclasses.field(default_factory=list)


def measure(readers: list[Reader], writer: Writer | None, stats: Writer, seconds: float) -> Period:
    """Run the given clients at once for a while."""
    stop, failures = threading.Event(), list[BaseException]()

    def guarded(work: Callable[[Callable[[], bool]], None]) -> None:
        try:
            work(stop.is_set)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the main thread
            failures.append(error)

    for reader in readers:
        reader.latencies_s.clear()
    works = [reader.run for reader in readers] + ([writer.run] if writer is not None else [])
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    written, begin = stats.written_bytes(), time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    elapsed = time.perf_counter() - begin
    written = stats.written_bytes() - written
    latencies = [latency for reader in readers for latency in list(reader.latencies_s)]
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise BenchError(f"a client failed: {failures[0]!r}") from failures[0]
    return Period(len(latencies) * READ_BLOCKS * BLOCK_BYTES / elapsed, written / elapsed, latencies)


def rows(options: Options) -> Iterator[Row]:
    """Reads alone, writes alone, both; in alternating rounds."""
    rounds, seconds = options.rounds(3, 2), 4.0 if not options.quick else 1.2
    need_memory(3072 * MIB)
    settings = {
        "gpu__capacity": 0,
        "host__capacity": 1536 * MIB,
        "nvme__capacity": 24 * 1024 * MIB,
        "nvme__write_queue_bytes": QUEUE_BYTES,
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as name,
        contextlib.ExitStack() as stack,
    ):
        daemon, client = stack.enter_context(daemon_and_client(Path(name), 1, **settings))
        clients = [
            stack.enter_context(Client(daemon.endpoint, timeout_s=TIMEOUT_S, transfer_timeout_s=TIMEOUT_S))
            for _ in range(READERS)
        ]
        readers = [Reader(one, number) for number, one in enumerate(clients)]
        writer = Writer(client)
        alone, writing, mixed = [], [], []
        for _ in range(1 + rounds):
            for reader in readers:
                reader.renew()
            alone.append(measure(readers, None, writer, seconds))
            writing.append(measure([], writer, writer, seconds))
            mixed.append(measure(readers, writer, writer, seconds))
            writer.settle()
    # The first round maps the host tier's pages into the clients, and is thrown away.
    yield from _rows(alone[1:], writing[1:], mixed[1:])


def _rows(alone: list[Period], writing: list[Period], mixed: list[Period]) -> Iterator[Row]:
    def rate(periods: list[Period], name: str) -> float:
        return float(np.median([getattr(period, name) for period in periods])) / MIB

    def late(periods: list[Period]) -> float:
        return float(np.percentile(np.concatenate([period.latencies_s for period in periods]), 99)) * 1000

    yield make_row(
        "nvme",
        "reads while writes run",
        rate(mixed, "read_rate"),
        "MiB/s",
        reference=rate(alone, "read_rate"),
        reference_name="reads alone",
        goal=">= 0.6",
    )
    yield make_row(
        "nvme",
        "99th percentile of 8 MiB reads then",
        late(mixed),
        "ms",
        reference=late(alone),
        reference_name="reads alone",
        goal="<= 4",
    )
    yield make_row(
        "nvme",
        "writes while reads run",
        rate(mixed, "write_rate"),
        "MiB/s",
        reference=rate(writing, "write_rate"),
        reference_name="writes alone",
        goal=">= 0.3",
    )
