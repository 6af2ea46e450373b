"""`kvtierctl bench codec`: blocks of bf16 to FP8 with scales and errors, and back, against torch's casts and a copy.

8 KV heads, dim 128, 8 layers of 128 tokens: 4 MiB a block. Ours finds a scale for each head and records two errors a
head; torch casts the same elements to `float8_e4m3fn` and back without either, `x.to(dtype)` a block, and once more
into a tensor that is there already. As nothing keeps what `x.to(dtype)` returns, its memory is taken again for the next
block and stays in the cache; beside it each thread of ours encodes every block into one and the same target, too.
Beside the cast into a tensor for each block, ours encodes into a target for each block, past the caches. Both sides
have the same number of threads, each with a CPU of its own, and a working set of over four times the last-level cache
in huge pages. The copy is NumPy's, of the bf16 bytes. Every rate is of the bytes of bf16. Gather and scatter move the
same blocks out of and into an engine's cache of pages of 16 tokens in random order, K and V in one buffer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvtierd.bench.codec_tiers import tier_rows
from kvtierd.bench.copies import Threads, private_memory
from kvtierd.bench.options import Options, l3_bytes, need_memory, thread_count
from kvtierd.bench.placement import own_cpu, own_cpus
from kvtierd.bench.rounds import alternate, timed
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import from_fp32
from kvtierd.gpu.codec import BlockCodec
from kvtierd.gpu.paged import gather, scatter
from kvtierd.gpu.paged_layout import two_inside

SHAPE = Geometry(block_size=128, layers=8, kv_heads=8, k_dim=128, v_dim=128)
PAGE_TOKENS = 16
SETTLE_S = 0.05
"""Threads of OpenMP spin for some milliseconds after their work, which whoever is measured next would pay for."""
_CAST = "torch's plain cast, x.to(dtype) a block"
_INTO = "torch's cast into a tensor that is there"
_COPY = "NumPy's copy of the bf16 bytes, as many threads"


class Blocks:
    """Blocks of normal deviates, their FP8 form, and a place to decode to."""

    def __init__(self, count: int) -> None:
        self.codec, self.count = BlockCodec(SHAPE), count
        self.exact = private_memory(count * SHAPE.slot_bytes, 1, huge=True).reshape(count, -1)
        self.encoded = private_memory(count * self.codec.layout.slot_bytes, 2, huge=True).reshape(count, -1)
        self.back = private_memory(count * SHAPE.slot_bytes, 3, huge=True).reshape(count, -1)
        self._own = threading.local()
        numbers = np.random.default_rng(4).standard_normal(SHAPE.slot_bytes // 2, np.float32)
        self.exact[:] = from_fp32(numbers, "bf16").view(np.uint8)
        self.bytes = self.exact.nbytes
        rows = SHAPE.block_size // PAGE_TOKENS
        self.layouts = two_inside(SHAPE, PAGE_TOKENS)
        pages = np.random.default_rng(5).permutation(count * rows)
        self.tables = pages.astype(np.int64).reshape(count, rows)
        self.engine = private_memory(self.bytes, 6, huge=True).reshape(SHAPE.layers, -1)

    def encode(self, threads: Threads) -> None:
        """Encode all, every thread into a target of its own that it uses again for each block."""

        def share(begin: int, end: int) -> None:
            target = self._target()
            for block in range(begin, end):
                self.codec.encode(self.exact[block], target)

        threads.each(share, self.count)

    def encode_apart(self, threads: Threads) -> None:
        """Encode all, every block into a target of its own, which is not in a cache and need not come into one."""
        encode = functools.partial(self.codec.encode, past_caches=True)
        self._share(threads, encode, self.exact, self.encoded)

    def _target(self) -> Bytes:
        """This thread's."""
        target: Bytes | None = getattr(self._own, "target", None)
        if target is None:
            target = self._own.target = private_memory(self.codec.layout.slot_bytes, 7, huge=True)
        return target

    def decode(self, threads: Threads) -> None:
        """Decode all."""
        self._share(threads, self.codec.decode, self.encoded, self.back)

    def copy(self, threads: Threads) -> None:
        """Copy the exact form."""
        threads.copy(list(self.exact), list(self.back))

    def gather(self, threads: Threads) -> None:
        """Fill the blocks from an engine's pages."""
        self._pages(threads, gather)

    def scatter(self, threads: Threads) -> None:
        """Copy the blocks into an engine's pages."""
        self._pages(threads, scatter)

    def _pages(self, threads: Threads, work: Callable[..., None]) -> None:
        def share(begin: int, end: int) -> None:
            for block in range(begin, end):
                for layer in range(SHAPE.layers):
                    engine = self.engine[layer]
                    work(SHAPE, self.back[block], layer, (engine, engine), self.layouts, self.tables[block])

        threads.each(share, self.count)

    def _share(self, threads: Threads, work: Callable[[Bytes, Bytes], None], source: Bytes, target: Bytes) -> None:
        def share(begin: int, end: int) -> None:
            for block in range(begin, end):
                work(source[block], target[block])

        threads.each(share, self.count)


class Torch:
    """The same bytes as torch's tensors, one a block, cast by torch's own threads."""

    def __init__(self, blocks: Blocks, threads: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        self._small = self._torch.float8_e4m3fn
        self._exact = [self._tensor(block) for block in blocks.exact]
        self._codes: list[Any] = []
        self._back = [self._tensor(block) for block in blocks.back]

    def start(self) -> None:
        """Cast everything once: threads start, and there is memory to cast into."""
        self._codes = [tensor.to(self._small) for tensor in self._exact]

    def _tensor(self, block: Bytes) -> Any:
        return self._torch.from_numpy(block).view(self._torch.bfloat16)

    def encode(self) -> None:
        """Cast every block to a tensor of its own."""
        for tensor in self._exact:
            tensor.to(self._small)

    def encode_into(self) -> None:
        """Cast every block into memory that is there."""
        for tensor, codes in zip(self._exact, self._codes, strict=True):
            codes.copy_(tensor)

    def decode(self) -> None:
        """Cast every block's codes to a tensor of its own."""
        for codes in self._codes:
            codes.to(self._torch.bfloat16)

    def decode_into(self) -> None:
        """Cast every block's codes into memory that is there."""
        for codes, tensor in zip(self._codes, self._back, strict=True):
            tensor.copy_(codes)


def rows(options: Options) -> Iterator[Row]:
    """Measure both directions. Raises BenchError where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise BenchError("the codec's reference is torch: pip install 'kvtierd[demo]'")
    count = 4 * l3_bytes() // SHAPE.slot_bytes + 1
    need_memory(8 * count * SHAPE.slot_bytes)
    yield from rows_of(count, options.rounds(11, 5), thread_count())
    yield from tier_rows(options, SHAPE)


def rows_of(count: int, rounds: int, thread_count: int) -> Iterator[Row]:
    """The rows over so many blocks."""
    threads, cpus = Threads(thread_count), os.sched_getaffinity(0)
    try:
        blocks = Blocks(count)
        with own_cpus(cpus, caller_joins=False):
            blocks.encode_apart(threads)
        torch = Torch(blocks, threads.count)
        with own_cpus(cpus, caller_joins=True):
            torch.start()
        with own_cpu():
            yield from _rows(blocks, torch, threads, rounds)
    finally:
        threads.close()


def _rows(blocks: Blocks, torch: Torch, threads: Threads, rounds: int) -> Iterator[Row]:
    works: tuple[Callable[[], None], ...] = (
        lambda: blocks.encode(threads),
        torch.encode,
        lambda: blocks.encode_apart(threads),
        torch.encode_into,
        lambda: blocks.copy(threads),
        lambda: blocks.decode(threads),
        torch.decode,
        torch.decode_into,
        lambda: blocks.gather(threads),
        lambda: blocks.scatter(threads),
    )

    def rate(work: Callable[[], None]) -> float:
        seconds = timed(work)
        time.sleep(SETTLE_S)
        return blocks.bytes / seconds / 1e9

    rates = alternate([functools.partial(rate, work) for work in works], rounds)
    encode, cast, apart, cast_into, copy, decode, back, back_into, gathered, scattered = rates
    yield _row("encode bf16 to FP8 with scales and errors", encode, cast, _CAST, ">= 3.5")
    yield _row("the same, into a target for each block", apart, cast_into, _INTO)
    yield _row("the same, into a target for each block", apart, copy, _COPY, ">= 0.4")
    yield _row("decode FP8 to bf16", decode, back, _CAST, ">= 12")
    yield _row("decode FP8 to bf16", decode, back_into, _INTO)
    yield _row("decode FP8 to bf16", decode, copy, _COPY, ">= 0.4")
    yield _row("gather from pages of 16 tokens", gathered, copy, _COPY)
    yield _row("scatter to pages of 16 tokens", scattered, copy, _COPY)
    yield make_row("codec", "relative L2 error, normal deviates", float(_error(blocks)), "")


def _error(blocks: Blocks) -> float:
    return float(np.median([blocks.codec.relative_l2(encoded).max() for encoded in blocks.encoded]))


def _row(metric: str, value: float, reference: float, name: str, goal: str = "") -> Row:
    return make_row("codec", metric, value, "GB/s", reference=reference, reference_name=name, goal=goal)
