"""`kvtierctl bench restart`: what a restart and a crash cost a daemon whose memory is kept for its next life.

The host tier is full and the last blocks are dirty when the daemon is told to restart, and again when it is killed. A
client looks up a stored prefix all the while. The clock of a start runs from the end of the old process to the new
one's readiness line, interpreter start included; before that a daemon that stops serves reads while it flushes. Files
are kept by the bench, as by systemd: `make test-system` does the same with a real one. Afterwards every block is read
from host and compared.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import BLOCK_BYTES, LARGE, TIMEOUT_S, await_memory, expect, namespace, random_keys
from kvtierd.core.checksum import Bytes
from kvtierd.core.keys import Keys
from kvtierd.core.units import GIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.client import Client
from kvtierd.protocol.results import NamespaceHandle

BATCH = 32
DIRTY = 64
"""Blocks that are stored just before the end."""
PROBE_S = 0.005


def rows(options: Options) -> Iterator[Row]:
    """Fill a host tier, then end the daemon in turn by a restart and by a kill."""
    host_bytes = GIB if options.quick else 4 * GIB
    need_memory(host_bytes + GIB)
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder:
        daemon = EmbeddedDaemon.warm(
            Path(folder) / "d",
            gpu__capacity=0,
            host__capacity=host_bytes,
            host__watermark=1.0,
            nvme__capacity=host_bytes + 2 * GIB,
        )
        with contextlib.closing(daemon):
            daemon.start()
            yield from _Rounds(daemon, host_bytes // BLOCK_BYTES).rows(options.rounds(3, 2))


class _Rounds:
    """One daemon, and what is stored in it: as many blocks as host has slots, all from one block's bytes and their
    number."""

    def __init__(self, daemon: EmbeddedDaemon, count: int) -> None:
        self._daemon = daemon
        self._keys = random_keys(count, seed=1)
        self._bytes = np.random.default_rng(2).integers(0, 256, LARGE.block_bytes, np.uint8)

    def rows(self, rounds: int) -> Iterator[Row]:
        """Restart, and kill, this often; the medians."""
        daemon = self._daemon
        with Client(daemon.endpoint, timeout_s=TIMEOUT_S, transfer_timeout_s=TIMEOUT_S) as client:
            await_memory(client)
            model = client.register(namespace(LARGE))
            self._store(client, model, range(len(self._keys)))
            client.flush()
            for name, end, ready_s, gap in (
                ("restart", daemon.stop, "<= 2", "<= 3"),
                ("kill -9", daemon.kill, "<= 3", ""),
            ):
                results = [self._round(client, model, end) for _ in range(rounds)]
                starts, gaps, ends = zip(*results, strict=True)
                what = f"{name} with a full host tier of {len(self._keys) * BLOCK_BYTES / GIB:.0f} GiB"
                served = f"{name}: committed blocks served from host after, bytes equal"
                yield make_row("restart", f"{what}: old end to ready", statistics.median(starts), "s", goal=ready_s)
                yield make_row("restart", f"{name}: clients' longest gap", max(gaps), "s", goal=gap)
                yield make_row("restart", served, 100.0, "%", goal=">= 100")
                if name == "restart":
                    flush_s = statistics.median(ends)
                    yield make_row("restart", "restart: flush of 128 MiB that are dirty, before that", flush_s, "s")

    def _round(self, client: Client, model: NamespaceHandle, end: Callable[[], object]) -> tuple[float, float, float]:
        """Seconds of (start, longest gap, end); BenchError where a block is not served from host."""
        dirty = range(min(64, len(self._keys)))
        client.delete(model, self._keys[dirty.start : dirty.stop])
        self._store(client, model, dirty)
        with _probing(self._daemon.endpoint, self._keys[:1]) as gaps:
            begun_s = time.monotonic()
            end()
            ended_s = time.monotonic()
            self._daemon.start()
            ready_s = time.monotonic()
            self._await_client(client, model)
            self._check(client, model)
        return ready_s - ended_s, max(gaps), ended_s - begun_s

    def _store(self, client: Client, model: NamespaceHandle, which: range) -> None:
        for begin in range(which.start, which.stop, BATCH):
            numbers = range(begin, min(begin + BATCH, which.stop))
            blocks = [self._block(number) for number in numbers]
            stored = client.store(model, self._keys[numbers.start : numbers.stop], blocks)
            expect("store", stored.stored, len(numbers))

    def _block(self, number: int) -> Bytes:
        block = self._bytes.copy()
        block[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        return block

    def _await_client(self, client: Client, model: NamespaceHandle) -> None:
        """A client whose daemon was away fails fast until it has heard of the new one."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not client.lookup(model, self._keys[:1]).count:
            if time.monotonic() > deadline_s:
                raise BenchError(f"the client found nothing within {TIMEOUT_S:.0f} s of the restart")
            time.sleep(PROBE_S)

    def _check(self, client: Client, model: NamespaceHandle) -> None:
        out = np.empty((BATCH, LARGE.block_bytes), np.uint8)
        for begin in range(0, len(self._keys), BATCH):
            keys = self._keys[begin : begin + BATCH]
            found = client.fetch(model, keys, out=out[: len(keys)])
            expect("fetch after the restart", found.count, len(keys))
            for i, block in enumerate(found.blocks):
                if int.from_bytes(block[:8].tobytes(), "little") != begin + i or (block[8:] != self._bytes[8:]).any():
                    raise BenchError(f"block {begin + i} came back with other bytes")
        stats = client.stats()
        expect("blocks adopted", int(stats["warm_adopted_blocks"]), len(self._keys))
        if stats["onboarded_blocks"]:
            raise BenchError(f"{stats['onboarded_blocks']} blocks were read from nvme")


@contextlib.contextmanager
def _probing(endpoint: str, key: Keys) -> Iterator[list[float]]:
    """Look a key up again and again; yields a list that has the longest gap between two hits at the end."""
    done, gaps = threading.Event(), [0.0]

    def probe() -> None:
        with Client(endpoint, timeout_s=1.0) as client:
            model = client.register(namespace(LARGE))
            last_s = time.monotonic()
            while not done.wait(PROBE_S):
                if client.lookup(model, key).count:
                    now_s = time.monotonic()
                    gaps[0] = max(gaps[0], now_s - last_s)
                    last_s = now_s
            gaps[0] = max(gaps[0], time.monotonic() - last_s)

    thread = threading.Thread(target=probe, name="prober")
    thread.start()
    try:
        yield gaps
    finally:
        done.set()
        thread.join()
