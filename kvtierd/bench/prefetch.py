"""`kvtierctl bench prefetch`: how long a sequential reader of a cold prefix stands still, with and without the window.

What is compared: a client reads a prefix of 2 MiB blocks from nvme one by one, and works on each for as long as a read
of one takes without any prefetch (measured at the start). Stall is the time that its `acquire` calls take in all.
Both daemons have the same blocks, tiers and disk; one has `prefetch_window` 3, the other 0.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvtierd.bench.copies import private_memory
from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rounds import alternate
from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.workload import BATCH, BLOCK_BYTES, LARGE, daemon_and_client, expect, namespace
from kvtierd.core.keys import Keys, block_keys
from kvtierd.protocol.client import Client
from kvtierd.protocol.copying import default_threads
from kvtierd.protocol.messages import TIER_HOST

BLOCKS = 64
WINDOW = 3


class Reader:
    """A prefix of BLOCKS blocks in one daemon."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._handle = client.register(namespace(LARGE))
        source = private_memory(BATCH * BLOCK_BYTES, seed=1).reshape(BATCH, BLOCK_BYTES)
        self._keys: Keys = block_keys(self._handle.digest, range(BLOCKS * LARGE.block_size), LARGE.block_size)
        for begin in range(0, BLOCKS, BATCH):
            batch = self._keys[begin : begin + BATCH]
            expect("stored", client.store(self._handle, batch, source).stored, BATCH)
        client.flush()

    def stalls_s(self, work_s: float) -> list[float]:
        """Seconds that each `acquire` of a cold pass takes, with `work_s` of work after each."""
        self._client.purge(self._handle, tiers=["host", "gpu"])
        hit = self._client.lookup(self._handle, self._keys)
        expect("on disk only", int((hit.tiers & TIER_HOST == 0).sum()), BLOCKS)
        stalls = []
        for block in range(BLOCKS):
            begin_s = time.perf_counter()
            with self._client.acquire(self._handle, self._keys[block : block + 1]) as lease:
                stalls.append(time.perf_counter() - begin_s)
                expect("acquired", lease.count, 1)
            _work(work_s)
        return stalls


def rows(options: Options) -> Iterator[Row]:
    """Measure both daemons in the same rounds."""
    capacity = 4 * BLOCKS * BLOCK_BYTES
    need_memory(2 * capacity)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory)))
        readers = [
            Reader(
                stack.enter_context(
                    daemon_and_client(
                        folder / str(window),
                        default_threads(),
                        kv_cache_config__prefetch_window=window,
                        gpu__capacity=0,
                        host__capacity=capacity,
                        nvme__capacity=8 * capacity,
                    )
                )[1]
            )
            for window in (0, WINDOW)
        ]
        work_s = statistics.median(readers[0].stalls_s(0.0))
        without, with_window = alternate(
            [lambda: sum(readers[0].stalls_s(work_s)), lambda: sum(readers[1].stalls_s(work_s))], options.rounds(7, 3)
        )
    yield make_row("prefetch", "read of one cold block, and work on it", work_s * 1e3, "ms")
    yield make_row(
        "prefetch",
        f"stall of a sequential read of {BLOCKS} cold blocks, window {WINDOW}",
        with_window * 1e3,
        "ms",
        reference=without * 1e3,
        reference_name="the same with window 0",
        goal="<= 0.4",
    )


def _work(seconds: float) -> None:
    """Keep this thread busy, as computing on a block would; a sleep would leave the processor to the daemon."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass
