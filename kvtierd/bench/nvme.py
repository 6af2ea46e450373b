"""`kvtierctl bench nvme`: 2 MiB blocks offloaded and onboarded through the daemon, against fio in the same folder.

What is compared. Offload: from the first `store` until `flush` has answered, so copies into the arena, checksums and
the journal are in it, and everything is on stable storage; fio writes as much with O_DIRECT and ends with fsync.
Onboard: the host copies are purged, then `prefetch(wait=True)` until every block is back in host memory and its
checksum verified; fio reads as much with O_DIRECT. Each round works on new blocks and, for fio, on new files.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench import fio
from kvtierd.bench.copies import private_memory
from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rounds import alternate
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import BATCH, BLOCK_BYTES, LARGE, daemon_and_client, expect, namespace, random_keys
from kvtierd.core.keys import Keys
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client
from kvtierd.protocol.copying import default_threads
from kvtierd.protocol.messages import TIER_HOST, TIER_NVME


class DaemonDisk:
    """Blocks stored, flushed, dropped from host and brought back; each round has keys of its own."""

    def __init__(self, client: Client, count: int) -> None:
        self._client, self._count = client, count
        self._handle = client.register(namespace(LARGE))
        self._source = private_memory(BATCH * BLOCK_BYTES, seed=1).reshape(BATCH, BLOCK_BYTES)
        self._keys: Keys = random_keys(count, seed=0)
        self._round = 0

    def offload_rate(self) -> float:
        """Bytes a second from store to durable."""
        self._client.purge(self._handle)
        self._round += 1
        self._keys = random_keys(self._count, seed=self._round)
        begin = time.perf_counter()
        for at in range(0, self._count, BATCH):
            expect("stored", self._client.store(self._handle, self._keys[at : at + BATCH], self._source).stored, BATCH)
        self._client.flush()
        seconds = time.perf_counter() - begin
        self._expect_in(TIER_NVME)
        return self._count * BLOCK_BYTES / seconds

    def onboard_rate(self) -> float:
        """Bytes a second from nvme to host."""
        self._client.purge(self._handle, tiers=["gpu", "host"])
        expect("left in host after a purge", self._in(TIER_HOST), 0)
        begin = time.perf_counter()
        self._client.prefetch(self._handle, self._keys, tier="host", wait=True)
        seconds = time.perf_counter() - begin
        self._expect_in(TIER_HOST)
        self._compare()
        return self._count * BLOCK_BYTES / seconds

    def _in(self, tier: int) -> int:
        hit = self._client.lookup(self._handle, self._keys)
        expect("found", hit.count, self._count)
        return int(np.count_nonzero(hit.tiers & tier))

    def _expect_in(self, tier: int) -> None:
        expect("in the nvme tier after a flush" if tier == TIER_NVME else "onboarded", self._in(tier), self._count)

    def _compare(self) -> None:
        last = self._client.fetch(self._handle, self._keys[-BATCH:])
        if last.count != BATCH or not np.array_equal(last.blocks, self._source):
            raise BenchError("what came back from the disk is not what was stored")


def rows(options: Options) -> Iterator[Row]:
    """Measure offload and onboard in the same rounds."""
    fio.find_fio()
    count = options.rounds(512, 256)
    amount = count * BLOCK_BYTES
    need_memory(3 * amount)
    settings = {
        "gpu__capacity": 0,
        "host__capacity": 2 * amount,
        "nvme__capacity": 8 * amount,
        "nvme__write_queue_bytes": 2 * amount,
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder,
        daemon_and_client(Path(folder) / "d", default_threads(), **settings) as (_, client),
    ):
        disk, files = DaemonDisk(client, count), Path(folder) / "fio"
        files.mkdir()

        def fio_write() -> float:
            fio.remove_files(files)
            return fio.run_fio(files, amount, "write")

        written, fio_written, read, fio_read = alternate(
            [disk.offload_rate, fio_write, disk.onboard_rate, lambda: fio.run_fio(files, amount, "read")],
            options.rounds(7, 3),
        )
        mode = client.stats().get("nvme_mode", "unknown")
    yield _row(f"offload: store and flush ({mode})", written, fio_written)
    yield _row(f"onboard: prefetch ({mode})", read, fio_read)


def _row(metric: str, value: float, reference: float) -> Row:
    return make_row(
        "nvme",
        metric,
        value / MIB,
        "MiB/s",
        reference=reference / MIB,
        reference_name=fio.NAME,
        goal=">= 0.8",
    )
