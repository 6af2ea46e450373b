"""`kvtierctl bench attention`: one query over 64k tokens of KV, against torch on contiguous KV and a plain read of it.

32 query heads, 8 KV heads, dim 128, blocks of 128 tokens that lie apart from each other, as slots of a pool do. Ours
runs piece by piece as the tiers run it. torch gets what suits it best: KV of all tokens contiguous by head, and two
formulations, its scaled_dot_product_attention and matmul, softmax, matmul. Both sides have the same number of threads,
each with a CPU of its own, and KV in huge pages, which NumPy's and torch's large arrays have anyway.
The streaming read is NumPy's maximum of the same bytes, as many threads. FP8 blocks are what the codec makes of the
bf16 ones. All of it is larger than the last-level cache.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvtierd.bench.copies import Threads, private_memory
from kvtierd.bench.options import Options, need_memory, thread_count
from kvtierd.bench.placement import own_cpu, own_cpus
from kvtierd.bench.rounds import alternate, timed
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import CODED, DTYPE_CODES, Blocks, Query, checked_query, from_fp32
from kvtierd.gpu.attend_host import PIECE_NS, HostAttention
from kvtierd.gpu.codec import BlockCodec

Array = np.ndarray[Any, Any]

TOKENS = 65_536
SHAPE = Geometry(block_size=128, layers=1, kv_heads=8, k_dim=128, v_dim=128)
HEADS = 32
_SETTLE_S = 0.1
"""Threads of OpenMP spin for some milliseconds after their work, which whoever is measured next would pay for."""
_SDPA = "torch's scaled_dot_product_attention, contiguous KV"
_MATMUL = "torch's matmul, softmax, matmul, contiguous KV"
_READ = "NumPy's maximum of the same bytes, as many threads"


class Kv:
    """Blocks of bf16 and of FP8 with the same content (normal deviates) and a query for them."""

    def __init__(self, tokens: int) -> None:
        count = tokens // SHAPE.block_size
        self.exact = private_memory(count * SHAPE.slot_bytes, seed=1, huge=True)
        codec = BlockCodec(SHAPE)
        self.small = private_memory(count * codec.layout.slot_bytes, seed=2, huge=True)
        rng = np.random.default_rng(3)
        for index in range(count):
            block = self.exact[index * SHAPE.slot_bytes :][: SHAPE.slot_bytes]
            numbers = rng.standard_normal(SHAPE.layer_bytes // 2, np.float32)
            block[: SHAPE.layer_bytes] = from_fp32(numbers, "bf16").view(np.uint8)
            codec.encode(block, self.small[index * codec.layout.slot_bytes :][: codec.layout.slot_bytes])
        shuffled = rng.permutation(count)  # slots of a pool are in no order
        positions = shuffled * SHAPE.block_size
        self.bf16 = self._blocks(self.exact, SHAPE.slot_bytes, shuffled, positions, DTYPE_CODES["bf16"], 0)
        offset = codec.layout.scales_offset
        self.fp8 = self._blocks(self.small, codec.layout.slot_bytes, shuffled, positions, CODED, offset)
        q = rng.standard_normal((1, HEADS, SHAPE.k_dim), np.float32)
        self.query = checked_query(q, SHAPE, layer=0, length=tokens, available=tokens)
        self.kv_bytes = count * SHAPE.layer_bytes

    @staticmethod
    def _blocks(memory: Array, stride: int, order: Array, positions: Array, dtype: int, scales: int) -> Blocks:
        addresses = memory.ctypes.data + order * stride
        return Blocks.make(
            addresses,
            tokens=SHAPE.block_size,
            positions=positions,
            dtypes=dtype,
            scales=addresses + scales if scales else 0,
        )


class Ours:
    """Attention as the tiers run it."""

    def __init__(self, query: Query, threads: int) -> None:
        self._query, self._device = query, HostAttention(threads)
        self.longest_piece_ns = 0

    def run(self, blocks: Blocks) -> tuple[Array, Array]:
        """Output and log-sum-exp, in pieces."""
        partial = self._device.begin(self._query)
        self.longest_piece_ns = 0
        for begin, end in self._device.pieces(self._query, blocks):
            begin_ns = time.perf_counter_ns()
            self._device.compute(partial, blocks, begin, end)
            self.longest_piece_ns = max(self.longest_piece_ns, time.perf_counter_ns() - begin_ns)
        return partial.result()


class Torch:
    """The same by torch, which gets K and V as [kv_heads, tokens, dim] without gaps."""

    def __init__(self, kv: Kv, threads: int) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the daemon has it; read when torch is loaded
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        blocks = kv.exact.reshape(-1, SHAPE.slot_bytes)[:, : SHAPE.layer_bytes]
        parts = blocks.view(np.uint16).reshape(-1, 2, SHAPE.block_size, SHAPE.kv_heads, SHAPE.k_dim)
        self._k, self._v = (self._contiguous(parts[:, which]) for which in (0, 1))
        query = self._torch.from_numpy(kv.query.q[0]).to(self._torch.bfloat16)
        self._q = query.reshape(SHAPE.kv_heads, HEADS // SHAPE.kv_heads, SHAPE.k_dim)
        self._scale = kv.query.scale

    def _contiguous(self, part: Array) -> Any:
        by_head = np.ascontiguousarray(part.transpose(2, 0, 1, 3)).reshape(SHAPE.kv_heads, -1, SHAPE.k_dim)
        return self._torch.from_numpy(by_head).view(self._torch.bfloat16)

    def sdpa(self) -> Any:
        """[1, heads, 1, dim]."""
        attention = self._torch.nn.functional.scaled_dot_product_attention
        q = self._q.reshape(1, HEADS, 1, SHAPE.k_dim)
        with self._torch.inference_mode():
            return attention(q, self._k[None], self._v[None], scale=self._scale, enable_gqa=True)

    def matmul(self) -> Any:
        """[kv_heads, group, dim]."""
        with self._torch.inference_mode():
            scores = self._torch.matmul(self._q, self._k.transpose(1, 2)).float() * self._scale
            return self._torch.matmul(scores.softmax(-1).to(self._torch.bfloat16), self._v)


def rows(options: Options) -> Iterator[Row]:
    """Measure ours against torch and against reading. Raises BenchError where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise BenchError("the bench of attention needs torch as its reference: pip install 'kvtierd[transformers]'")
    tokens = TOKENS // 4 if options.quick else TOKENS
    need_memory(4 * tokens * SHAPE.layer_bytes // SHAPE.block_size)
    yield from rows_of(tokens, options.rounds(9, 5), thread_count(), with_torch=True)


def rows_of(tokens: int, rounds: int, threads: int, *, with_torch: bool) -> Iterator[Row]:
    """The rows; without torch only those against the streaming read."""
    kv, cpus = Kv(tokens), os.sched_getaffinity(0)
    ours, reader = Ours(kv.query, threads), Threads(threads)
    measures: list[Callable[[], object]] = [
        lambda: _read(reader, kv.exact),
        lambda: ours.run(kv.bf16),
        lambda: ours.run(kv.fp8),
    ]
    if with_torch:
        torch = Torch(kv, threads)
        measures += [torch.sdpa, torch.matmul]
    try:
        for index, start in enumerate(measures):  # the reader's threads work without this one, OpenMP's with it
            with own_cpus(cpus, caller_joins=index > 0):
                start()
        with own_cpu():
            seconds = alternate([functools.partial(_settled, work) for work in measures], rounds)
            ours.run(kv.bf16)
    finally:
        reader.close()
    yield from _rows(kv, seconds, ours.longest_piece_ns)


def _rows(kv: Kv, seconds: list[float], longest_piece_ns: int) -> Iterator[Row]:
    read, bf16, fp8, *torch = seconds
    rate = kv.kv_bytes / bf16 / 1e9
    what = f"bf16 KV, {kv.query.q.shape[1]} query and {SHAPE.kv_heads} KV heads, dim {SHAPE.k_dim}"
    if torch:
        sdpa, matmul = (kv.kv_bytes / second / 1e9 for second in torch)
        best, name = max((sdpa, _SDPA), (matmul, _MATMUL))
        yield make_row("attention", what, rate, "GB/s", reference=best, reference_name=name, goal=">= 2")
        yield make_row("attention", what, rate, "GB/s", reference=sdpa, reference_name=_SDPA, goal=">= 10")
    plain = kv.exact.nbytes / read / 1e9
    yield make_row("attention", what, rate, "GB/s", reference=plain, reference_name=_READ, goal=">= 0.5")
    ms = "the same from FP8 blocks"
    yield make_row("attention", ms, fp8 * 1e3, "ms", reference=bf16 * 1e3, reference_name="bf16 blocks", goal="<= 1.0")
    longest = longest_piece_ns / 1e6
    yield make_row("attention", f"longest piece of work (planned: {PIECE_NS / 1e6:.0f})", longest, "ms")


def _settled(work: Callable[[], object]) -> float:
    """Seconds of one call; what comes next begins when the threads of this one have stopped spinning."""
    seconds = timed(work)
    time.sleep(_SETTLE_S)
    return seconds


def _read(reader: Threads, memory: Array) -> None:
    words = memory.view(np.int64)
    reader.each(lambda begin, end: words[begin:end].max(), words.size)
