"""`kvtierctl bench naive`: decoding against what everybody writes first: contiguous KV, and whole-context copies.

Blocks of 128 tokens, 8 KV heads of 128, 2 layers; every result is compared with the kernel over contiguous memory. The
baseline is given our own attention kernel, so that only moving KV is compared:

* 64k tokens, 5% in gpu, 20% in host, the rest on nvme: each step it copies the whole context of a layer into one
  buffer, what is on disk from one contiguous file by large reads past the page cache, and computes. And all in host.
* 128k tokens with a quarter in memory, against all in memory.
* A decode that appends a token a step: its KV grows by reallocation, 64 tokens at a time. Ours keeps the tail of up to
  a block beside the daemon, stores it when it is full, and joins both parts by their log-sum-exp.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvtierd.bench.attend import BATCH, SHAPE, Bench, Kv
from kvtierd.bench.copies import Threads, private_memory
from kvtierd.bench.naive_decode import decode_rows
from kvtierd.bench.options import Options, need_memory, thread_count
from kvtierd.bench.rounds import alternate, timed
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import TIMEOUT_S, daemon_and_client
from kvtierd.core.units import MIB, PAGE_BYTES, align_up
from kvtierd.gpu.attend import Blocks, checked_query
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.storage.buffers import page_buffer

Array = np.ndarray[Any, Any]
K = 1024
READ_BYTES = 4 * MIB
ERROR_MAX = 1e-5
IO_THREADS = 4


class Context(Bench):
    """Blocks that are stored once, on nvme, and put into tiers by shares."""

    def _place(self) -> int:
        self._store()
        return self.blocks

    def place(self, gpu_share: float, host_share: float) -> None:
        """Have that much of the blocks in each tier, mixed at random, and the rest on nvme alone."""
        self.client.purge(self.handle, tiers=["gpu", "host"])
        order = np.random.default_rng(5).permutation(self.blocks)
        gpu, host = int(self.blocks * gpu_share), int(self.blocks * host_share)
        if gpu:
            self._raise("gpu", np.sort(order[:gpu]))
            self.client.purge(self.handle, tiers=["host"])
        self._raise("host", np.sort(order[gpu : gpu + host]))
        self.in_nvme = self.blocks - gpu - host


class WholeContext:
    """The baseline: `share` of the context in private memory, the rest in one contiguous file of each layer."""

    def __init__(self, kv: Kv, blocks: int, folder: Path, share: float, threads: Threads) -> None:
        self._kv, self._threads = kv, threads
        by_layer = kv.packed.reshape(BATCH, SHAPE.layers, SHAPE.layer_bytes)
        self._kept = int(blocks * share)
        self._buffer: Array = page_buffer(blocks * SHAPE.layer_bytes).reshape(blocks, SHAPE.layer_bytes)
        self._memory: list[Array] = []
        self._files: list[Path] = []
        for layer in range(SHAPE.layers):
            data = by_layer[np.arange(blocks) % BATCH, layer]
            kept = private_memory(max(1, self._kept) * SHAPE.layer_bytes, seed=layer).reshape(-1, SHAPE.layer_bytes)
            kept[: self._kept] = data[: self._kept]
            self._memory.append(kept)
            self._files.append(folder / f"layer-{layer}")
            self._files[-1].write_bytes(data[self._kept :].tobytes())
            with self._files[-1].open("rb") as written:
                os.fsync(written.fileno())
        self._device = HostAttention(thread_count())
        self._parts = Blocks.make(
            int(self._buffer.ctypes.data) + np.arange(blocks, dtype=np.uint64) * np.uint64(SHAPE.layer_bytes),
            tokens=SHAPE.block_size,
            positions=np.arange(blocks) * SHAPE.block_size,
        )

    def step(self) -> list[Array]:
        """Bring each layer's context into the buffer, whole, and attend; its outputs."""
        return [self._layer(layer) for layer in range(SHAPE.layers)]

    def _layer(self, layer: int) -> Array:
        kept = self._memory[layer][: self._kept]
        self._threads.copy(list(kept), list(self._buffer[: self._kept]))
        self._read(self._files[layer], self._buffer[self._kept :].reshape(-1))
        tokens = len(self._buffer) * SHAPE.block_size
        query = checked_query(self._kv.q[layer], SHAPE, layer=layer, length=tokens, available=tokens)
        partial = self._device.begin(query)
        self._device.compute(partial, self._parts)
        return partial.result()[0]

    def _read(self, path: Path, into: Array) -> None:
        if not into.size:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            whole = memoryview(cast(Any, into))

            def read(at: int) -> int:
                return os.preadv(descriptor, [whole[at : at + READ_BYTES]], at)

            with ThreadPoolExecutor(IO_THREADS) as pool:
                if sum(pool.map(read, range(0, into.size, READ_BYTES))) != into.size:
                    raise BenchError(f"short read of {path}")
        finally:
            os.close(descriptor)


def rows(options: Options) -> Iterator[Row]:
    """Measure residency, whole contexts, and growth, or the parts asked for."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for the baseline's kernel what the daemon has for ours
    tokens = 32 * K if options.quick else 128 * K
    blocks = tokens // SHAPE.block_size
    whole = blocks * SHAPE.slot_bytes
    need_memory(4 * whole)
    settings = {
        "gpu__capacity": max(128 * MIB, align_up(whole // 8, 64 * MIB)),
        "host__capacity": align_up(whole * 5 // 4, 64 * MIB) + 128 * MIB,
        "nvme__capacity": 2 * blocks * (SHAPE.slot_bytes + PAGE_BYTES) + 1024 * MIB,
        "nvme__io_threads": IO_THREADS,
        "nvme__scrub_rate": 0,
    }
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory))
        daemon, client = stack.enter_context(daemon_and_client(Path(name), thread_count(), **settings))
        threads = Threads(thread_count())
        stack.callback(threads.close)
        if options.wants("residency") or options.wants("whole-context"):
            context = Context(daemon, client, Kv(blocks // 2), blocks)
            yield from _context_rows(context, Path(name), threads, options)
        if options.wants("growth"):
            yield from decode_rows(client, options)


def _context_rows(context: Context, folder: Path, threads: Threads, options: Options) -> Iterator[Row]:
    if options.wants("residency"):
        yield from _residency_rows(context, options.rounds(5, 3))
    if not options.wants("whole-context"):
        return
    for what, gpu, host in (("5% gpu, 20% host", 0.05, 0.20), ("all in host", 0.0, 1.0)):
        baseline = WholeContext(context.kv, context.blocks // 2, folder, gpu + host, threads)
        yield _against_whole_contexts(context, baseline, what, (gpu, host), options.rounds(5, 3))


def _residency_rows(context: Context, rounds: int) -> Iterator[Row]:
    """A quarter of the blocks in memory, and all of them."""
    seconds = []
    for host in (0.25, 1.0):
        context.place(0.0, host)
        with context.client.open_sequence(context.handle, context.keys, timeout_s=TIMEOUT_S) as sequence:
            step = functools.partial(context.step, sequence)
            seconds += alternate([functools.partial(timed, step)], rounds)
    quarter, whole = seconds
    yield make_row(
        "naive",
        f"decode step over {context.blocks * SHAPE.block_size // K}k tokens, a quarter in memory",
        quarter * 1e3,
        "ms",
        reference=whole * 1e3,
        reference_name="the same with all of them in memory",
    )


def _against_whole_contexts(
    context: Context, baseline: WholeContext, what: str, shares: tuple[float, float], rounds: int
) -> Row:
    """Steps a second over half of the context, in the same tiers."""
    half = context.blocks // 2
    context.place(*shares)
    with context.client.open_sequence(context.handle, context.keys[:half], timeout_s=TIMEOUT_S) as sequence:
        for mine, theirs in zip(context.step(sequence), baseline.step(), strict=True):
            if (error := relative_error(mine.output, theirs.astype(np.float64))) > ERROR_MAX:
                raise BenchError(f"ours and the baseline differ by {error}")
        ours, other = alternate([lambda: timed(lambda: context.step(sequence)), lambda: timed(baseline.step)], rounds)
    return make_row(
        "naive",
        f"decode steps over {half * SHAPE.block_size // K}k tokens, {what}",
        1 / ours,
        "steps/s",
        reference=1 / other,
        reference_name="whole-context copies, the same kernel",
        goal=">= 3.2",
    )
