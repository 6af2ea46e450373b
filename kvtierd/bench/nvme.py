"""`kvtierctl bench nvme`: blocks offloaded and onboarded through the daemon, against fio in the same folder.

What is compared. Offload: from the first `store` until `flush` has answered, so copies into the arena, checksums and
the journal are in it, and everything is on stable storage; fio writes as much with O_DIRECT and ends with fsync.
Onboard: the host copies are purged, then `prefetch(wait=True)` until every block is back in host memory and its
checksum verified; fio reads as much with O_DIRECT. Each round works on new blocks and, for fio, on new files. The
reference is the better of fio's two ways in every round's median: psync with 4 jobs, and io_uring with 16 requests.
Before the rounds ours goes once, which maps the arena's pages into the client; fio has nothing like it.
Then reads and writes at the same time, against each alone (kvtierd.bench.nvme_mixed).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench import fio, nvme_mixed
from kvtierd.bench.copies import private_memory
from kvtierd.bench.options import Options, l3_bytes, need_memory
from kvtierd.bench.rounds import alternate
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import BLOCK_BYTES, LARGE, daemon_and_client, expect, namespace, random_keys
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys
from kvtierd.core.units import KIB, MIB, align_up
from kvtierd.protocol.client import Client
from kvtierd.protocol.copying import default_threads
from kvtierd.protocol.messages import TIER_HOST, TIER_NVME

QUARTER = Geometry(block_size=16, layers=32, kv_heads=2, k_dim=128, v_dim=128)
"""A block of 512 KiB: 32 layers of 16 KiB."""
SOURCE_BYTES = 64 * MIB
"""What is stored again and again under new keys: more than a cache holds."""
STORE_BYTES = 16 * MIB
"""Stored in one call, as an engine does that saves what a step of a long prompt has computed."""

assert QUARTER.block_bytes == QUARTER.slot_bytes == 512 * KIB


class DaemonDisk:
    """Blocks stored, flushed, dropped from host and brought back; each round has keys of its own."""

    def __init__(self, client: Client, geometry: Geometry, amount_bytes: int) -> None:
        self._client = client
        self._block_bytes = geometry.block_bytes
        self._batch = STORE_BYTES // self._block_bytes
        self._whole = SOURCE_BYTES // self._block_bytes
        self._count = amount_bytes // self._block_bytes
        self._handle = client.register(namespace(geometry))
        self._source = private_memory(SOURCE_BYTES, seed=1).reshape(self._whole, self._block_bytes)
        self._keys: Keys = random_keys(self._count, seed=0)
        self._round = 0

    def forget(self) -> None:
        """Drop all blocks: what comes next finds the host tier empty."""
        self._client.purge(self._handle)

    def offload_rate(self) -> float:
        """Bytes a second from store to durable."""
        self.forget()
        self._round += 1
        self._keys = random_keys(self._count, seed=self._round)
        begin = time.perf_counter()
        for at in range(0, self._count, self._batch):
            first = at % self._whole
            blocks = self._source[first : first + self._batch]
            stored = self._client.store(self._handle, self._keys[at : at + self._batch], blocks).stored
            expect("stored", stored, self._batch)
        self._client.flush()
        seconds = time.perf_counter() - begin
        self._expect_in(TIER_NVME)
        return self._count * self._block_bytes / seconds

    def onboard_rate(self) -> float:
        """Bytes a second from nvme to host."""
        self._client.purge(self._handle, tiers=["gpu", "host"])
        expect("left in host after a purge", self._in(TIER_HOST), 0)
        begin = time.perf_counter()
        done = 0
        while done < self._count:
            # The daemon brings as much of a long run as it has room for on its way; a client asks for the rest.
            count = self._client.prefetch(self._handle, self._keys[done:], tier="host", wait=True)
            if not count:
                break
            done += count
        seconds = time.perf_counter() - begin
        self._expect_in(TIER_HOST)
        self._compare()
        return self._count * self._block_bytes / seconds

    def _in(self, tier: int) -> int:
        hit = self._client.lookup(self._handle, self._keys)
        expect("found", hit.count, self._count)
        return int(np.count_nonzero(hit.tiers & tier))

    def _expect_in(self, tier: int) -> None:
        expect("in the nvme tier after a flush" if tier == TIER_NVME else "onboarded", self._in(tier), self._count)

    def _compare(self) -> None:
        last = self._client.fetch(self._handle, self._keys[-self._whole :])
        if last.count != self._whole or not np.array_equal(last.blocks, self._source):
            raise BenchError("what came back from the disk is not what was stored")


class FioDisk:
    """fio in a folder: each round writes new files and reads them."""

    def __init__(self, folder: Path, amount_bytes: int, block_bytes: int, engine: fio.Engine) -> None:
        folder.mkdir()
        self._arguments = folder, amount_bytes
        self._block_bytes, self._engine = block_bytes, engine

    def write_rate(self) -> float:
        """Bytes a second to new files, fsync included."""
        fio.remove_files(self._arguments[0])
        return self._run("write")

    def read_rate(self) -> float:
        """Bytes a second from the files of the last `write_rate`."""
        return self._run("read")

    def _run(self, direction: fio.Direction) -> float:
        return fio.run_fio(*self._arguments, direction, block_bytes=self._block_bytes, engine=self._engine)


def rows(options: Options) -> Iterator[Row]:
    """Measure offload and onboard of both sizes, then both at once."""
    fio.find_fio()
    amount = max(options.rounds(1024, 512) * MIB, align_up(2 * l3_bytes(), SOURCE_BYTES))
    need_memory(4 * amount)
    settings = {
        "gpu__capacity": 0,
        # Blocks of each size keep the slabs that they once had, and a class that is nearly full is thinned out.
        "host__capacity": 3 * amount,
        "nvme__capacity": 8 * amount,
        "nvme__write_queue_bytes": 2 * amount,
    }
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as name:
        folder = Path(name)
        engines = fio.usable_engines(folder)
        with daemon_and_client(folder / "d", default_threads(), **settings) as (_, client):
            mode = str(client.stats().get("nvme_mode", "unknown"))
            for geometry in (LARGE, QUARTER):
                yield from _alone(client, geometry, amount, folder, engines, options.rounds(3, 2), mode)
    yield from nvme_mixed.rows(options)


def _alone(
    client: Client,
    geometry: Geometry,
    amount: int,
    folder: Path,
    engines: list[fio.Engine],
    rounds: int,
    mode: str,
) -> Iterator[Row]:
    ours = DaemonDisk(client, geometry, amount)
    size = geometry.block_bytes
    theirs = [FioDisk(folder / f"{engine.ioengine}-{size}", amount, size, engine) for engine in engines]
    measures: list[Callable[[], float]] = [ours.offload_rate, *(disk.write_rate for disk in theirs)]
    measures += [ours.onboard_rate, *(disk.read_rate for disk in theirs)]
    ours.offload_rate()
    ours.onboard_rate()
    figures = alternate(measures, rounds, warmup=0)
    ours.forget()
    half = len(figures) // 2
    label = "2 MiB" if size == BLOCK_BYTES else f"{size // KIB} KiB"
    yield _row(f"offload {label}: store and flush ({mode})", figures[:half], engines)
    yield _row(f"onboard {label}: prefetch ({mode})", figures[half:], engines)


def _row(metric: str, figures: list[float], engines: list[fio.Engine]) -> Row:
    value, *others = figures
    best = max(range(len(others)), key=others.__getitem__)
    return make_row(
        "nvme",
        metric,
        value / MIB,
        "MiB/s",
        reference=others[best] / MIB,
        reference_name=f"direct fio, same size, {engines[best]}",
        goal=">= 0.9",
    )
