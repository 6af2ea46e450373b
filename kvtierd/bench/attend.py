"""`kvtierctl bench attend`: one query over 256k tokens, 5% of its blocks in gpu, 20% in host, the rest in nvme.

A decode step asks for two layers of 8 KV heads of dim 128, one after the other, through the daemon's socket; blocks of
the tiers are mixed at random. What bounds it is the disk or compute, and the larger of the two is the reference. The
disk is measured in the same rounds, by plain O_DIRECT reads of as many parts of the same size and of all layers from
the same files, as many at once as the daemon has I/O threads and half as many more; each begins when another read has
just ended, because a disk that has rested may be faster for a moment (a virtual one saves up what it may transfer).
Compute is the kernel alone over contiguous memory with all the tokens. Bytes read are what the store counts, after the
first step, which reads the blocks' headers too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvtierd.bench.copies import private_memory
from kvtierd.bench.options import Options, need_memory, thread_count
from kvtierd.bench.rounds import Measure, alternate, timed
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.smaps import total_bytes
from kvtierd.bench.workload import TIMEOUT_S, daemon_and_client, expect, namespace, random_keys
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB, PAGE_BYTES
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.gpu.attend import Blocks, checked_query
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.protocol.attention import Sequence
from kvtierd.protocol.attention_plans import Attended
from kvtierd.protocol.client import Client
from kvtierd.storage.buffers import page_buffer

Array = np.ndarray[Any, Any]

SHAPE = Geometry(block_size=128, layers=2, kv_heads=8, k_dim=128, v_dim=128)
"""512 KiB a layer of a block."""
HEADS = 32
TOKENS = 1 << 18
BATCH = 32
"""Blocks with contents of their own; the others repeat them."""
GPU_SHARE, HOST_SHARE = 0.05, 0.20
IO_THREADS = 4


class Kv:
    """Contents of `BATCH` blocks (normal deviates), queries, and the kernel alone over all of them in one piece."""

    def __init__(self, blocks: int) -> None:
        rng = np.random.default_rng(1)
        numbers = rng.standard_normal((BATCH, SHAPE.block_bytes // 2), np.float32)
        self.packed = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        self.q = rng.standard_normal((SHAPE.layers, 1, HEADS, SHAPE.k_dim), np.float32)
        self._device = HostAttention(thread_count())
        self._memory = private_memory(blocks * SHAPE.layer_bytes, seed=2).reshape(blocks, SHAPE.layer_bytes)
        self._parts = Blocks.make(
            int(self._memory.ctypes.data) + np.arange(blocks, dtype=np.uint64) * np.uint64(SHAPE.layer_bytes),
            tokens=SHAPE.block_size,
            positions=np.arange(blocks) * SHAPE.block_size,
        )
        self._layer = -1

    def use_layer(self, layer: int) -> None:
        """Fill the memory with a layer's parts."""
        by_layer = self.packed.reshape(BATCH, SHAPE.layers, SHAPE.layer_bytes)
        for begin in range(0, len(self._memory), BATCH):
            part = self._memory[begin : begin + BATCH]
            part[:] = by_layer[: len(part), layer]
        self._layer = layer

    def compute(self) -> tuple[Array, Array]:
        """Attention over the layer in use."""
        tokens = len(self._memory) * SHAPE.block_size
        query = checked_query(self.q[self._layer], SHAPE, layer=self._layer, length=tokens, available=tokens)
        partial = self._device.begin(query)
        for begin, end in self._device.pieces(query, self._parts):
            self._device.compute(partial, self._parts, begin, end)
        return partial.result()


class RawReads:
    """Plain reads of parts from the segments of a store: of the same size, apart from each other as there."""

    def __init__(self, folder: Path, parts: int, shape: Geometry = SHAPE) -> None:
        self._shape = shape
        step = shape.slot_bytes + PAGE_BYTES
        places = [
            (file, offset)
            for file in sorted(folder.glob("segment-*"))
            for offset in range(2 * PAGE_BYTES, file.stat().st_size - step, step)
        ]
        if len(places) < parts:
            raise BenchError(f"the store has {len(places)} places for {parts} reads")
        # The parts that are read lie between others that are not, as those of blocks in other tiers do.
        chosen = [places[i] for i in np.random.default_rng(3).permutation(len(places))[:parts]]
        self._places = sorted(chosen)

    def run(self, threads: int) -> None:
        """Read all parts, layer by layer, `threads` at a time."""
        files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {path for path, _ in self._places}}
        layers = range(self._shape.layers)
        waiting = iter([(path, at + i * self._shape.layer_stride) for i in layers for path, at in self._places])
        lock = threading.Lock()
        failures: list[OSError] = []

        def work() -> None:
            memory: Any = page_buffer(self._shape.layer_stride)
            try:
                while True:
                    with lock:
                        place = next(waiting, None)
                    if place is None:
                        return
                    if os.preadv(files[place[0]], [memory], place[1]) != memory.size:
                        raise OSError(f"short read of {place[0]}")
            except OSError as error:
                failures.append(error)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            for descriptor in files.values():
                os.close(descriptor)
        if failures:
            raise BenchError(f"raw reads failed: {failures[0]}")


class Bench:
    """Blocks in their tiers, and a sequence over them."""

    def __init__(self, daemon: EmbeddedDaemon, client: Client, kv: Kv, blocks: int) -> None:
        self.daemon, self.client, self.kv, self.blocks = daemon, client, kv, blocks
        self.handle = client.register(namespace(SHAPE))
        self.keys = random_keys(blocks, seed=4)
        self.in_nvme = self._place()

    def _store(self) -> None:
        """Have all blocks on nvme."""
        for begin in range(0, self.blocks, BATCH):
            keys = self.keys[begin : begin + BATCH]
            expect("stored", self.client.store(self.handle, keys, self.kv.packed[: len(keys)]).stored, len(keys))
            if begin % (8 * BATCH) == 0:
                self.client.flush()
        self.client.flush()

    def _place(self) -> int:
        self._store()
        self.client.purge(self.handle, tiers=["gpu", "host"])
        order = np.random.default_rng(5).permutation(self.blocks)
        gpu, host = int(self.blocks * GPU_SHARE), int(self.blocks * HOST_SHARE)
        self._raise("gpu", np.sort(order[:gpu]))
        self.client.purge(self.handle, tiers=["host"])
        self._raise("host", np.sort(order[gpu : gpu + host]))
        return self.blocks - gpu - host

    def _raise(self, tier: Any, which: Array) -> None:
        expect(f"in {tier}", self.client.prefetch(self.handle, self.keys[which], tier=tier, wait=True), which.size)

    def step(self, sequence: Sequence) -> list[Attended]:
        """Both layers, one after the other, as a model asks."""
        return [sequence.attend(layer, self.kv.q[layer]) for layer in range(SHAPE.layers)]

    def read_bytes(self) -> int:
        """What the store has read."""
        return int(self.client.stats()["nvme_read_bytes"])

    def resident(self, blocks: int) -> int:
        """Resident memory of the daemon after a step over the first blocks."""
        with self.client.open_sequence(self.handle, self.keys[:blocks], timeout_s=TIMEOUT_S) as sequence:
            self.step(sequence)
            self.step(sequence)
        return total_bytes(self.daemon.pid)


def rows(options: Options) -> Iterator[Row]:
    """Measure a step against the disk and the kernel."""
    blocks = (TOKENS // 4 if options.quick else TOKENS) // SHAPE.block_size
    store = blocks * (SHAPE.slot_bytes + PAGE_BYTES)
    host = 2 * int(blocks * HOST_SHARE) * SHAPE.slot_bytes // (64 * MIB) * (64 * MIB) + 128 * MIB
    need_memory(blocks * SHAPE.layer_bytes + 2 * host)
    settings = {
        "gpu__capacity": max(128 * MIB, 3 * int(blocks * GPU_SHARE) * SHAPE.slot_bytes // (64 * MIB) * (64 * MIB)),
        "host__capacity": host,
        "nvme__capacity": 2 * store + 1024 * MIB,
        "nvme__write_queue_bytes": host // 2,
        "nvme__io_threads": IO_THREADS,
        "nvme__scrub_rate": 0,
    }
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory))
        daemon, client = stack.enter_context(daemon_and_client(Path(name), thread_count(), **settings))
        yield from _measured(Bench(daemon, client, Kv(blocks), blocks), options.rounds(5, 3))


def _measured(bench: Bench, rounds: int) -> Iterator[Row]:
    half = bench.resident(bench.blocks // 2)
    whole = bench.resident(bench.blocks)
    raw = RawReads(bench.daemon.data_dir, bench.in_nvme)
    with bench.client.open_sequence(bench.handle, bench.keys, timeout_s=TIMEOUT_S) as sequence:
        error = _check(bench, bench.step(sequence))
        before, steps = bench.read_bytes(), 0

        def step() -> object:
            nonlocal steps
            steps += 1
            return bench.step(sequence)

        def disk(threads: int) -> float:
            return timed(lambda: raw.run(threads))

        measures: list[Measure] = [lambda: timed(step)]
        measures += [functools.partial(disk, threads) for threads in (IO_THREADS, IO_THREADS * 3 // 2)]
        ours, *disks = alternate(measures, rounds)
        (compute,) = alternate([lambda: timed(bench.kv.compute) * SHAPE.layers], rounds)
        read = bench.read_bytes() - before
    needed = steps * SHAPE.layers * bench.in_nvme * SHAPE.layer_stride
    yield from _rows(bench, ours, compute, min(disks))
    yield make_row("attend", "bytes read from nvme / bytes needed", read / needed, "", goal="<= 1.0")
    what = f"daemon's memory after {bench.blocks * SHAPE.block_size // 1024}k tokens"
    yield make_row(
        "attend", what, whole / MIB, "MiB", reference=half / MIB, reference_name="after half as many", goal="<= 1.02"
    )
    yield make_row("attend", "relative error against the kernel alone", error, "", goal="<= 0.00001")


def _rows(bench: Bench, ours: float, compute: float, disk: float) -> Iterator[Row]:
    bound, name = max((disk, "plain reads of the parts in nvme"), (compute, "the kernel alone over all tokens"))
    tokens = bench.blocks * SHAPE.block_size // 1024
    metric = f"{SHAPE.layers} layers of {tokens}k tokens, 5% gpu, 20% host"
    yield make_row("attend", metric, ours * 1e3, "ms", reference=bound * 1e3, reference_name=name, goal="<= 1.15")
    rate = SHAPE.layers * bench.in_nvme * SHAPE.layer_bytes / ours / MIB
    yield make_row("attend", "of this, through the staging ring", rate, "MiB/s")
    yield make_row("attend", "the kernel alone over all tokens", compute * 1e3, "ms")
    yield make_row("attend", "plain reads of the parts in nvme", disk * 1e3, "ms")


def _check(bench: Bench, found: list[Attended]) -> float:
    """Compare with the kernel over contiguous memory: the largest relative error of a head."""
    worst = 0.0
    for layer, attended in enumerate(found):
        bench.kv.use_layer(layer)
        output, _ = bench.kv.compute()
        worst = max(worst, relative_error(attended.output, output))
    return worst
