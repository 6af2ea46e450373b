"""`kvtierctl bench host`: 2 MiB blocks through the arena in batches of 32, against plain copies of the same bytes.

What is compared: both sides move the same number of bytes per round, block by block, on the same number of threads,
between a working set of over four times the last-level cache and one batch of private memory that is reused, so that
neither side lives in a cache that the other misses. Ours asks the daemon for each batch of one long prefix, the next
while one is copied, as `fetch` and `store` do, tells it the end of each, and copies between its arena and private
memory; rows without a goal show what it costs not to ask ahead. The reference copies with NumPy between two private
mappings. Every page of both is present before the clock runs. The daemon has no nvme tier here: write-behind would
take the second CPU from one side only.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.copies import Threads, cut, private_memory
from kvtierd.bench.options import Options, l3_bytes, need_memory
from kvtierd.bench.rounds import alternate
from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.workload import BATCH, BLOCK_BYTES, LARGE, daemon_and_client, expect, namespace, random_keys
from kvtierd.core.checksum import Sums, layer_sums
from kvtierd.core.keys import Keys
from kvtierd.core.units import MIB, align_up
from kvtierd.protocol.client import Client
from kvtierd.protocol.copying import default_threads

PASSES = 3
"""Times that one measurement goes over the working set."""
_PLAIN = "NumPy copies of the same bytes, as many threads"


class Reads:
    """Acquire, copy out, release."""

    def __init__(self, client: Client, batches: list[Keys], source: np.ndarray) -> None:
        self._client, self._batches = client, batches
        self._keys = np.concatenate(batches)
        self._handle = client.register(namespace(LARGE))
        self._out = private_memory(BATCH * BLOCK_BYTES, seed=3).reshape(BATCH, BLOCK_BYTES)
        begin = time.perf_counter()
        for keys in batches:
            expect("stored", client.store(self._handle, keys, source).stored, BATCH)
        self.first_store_rate = len(batches) * BATCH * BLOCK_BYTES / (time.perf_counter() - begin)
        """Bytes a second into slots whose pages this client had not mapped before: a page fault each 4 KiB."""

    def rate(self, *, verify: bool) -> float:
        """Bytes a second of one long prefix, each batch asked for while the one before is copied."""
        begin = time.perf_counter()
        for _ in range(PASSES):
            for lease in self._client.leases(self._handle, self._keys, batch=BATCH):
                expect("copied out", lease.copy_to(self._out, verify=verify), BATCH)
        return _bytes_of(self._batches) / (time.perf_counter() - begin)

    def rate_apart(self) -> float:
        """Bytes a second where each batch is asked for only when the one before is released."""
        begin = time.perf_counter()
        for keys in self._batches * PASSES:
            with self._client.acquire(self._handle, keys) as lease:
                expect("copied out", lease.copy_to(self._out, verify=False), BATCH)
        return _bytes_of(self._batches) / (time.perf_counter() - begin)


class Writes:
    """Reserve, write in place, commit without waiting for the answer, as an engine that saves does.

    The clock of a pass stops when its last batch is found; what it stored is purged before the next pass.
    """

    def __init__(self, client: Client, batches: list[Keys], source: np.ndarray, threads: Threads) -> None:
        self._client, self._batches, self._source, self._threads = client, batches, source, threads
        self._keys = np.concatenate(batches)
        self._handle = client.register(namespace(LARGE))
        self._sums = np.array([layer_sums(block, LARGE) for block in source])

    def rate(self, store: Callable[[], None]) -> float:
        """Bytes a second of a way to store all batches."""
        seconds = 0.0
        for _ in range(PASSES):
            self._client.purge(self._handle)
            begin = time.perf_counter()
            store()
            # Requests are served in their order: when the last batch is found, all are stored.
            expect("found", self._client.lookup(self._handle, self._batches[-1]).count, BATCH)
            seconds += time.perf_counter() - begin
            for keys in self._batches:
                expect("found", self._client.lookup(self._handle, keys).count, BATCH)
        return _bytes_of(self._batches) / seconds

    def with_known_sums(self) -> None:
        """The writer brings the sums: nothing is hashed."""
        self._in_place(self._sums)

    def in_place(self) -> None:
        """The writer fills the slots as it likes, and `commit` hashes them."""
        self._in_place(None)

    def _in_place(self, sums: Sums | None) -> None:
        for reservation in self._client.reservations(self._handle, self._keys, batch=BATCH):
            self._write(reservation.views)
            expect("handed over", reservation.commit(sums=sums, wait=False), BATCH)

    def apart(self) -> None:
        """Each batch is reserved only when the one before is committed."""
        for keys in self._batches:
            with self._client.reserve(self._handle, keys) as reservation:
                self._write(reservation.views)
                expect("handed over", reservation.commit(sums=self._sums, wait=False), BATCH)

    def stored(self) -> None:
        """The client copies and hashes piece by piece."""
        for keys in self._batches:
            expect("stored", self._client.store(self._handle, keys, self._source).stored, BATCH)

    def _write(self, views: list[np.ndarray | None]) -> None:
        slots = [view for view in views if view is not None]
        expect("granted", len(slots), BATCH)
        self._threads.copy(list(self._source), slots)


class PlainCopies:
    """The reference: a working set of private memory, and one batch of it that is reused."""

    def __init__(self, count: int, threads: Threads) -> None:
        self._set = [
            cut(private_memory(BATCH * BLOCK_BYTES, seed), BLOCK_BYTES) for seed in range(10, 10 + count // BATCH)
        ]
        self._batch = cut(private_memory(BATCH * BLOCK_BYTES, seed=4), BLOCK_BYTES)
        self._threads = threads

    def read_rate(self) -> float:
        """Bytes a second from the working set into the batch."""
        return self._rate(lambda blocks: self._threads.copy(blocks, self._batch))

    def write_rate(self) -> float:
        """Bytes a second from the batch into the working set."""
        return self._rate(lambda blocks: self._threads.copy(self._batch, blocks))

    def _rate(self, copy: Callable[[list[np.ndarray]], None]) -> float:
        begin = time.perf_counter()
        for blocks in self._set * PASSES:
            copy(blocks)
        return _bytes_of(self._set) / (time.perf_counter() - begin)


def rows(options: Options) -> Iterator[Row]:
    """Measure reads, then writes."""
    count = working_set_blocks()
    # Both sides have a working set; the arena keeps a tenth free, so that nothing is evicted.
    capacity = align_up(int(count * BLOCK_BYTES / 0.9), 64 * MIB) + 64 * MIB
    need_memory(2 * capacity + 8 * BATCH * BLOCK_BYTES)
    rounds = options.rounds(11, 5)
    threads = Threads(default_threads())
    settings = {"nvme__directory": "", "gpu__capacity": 0, "host__capacity": capacity}
    batches = [random_keys(BATCH, seed) for seed in range(count // BATCH)]
    source = private_memory(BATCH * BLOCK_BYTES, seed=1).reshape(BATCH, BLOCK_BYTES)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder,
            daemon_and_client(Path(folder), threads.count, **settings) as (_, client),
        ):
            plain = PlainCopies(count, threads)
            yield from _read_rows(Reads(client, batches, source), plain, rounds)
            yield from _write_rows(Writes(client, batches, source, threads), plain, rounds)
    finally:
        threads.close()


def _read_rows(reads: Reads, plain: PlainCopies, rounds: int) -> Iterator[Row]:
    bare, checked, apart, reference = alternate(
        [lambda: reads.rate(verify=False), lambda: reads.rate(verify=True), reads.rate_apart, plain.read_rate], rounds
    )
    yield _row("acquire, copy out, release, no checksum", bare, reference, ">= 0.85")
    yield _row("acquire, copy out, release", checked, reference, ">= 0.4")
    yield _row("the same, no checksum, no batch asked for ahead", apart, reference, "")
    yield make_row("host", "store, first touch of the arena by a client", reads.first_store_rate / 1e9, "GB/s")


def _write_rows(writes: Writes, plain: PlainCopies, rounds: int) -> Iterator[Row]:
    known, in_place, stored, apart, reference = alternate(
        [
            lambda: writes.rate(writes.with_known_sums),
            lambda: writes.rate(writes.in_place),
            lambda: writes.rate(writes.stored),
            lambda: writes.rate(writes.apart),
            plain.write_rate,
        ],
        rounds,
    )
    yield _row("reserve, write in place, commit, no checksum", known, reference, ">= 0.8")
    yield _row("reserve, write in place, commit", in_place, reference, ">= 0.4")
    yield _row("store", stored, reference, ">= 0.4")
    yield _row("the same, no checksum, no batch asked for ahead", apart, reference, "")


def _row(metric: str, value: float, reference: float, goal: str) -> Row:
    return make_row("host", metric, value / 1e9, "GB/s", reference=reference / 1e9, reference_name=_PLAIN, goal=goal)


def working_set_blocks() -> int:
    """Whole batches of blocks that are more than four times the last-level cache, and a prefix of 256 blocks at least:
    the first batch of a prefix is asked for ahead of nothing."""
    return align_up(max(256, 4 * l3_bytes() // BLOCK_BYTES + 1), BATCH)


def _bytes_of(batches: list[Keys] | list[list[np.ndarray]]) -> int:
    return len(batches) * BATCH * BLOCK_BYTES * PASSES
