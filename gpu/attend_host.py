"""Attention over blocks in host memory, on the CPUs: scratch, pieces and carried state around the compiled kernels."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import rotation
from kvtierd.core.units import MIB, align_up
from kvtierd.gpu.attend import CODED, Array, Blocks, Query, from_fp32, rotated, to_fp32
from kvtierd.gpu.host_kernels.attention import GROUP_ROWS, attend_chunks, merge_chunks
from kvtierd.gpu.host_kernels.attention_run import RAW_QUERY, SPARE_ROWS, TILE, Shape
from kvtierd.gpu.host_kernels.attention_vectors import LANES

PIECE_NS = 5_000_000
"""How long a piece of work may take before somebody is asked whether it is still wanted (DESIGN §4)."""
_AIM_NS = 4_000_000
"""What is planned for a piece, because some take longer than those before."""
ROWS_AT_ONCE = 256
"""Query rows of a KV head in one pass over the blocks. With more, arithmetic takes so much longer than reading that
reading again costs nothing, and what is carried fits the second-level cache."""

_CHUNK_WORK = 1 << 22
"""Work of a chunk: elements of KV times the passes of 4 rows over them; some 0.4 ms of one thread. Fixed, because the
result must not depend on how fast this machine is."""
_PARTIALS_BYTES = 32 * MIB
"""Bound on what chunks of one piece carry until they are merged."""
_FIRST_GUESS_NS = 0.1
"""Nanoseconds of one thread for a unit of work, until there is a measurement."""
_FORGET = 1.02
"""By how much a measurement ages with each that is slower."""
_LN_2 = math.log(2.0)
_RAW_QUERY_MIN, _RAW_QUERY_MAX = 2.0**-32, 2.0**40
"""Largest magnitudes of a query with which e4m3 may stay small in registers."""


@dataclasses.dataclass(slots=True)
class _Pass:
    """Queries that go over the blocks together: their vectors as the kernel wants them, and what is carried."""

    shape: Shape
    q: Array
    """float32 [forms, vectors]: `kvtierd.gpu.host_kernels.attention.attend_chunks`. Rotated ones only once blocks that
    the codec made are among those asked for."""
    spread: int
    raw: bool
    top: Array
    total: Array
    sums: Array

    def rotate(self) -> None:
        """Have the rotated forms, where the codec rotates keys at all."""
        if self.spread > 1 and len(self.q) == 2:
            vectors = self.q[0].reshape(self.top.size, -1)[:, : self.shape.k_dim]
            with np.errstate(over="ignore", invalid="ignore"):  # a query may hold Inf
                self.q = np.concatenate([self.q, _forms(rotated(vectors, self.spread))])


class HostPartial:
    """An answer in the making: use `HostAttention.compute` to add to it, and `result` when all is added.

    Not to be added to by two threads at once.
    """

    def __init__(self, query: Query) -> None:
        self.query = query
        step = max(1, ROWS_AT_ONCE // query.group)
        self.passes = [_make_pass(query, at, step) for at in range(0, query.q.shape[0], step)]
        self.soft_cap = np.float32(query.soft_cap / _LN_2)

    def result(self, dtype: str = "fp32") -> tuple[Array, Array]:
        """Output [queries, heads, v_dim] of that dtype and the natural log-sum-exp, float32 [queries, heads]."""
        parts = [_finished(part, self.query) for part in self.passes]
        output = np.concatenate([output for output, _ in parts])
        return from_fp32(output, dtype), np.concatenate([lse for _, lse in parts])


def thread_limit() -> int:
    """Most threads that a call can use."""
    settings: Any = numba.config
    return int(settings.NUMBA_NUM_THREADS)


class HostAttention:
    """Computes on `threads` of Numba's threads (all by default). Safe to use from several threads at once.

    Numba shares one set of threads: calls at the same time share the CPUs, and each keeps scratch of its own.
    """

    def __init__(self, threads: int = 0) -> None:
        limit = thread_limit()
        if not 0 <= threads <= limit:
            raise ValueError(f"threads is {threads}; it must be in 0..{limit}, 0 for all of them")
        self.threads = threads or limit
        self._scratch = threading.local()
        self._unit_ns = _FIRST_GUESS_NS / self.threads

    def adopt(self, memory: Array) -> None:
        """All host memory is alike."""

    def to_prepare(self, geometry: Geometry, *, lossy: bool) -> list[Callable[[], None]]:  # noqa: ARG002
        """Nothing: the kernels are loaded with this module."""
        return []

    def stop_preparing(self) -> None:
        """Nothing is under way."""

    def begin(self, query: Query) -> HostPartial:
        """Carry nothing yet."""
        return HostPartial(query)

    def pieces(self, query: Query, blocks: Blocks) -> Iterator[tuple[int, int]]:
        """Ranges of blocks, in order, each within `PIECE_NS` as measured so far; at least one chunk of work each."""
        if (total := _work_a_token(query) * blocks.token_count) <= min(_CHUNK_WORK, int(_AIM_NS / self._unit_ns)):
            if total:
                yield 0, len(blocks)
            return
        bounds = _chunk_bounds(query, blocks)
        work = _work_a_token(query) * np.concatenate([[0], np.cumsum(blocks.tokens, dtype=np.int64)])
        at = 0
        while at < bounds.size - 1:
            limit = work[bounds[at]] + _AIM_NS / self._unit_ns
            after = int(np.searchsorted(work[bounds], limit, side="right")) - 1
            after = min(max(after, at + 1), at + _chunks_at_once(query))
            yield int(bounds[at]), int(bounds[after])
            at = after

    def work_of_one(self, query: Query, blocks: Blocks) -> int:
        """Work of blocks that are one chunk, which one thread computes; 0 where there are more."""
        work = _work_a_token(query) * blocks.token_count
        return work if work <= _CHUNK_WORK else 0

    def compute(
        self, partial: HostPartial, blocks: Blocks, begin: int = 0, end: int | None = None, cancel: Array | None = None
    ) -> bool:
        """Add blocks begin..end (all of them by default); False where `cancel` stopped it, and the partial is void.

        cancel: uint8 [1], which another thread may set to 1; it is looked at before every chunk.
        """
        end = len(blocks) if end is None else end
        some = blocks.take(slice(begin, end))
        stop = np.zeros(1, np.uint8) if cancel is None else cancel
        # Chunks are those of all blocks, however they are cut into pieces: how sums are grouped must not depend on it.
        bounds = _chunk_bounds(partial.query, blocks)
        bounds = np.array([begin, *bounds[(bounds > begin) & (bounds < end)].tolist(), end], bounds.dtype) - begin
        if end <= begin:
            return True
        columns = (some.addresses, some.scales, some.dtypes, some.positions, some.tokens)
        begin_ns = time.perf_counter_ns()
        step = _chunks_at_once(partial.query)
        coded = bool((some.dtypes == CODED).any())
        for part in partial.passes:
            if coded:
                part.rotate()
            for at in range(0, bounds.size - 1, step):
                if not self._run(part, partial.soft_cap, columns, bounds[at : at + step + 1], stop):
                    return False
        self._learn(partial.query, some.token_count, time.perf_counter_ns() - begin_ns)
        return True

    def _run(self, part: _Pass, cap: Any, columns: tuple[Array, ...], bounds: Array, stop: Array) -> bool:
        chunks, rows = bounds.size - 1, part.top.size
        # Threads without a chunk would be woken, and waited for, for nothing.
        threads = min(self.threads, chunks)
        tops, totals = np.empty((chunks, rows), np.float32), np.empty((chunks, rows), np.float32)
        sums = self._buffer("sums", (chunks, *part.sums.shape))
        scores = self._buffer("scores", (threads, part.shape.heads * GROUP_ROWS * TILE))
        dim = align_up(max(part.shape.k_dim, part.shape.v_dim), LANES)
        spare = self._buffer("spare", (threads, SPARE_ROWS * dim))
        counter, done = np.zeros(1, np.int64), np.zeros(chunks, np.uint8)
        numba.set_num_threads(threads)
        attend_chunks(
            part.shape, cap, part.q, part.raw, columns, np.ascontiguousarray(bounds),
            tops, totals, sums, scores, spare, counter, done, stop,
        )  # fmt: skip
        if not done.all():
            return False
        merge_chunks(tops, totals, sums, part.top, part.total, part.sums)
        return True

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Array:
        """Scratch of this thread, made larger when it has to be and kept."""
        count = math.prod(shape)
        kept = getattr(self._scratch, name, None)
        if kept is None or kept.size < count:
            kept = np.empty(count, np.float32)
            setattr(self._scratch, name, kept)
        return kept[:count].reshape(shape)

    def _learn(self, query: Query, tokens: int, took_ns: int) -> None:
        # The best of late, not the mean: a piece that waited for a CPU would make those after it smaller, of which
        # then nothing but the waiting would be left.
        work = tokens * _work_a_token(query)
        if work >= _CHUNK_WORK:
            self._unit_ns = min(took_ns / work, self._unit_ns * _FORGET)


def _work_a_token(query: Query) -> int:
    elements = query.geometry.kv_heads * (query.geometry.k_dim + query.values_dim)
    return elements * -(-query.rows // 4)


def _chunk_bounds(query: Query, blocks: Blocks) -> Array:
    """Cut blocks into chunks of about `_CHUNK_WORK`, whatever the machine; int64 [chunks + 1]."""
    work = _work_a_token(query) * np.cumsum(blocks.tokens, dtype=np.int64)
    numbers = (work - 1) // _CHUNK_WORK
    last = np.flatnonzero(np.diff(numbers, append=numbers[-1] + 1 if numbers.size else 0))
    return np.concatenate([[0], last + 1]).astype(np.int64)


def _chunks_at_once(query: Query) -> int:
    rows = min(query.rows, max(ROWS_AT_ONCE, query.group))
    return max(2, _PARTIALS_BYTES // (query.geometry.kv_heads * rows * align_up(query.values_dim, LANES) * 4))


def _forms(vectors: Array) -> Array:
    """Vectors [rows, k_dim] padded for the kernel, as they are and times RAW_QUERY: float32 [2, all]."""
    q = np.zeros((2, len(vectors), align_up(vectors.shape[1], LANES)), np.float32)
    q[0, :, : vectors.shape[1]] = vectors
    np.multiply(q[0], np.float32(RAW_QUERY), out=q[1])
    return q.reshape(2, -1)


def _make_pass(query: Query, first: int, count: int) -> _Pass:
    shape = _shape_of(query, first, min(count, query.q.shape[0] - first))
    vectors = to_fp32(query.q[first : first + shape.queries])
    unit = query.soft_cap or _LN_2
    with np.errstate(over="ignore", invalid="ignore"):
        vectors = vectors * np.float32(query.scale / unit)
        size = float(np.abs(vectors).max(initial=0.0))
        vectors = vectors.reshape(shape.queries, shape.heads, shape.group, shape.k_dim).transpose(1, 0, 2, 3)
        rows = shape.heads * shape.queries * shape.group
        forms = _forms(vectors.reshape(rows, shape.k_dim))
    return _Pass(
        shape=shape,
        q=forms,
        spread=rotation(query.geometry),
        raw=size == 0 or _RAW_QUERY_MIN <= size <= _RAW_QUERY_MAX,
        top=np.full(rows, -np.inf, np.float32),
        total=np.zeros(rows, np.float32),
        sums=np.zeros((rows, align_up(shape.v_dim, LANES)), np.float32),
    )


def _shape_of(query: Query, first: int, count: int) -> Shape:
    g = query.geometry
    latent = g.v_dim == 0
    value_dim = g.k_dim if latent else g.v_dim  # distance of values: a latent's lie inside its keys
    by_token = g.layout == "nhd"
    return Shape(
        heads=g.kv_heads,
        group=query.group,
        queries=count,
        position=query.position + first,
        window=query.window,
        k_dim=g.k_dim,
        v_dim=query.values_dim,
        k_token=g.kv_heads * g.k_dim if by_token else g.k_dim,
        k_head=g.k_dim if by_token else g.block_size * g.k_dim,
        v_token=g.kv_heads * value_dim if by_token else value_dim,
        v_head=value_dim if by_token else g.block_size * value_dim,
        v_start=0 if latent else g.block_size * g.kv_heads * g.k_dim,
        v_scale=0 if latent else g.kv_heads,
    )


def _finished(part: _Pass, query: Query) -> tuple[Array, Array]:
    """Output [queries, heads, v_dim] and natural log-sum-exp [queries, heads] of a pass, in float32."""
    shape = part.shape
    top, total, sums = part.top, part.total, part.sums[:, : shape.v_dim]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if query.sinks is not None:
            by_head = (query.sinks / np.float32(_LN_2)).reshape(shape.heads, 1, shape.group)
            sinks = np.broadcast_to(by_head, (shape.heads, shape.queries, shape.group)).reshape(-1)
            highest = np.maximum(top, sinks)
            shrink = np.where(top == highest, np.float32(1.0), np.exp2(top - highest))
            total = total * shrink + np.where(np.isneginf(sinks), np.float32(0.0), np.exp2(sinks - highest))
            top, sums = highest, sums * shrink[:, None]
        output = np.where(total[:, None] == 0, np.float32(0.0), sums / total[:, None])
        lse = np.where(total == 0, np.float32(-np.inf), (top + np.log2(total)) * np.float32(_LN_2))
    heads = shape.heads * shape.group
    order = (shape.heads, shape.queries, shape.group)
    output = output.reshape(*order, shape.v_dim).transpose(1, 0, 2, 3).reshape(shape.queries, heads, shape.v_dim)
    return output, lse.reshape(order).transpose(1, 0, 2).reshape(shape.queries, heads)
