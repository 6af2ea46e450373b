"""What bounds each part, measured in the same run: copies, the disk, the generator, the attention kernel alone."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtierd.bench.copies import Threads, cut, private_memory
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import EncodedLayout
from kvtierd.core.units import MIB, PAGE_BYTES
from kvtierd.gpu.attend import CODED, DTYPE_CODES, Blocks, checked_query
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.codec import BlockCodec
from kvtierd.storage.buffers import page_buffer
from kvtierd.stress.content import BlockId, Content
from kvtierd.stress.processes import StressError

IO_THREADS = 4
"""As many as the daemon has, by default."""
WRITE_BYTES = 4 * MIB
COPY_SET_BYTES = 192 * MIB
"""More than the last-level cache, on the side that is read."""
KERNEL_BLOCKS = 128
"""Whose layer is in memory for the kernel alone; longer contexts go over it again. 64 MiB of Llama's blocks."""


def copy_rate(threads: int) -> float:
    """Bytes a second of plain copies on so many threads."""
    pool = Threads(threads)
    try:
        source = cut(private_memory(COPY_SET_BYTES, seed=1), MIB)
        target = cut(private_memory(32 * MIB, seed=2), MIB)
        best = 0.0
        for _ in range(3):
            begin_s = time.perf_counter()
            for at in range(0, len(source), len(target)):
                pool.copy(source[at : at + len(target)], target)
            best = max(best, len(source) * MIB / (time.perf_counter() - begin_s))
        return best
    finally:
        pool.close()


def write_rate(folder: Path, count: int) -> float:
    """Bytes a second of plain O_DIRECT writes of `count` bytes to a file with its space allocated, and an fsync."""
    path = folder / "write-probe"
    steps = max(IO_THREADS, count // WRITE_BYTES)
    data: Any = page_buffer(WRITE_BYTES)
    data[:] = np.random.default_rng(3).integers(0, 256, data.size, np.uint8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, steps * WRITE_BYTES)
        begin_s = time.perf_counter()
        _on_threads(lambda at: _exact(os.pwritev(descriptor, [data], at), WRITE_BYTES, "write"),
                    [i * WRITE_BYTES for i in range(steps)], IO_THREADS)  # fmt: skip
        os.fsync(descriptor)
        return steps * WRITE_BYTES / (time.perf_counter() - begin_s)
    finally:
        os.close(descriptor)
        path.unlink()


def read_rate(folder: Path, part_bytes: int, step_bytes: int, count: int) -> float:
    """Bytes a second of plain O_DIRECT reads of `count` parts from the segments of a store, each `step_bytes` from the
    one before as records are; the better of four and six at once."""
    places = [
        (file, offset)
        for file in sorted(folder.glob("segment-*"))
        for offset in range(2 * PAGE_BYTES, file.stat().st_size - step_bytes, step_bytes)
    ]
    if not places:
        raise StressError(f"{folder} has no segments of {part_bytes} bytes and more")
    chosen = [places[i] for i in np.sort(np.random.default_rng(4).permutation(len(places))[:count])]
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {path for path, _ in chosen}}
    local = threading.local()

    def read(place: tuple[Path, int]) -> None:
        if not hasattr(local, "memory"):
            local.memory = page_buffer(part_bytes)
        _exact(os.preadv(files[place[0]], [local.memory], place[1]), part_bytes, "read")

    try:
        best = 0.0
        for threads in (IO_THREADS, IO_THREADS * 3 // 2):
            begin_s = time.perf_counter()
            _on_threads(read, chosen, threads)
            best = max(best, len(chosen) * part_bytes / (time.perf_counter() - begin_s))
        return best
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _exact(done: int, wanted: int, what: str) -> None:
    if done != wanted:
        raise StressError(f"a {what} of {wanted} bytes did {done}")


def _on_threads(work: Callable[[Any], None], items: Sequence[Any], threads: int) -> None:
    """Do all items, so many at once; the first failure is raised."""
    waiting, lock, failures = iter(items), threading.Lock(), list[BaseException]()

    def run() -> None:
        try:
            while not failures:
                with lock:
                    item = next(waiting, None)
                if item is None:
                    return
                work(item)
        except (OSError, StressError) as error:
            failures.append(error)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise StressError(f"a plain transfer failed: {failures[0]}") from failures[0]


class KernelAlone:
    """The attention kernel over memory: what compute takes when nothing has to be brought."""

    def __init__(self, content: Content, heads: int, threads: int, *, lossy: bool) -> None:
        shape = content.geometry
        self._shape, self._device = shape, HostAttention(threads)
        self._q = np.random.default_rng(5).standard_normal((1, heads, shape.k_dim)).astype(np.float32)
        self._memory = _parts(content, lossy=lossy)
        self._form: Geometry | EncodedLayout = EncodedLayout(shape) if lossy else shape
        self._lossy = lossy

    def seconds(self, blocks: int) -> float:
        """Of one layer over so many blocks; the better of two."""
        tokens = blocks * self._shape.block_size
        query = checked_query(self._q, self._shape, layer=0, length=tokens, available=tokens)
        which = np.arange(blocks, dtype=np.uint64) % np.uint64(len(self._memory))
        first = int(self._memory.ctypes.data) + which * np.uint64(self._memory.shape[1])
        scales = first + np.uint64(self._form.scales_offset) if isinstance(self._form, EncodedLayout) else 0
        parts = Blocks.make(
            first,
            tokens=self._shape.block_size,
            positions=np.arange(blocks) * self._shape.block_size,
            dtypes=CODED if self._lossy else DTYPE_CODES[self._shape.dtype],
            scales=scales,
        )
        return min(self._timed(query, parts) for _ in range(2))

    def _timed(self, query: Any, parts: Blocks) -> float:
        begin_s = time.perf_counter()
        partial = self._device.begin(query)
        for begin, end in self._device.pieces(query, parts):
            self._device.compute(partial, parts, begin, end)
        partial.result()
        return time.perf_counter() - begin_s


def _parts(content: Content, *, lossy: bool) -> Any:
    """Layer 0 of some blocks as it lies in a slot: exact, or in FP8."""
    shape = content.geometry
    exact = np.zeros((KERNEL_BLOCKS, shape.layer_stride), np.uint8)
    for number, row in zip(itertools.count(), exact, strict=False):
        content.fill_layer(BlockId(0, number), 0, *content.parts(row, 0))
    if not lossy:
        return exact
    codec = BlockCodec(shape)
    encoded = np.zeros((KERNEL_BLOCKS, codec.layout.layer_stride), np.uint8)
    block, target = np.zeros(shape.slot_bytes, np.uint8), np.zeros(codec.layout.slot_bytes, np.uint8)
    for row, out in zip(exact, encoded, strict=True):
        block[: shape.layer_stride] = row
        codec.encode(block, target, 0, 1)
        out[:] = target[: codec.layout.layer_stride]
    return encoded
