"""Attention on a GPU over blocks in any tier: blocks in the pool in place, blocks in host memory over the bus.

What is carried between calls lies in host memory, in the very form in which the CPU's attention carries it: it goes up
with a call, kernels add splits to it one after the other, and it comes back at the end. That is some tens of KiB for a
decode step, so nothing of a request rests on the GPU between two calls, and one that fails, is cancelled or loses its
client leaves nothing there. What no kernel is compiled for is left to the CPU, with the same carried state.

How bytes in host memory are reached (`_reads_once`): a thread block has its query heads at one position and reads what
they need. Where only one of them needs a byte, the kernel reads it over the bus itself, from memory that is mapped
(zero copy): no copy is made, none is waited for. Where several do (more queries, more query heads of a KV head than a
thread block takes, values cut into parts, a latent whose values are its keys), the byte would cross the bus as often;
then it is copied once into one of two buffers on the device, while what is in the other is computed. Memory that is not
registered takes that way too.

None of this has run on a GPU yet: tests run it over a stand-in for CUDA with the kernels in Numba's simulator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB, align_up
from kvtierd.gpu.attend import CODED, DTYPE_CODES, Array, AttentionDevice, Blocks, Query
from kvtierd.gpu.cuda_interface import CudaError, View
from kvtierd.gpu.cuda_partial import CudaPartial, Pass, Queries
from kvtierd.gpu.cuda_scratch import ALIGNMENT, Mirror, Room
from kvtierd.gpu.kernels.attention import (
    MERGE,
    Variant,
    choose,
    describe,
    has_kernels,
    kernel_for,
    kernels_for,
    tiles_of,
)
from kvtierd.gpu.kernels.attention_common import Q_EXPONENT, WIDTHS

if TYPE_CHECKING:
    from kvtierd.gpu.cuda_device import CudaDevice
    from kvtierd.gpu.kernels.registry import Kernel

STAGE_BYTES = 16 * MIB
"""Of each of the two buffers for host memory: a third of a millisecond of the bus, many times what a copy's start
takes."""
PARTIALS_BYTES = 32 * MIB
"""What the splits of one launch may leave on the device until they are merged."""
BLOCKS_A_MULTIPROCESSOR = 4
"""Thread blocks of a launch: two of them fit at once, and the next two take their place one by one."""
PIECE_NS = 4_000_000
"""What is planned for a piece of work (kvtierd.gpu.attend_host)."""
_POOL_NS, _BUS_NS = 1e-3, 4e-2
"""Nanoseconds a byte, of device memory and of the bus, until there is a measurement: slow ones."""
_FORGET = 1.02
"""By how much the measured pace ages with each that is slower."""
_LEARN_NS = 1_000_000
"""Shorter pieces say more of the start of a kernel than of its pace."""
_NAMES = {code: name for name, code in DTYPE_CODES.items()} | {CODED: "fp8_e4m3"}


class CudaAttention:
    """Computes on one GPU. Safe to use from several threads: their calls run one after the other."""

    def __init__(self, device: CudaDevice, on_host: AttentionDevice) -> None:
        self._device, self._on_host, self._runtime = device, on_host, device.runtime
        self._lock = threading.Lock()
        self._mirror = Mirror(device)
        self._partials, self._stages = Room(device), Room(device)
        self._wanted = BLOCKS_A_MULTIPROCESSOR * device.runtime.multiprocessors(device.gpu)
        self._pace = 1.0
        self._prepared: set[str] = set()

    def adopt(self, memory: Array) -> None:
        """Pin the memory, so that the GPU reads it in place; until the device is closed."""
        self._device.register_host(memory)

    def to_prepare(self, geometry: Geometry, *, lossy: bool) -> list[Callable[[], None]]:
        """Compiling in a process of its own, and loading, each kernel that is not loaded yet, of all that a group of
        query heads may call for."""
        wanted = [kernel for kernel in kernels_for(geometry, lossy=lossy) if kernel.name not in self._prepared]
        if not wanted:
            return []
        apart = functools.partial(self._runtime.compile_apart, self._device.gpu, wanted)
        return [apart, *(functools.partial(self._prepare, kernel) for kernel in wanted)]

    def stop_preparing(self) -> None:
        """End the process that compiles."""
        self._runtime.stop_compiling()

    def _prepare(self, kernel: Kernel) -> None:
        self._runtime.prepare(self._device.gpu, kernel)
        self._prepared.add(kernel.name)

    def begin(self, query: Query) -> CudaPartial:
        """Carry nothing yet."""
        return CudaPartial(query, self._on_host.begin(query))

    def pieces(self, query: Query, blocks: Blocks) -> Iterator[tuple[int, int]]:
        """Ranges of blocks, in order, each of about `PIECE_NS` as measured so far; at least one block each."""
        if not _has_kernels(query):
            yield from self._on_host.pieces(query, blocks)
            return
        ends = np.cumsum(self._expected_ns(query, blocks)) * self._pace
        at = 0
        while at < len(blocks):
            limit = (ends[at - 1] if at else 0.0) + PIECE_NS
            after = max(at + 1, int(np.searchsorted(ends, limit, side="right")))
            yield at, after
            at = after

    def work_of_one(self, query: Query, blocks: Blocks) -> int:
        """A GPU is no single processor: 0, but for what is left to the CPU."""
        return 0 if _has_kernels(query) else self._on_host.work_of_one(query, blocks)

    def compute(self, partial: CudaPartial, blocks: Blocks, begin: int = 0, end: int | None = None) -> bool:
        """Add blocks begin..end; nothing reads them any more when it returns. Raises CudaError: the partial is void."""
        some = blocks.take(slice(begin, len(blocks) if end is None else end))
        if not len(some):
            return True
        if not _has_kernels(partial.query):
            return self._compute_on_host(partial, some)
        with self._lock:
            begin_ns = time.perf_counter_ns()
            try:
                self._compute(partial, some)
            except BaseException:
                self._settle()
                raise
            finally:
                self._mirror.reset()
            self._learn(self._expected_ns(partial.query, some).sum(), time.perf_counter_ns() - begin_ns)
        return True

    def close(self) -> None:
        """Give the device memory back. Nothing may compute any more."""
        for part in (self._mirror, self._partials, self._stages):
            part.close()

    def _compute(self, partial: CudaPartial, some: Blocks) -> None:
        device, runtime = self._device, self._runtime
        carried = [self._mirror.put((p.state.top, p.state.total, p.state.sums), device.compute) for p in partial.passes]
        queries = Queries(self._mirror, device.compute, partial.passes)
        sizes = _part_bytes(partial.query, some)
        where = self._where(partial.query, some, sizes)
        there = np.flatnonzero(where)
        self._launch_all(partial, _moved(some.take(there), where[there]), queries, carried)
        self._copied(partial, some, sizes, np.flatnonzero(where == 0), queries, carried)
        for views in carried:
            self._mirror.fetch(views, device.compute)
        runtime.wait(device.gpu, device.compute)
        for part, views in zip(partial.passes, carried, strict=True):
            state = part.state
            for target, view in zip((state.top, state.total, state.sums), views, strict=True):
                target[...] = self._mirror.here(view).reshape(target.shape)

    def _where(self, query: Query, blocks: Blocks, sizes: Array) -> Array:
        """Addresses at which kernels read these blocks in place; 0 for those that are to be copied first."""
        in_pool = self._in_pool(blocks)
        found = np.where(in_pool, blocks.addresses, np.uint64(0))
        for code in np.unique(blocks.dtypes[~in_pool]).tolist():
            if _reads_once(query, _variant(query, code)):
                mine = np.flatnonzero(~in_pool & (blocks.dtypes == code))
                found[mine] = self._device.mapped(blocks.addresses[mine], sizes[mine])
        return found

    def _copied(
        self, partial: CudaPartial, blocks: Blocks, sizes: Array, which: Array, queries: Queries, carried: list[Any]
    ) -> None:
        """Copy blocks into the two buffers in turn, and compute what is in one while the other is filled."""
        if not which.size:
            return
        device, runtime, gpu = self._device, self._runtime, self._device.gpu
        aligned = -(-sizes[which].astype(np.int64) // ALIGNMENT) * ALIGNMENT
        half = max(min(STAGE_BYTES, int(aligned.sum())), int(aligned.max()))
        stages = self._stages.need(2 * half)
        free: list[Any] = [None, None]
        for turn, (first, end) in enumerate(_batches(aligned, half)):
            side, batch = turn % 2, which[first:end]
            begins = stages + side * half + np.cumsum(aligned[first:end]) - aligned[first:end]
            if (done := free[side]) is not None:
                runtime.follow(gpu, device.to_device, done)
            for target, source, count in zip(
                begins.tolist(), blocks.addresses[batch].tolist(), sizes[batch].tolist(), strict=True
            ):
                device.begin_copy(target, source, count, device.to_device, inwards=True)
            runtime.follow(gpu, device.compute, runtime.record(gpu, device.to_device))
            self._launch_all(partial, _moved(blocks.take(batch), begins.astype(np.uint64)), queries, carried)
            free[side] = runtime.record(gpu, device.compute)

    def _launch_all(self, partial: CudaPartial, blocks: Blocks, queries: Queries, carried: list[Any]) -> None:
        """Add blocks at addresses of the device to what is carried: dtype by dtype, pass by pass."""
        for code in np.unique(blocks.dtypes).tolist():
            mine = blocks.take(blocks.dtypes == code)
            for number in range(len(partial.passes)):
                self._launch(partial, number, mine, code, queries, carried[number])

    def _launch(
        self, partial: CudaPartial, number: int, blocks: Blocks, code: int, queries: Queries, carried: Sequence[View]
    ) -> None:
        device, part = self._device, partial.passes[number]
        variant = _variant(partial.query, code, finite=part.finite)
        on_tensors = variant.form == "mma"
        numbers = part.numbers.copy()
        numbers[Q_EXPONENT] = part.form(coded=code == CODED)[1] if on_tensors else 0
        launch = describe(variant, device.pointer, blocks, numbers, self._blocks_a_split(variant, part, len(blocks)))
        columns = self._mirror.put(launch.columns, device.compute)
        tops, totals, sums = self._room(launch.splits * launch.rows, launch.sums)
        q = queries.of(number, on_tensors=on_tensors, coded=code == CODED)
        memory = View(device.pointer, device.capacity_bytes, "|u1")
        cap = np.float32(partial.on_host.soft_cap)
        arguments = (memory, q, *columns, cap, tops, totals, sums)
        self._runtime.launch(device.gpu, kernel_for(variant), launch.grid, arguments, device.compute)
        arguments = (tops, totals, sums, launch.splits, variant.v_dim, *carried)
        self._runtime.launch(device.gpu, MERGE, (launch.rows,), arguments, device.compute)

    def _room(self, states: int, sums: int) -> tuple[View, View, View]:
        """Where a launch leaves its splits. The next one, behind it in the same stream, leaves its own there too."""
        state_bytes = align_up(states * 4, ALIGNMENT)
        begin = self._partials.need(2 * state_bytes + sums * 4)
        return (
            View(begin, states, "<f4"),
            View(begin + state_bytes, states, "<f4"),
            View(begin + 2 * state_bytes, sums, "<f4"),
        )

    def _blocks_a_split(self, variant: Variant, part: Pass, count: int) -> int:
        """As many splits as keep the GPU busy, and as there is room for what they leave."""
        shape = part.state.shape
        beside = int(shape.heads * shape.queries) * tiles_of(variant, int(shape.group))
        beside *= variant.v_dim // variant.part
        most = max(1, PARTIALS_BYTES // (part.rows * (variant.v_dim + 2) * 4))
        return -(-count // min(most, max(1, -(-self._wanted // beside)), count))

    def _compute_on_host(self, partial: CudaPartial, some: Blocks) -> bool:
        """Have the CPU compute, with blocks of the pool copied out; nothing is shared with other calls."""
        in_pool, sizes = self._in_pool(some), _part_bytes(partial.query, some)
        count = int(sizes[in_pool].max(initial=0))
        for at in np.flatnonzero(in_pool).tolist():
            memory = np.empty(count + ALIGNMENT, np.uint8)
            memory = memory[-memory.ctypes.data % ALIGNMENT :][: int(sizes[at])]
            self._device.copy_out(int(some.addresses[at]) - self._device.pointer, memory)
            one = _moved(some.take(slice(at, at + 1)), np.array([memory.ctypes.data], np.uint64))
            if not self._on_host.compute(partial.on_host, one, 0, 1):
                return False
        rest = some.take(~in_pool)
        return self._on_host.compute(partial.on_host, rest, 0, len(rest))

    def _in_pool(self, blocks: Blocks) -> Array:
        begin = self._device.pointer
        inside: Array = (blocks.addresses >= begin) & (blocks.addresses < begin + self._device.capacity_bytes)
        return inside

    def _expected_ns(self, query: Query, blocks: Blocks) -> Array:
        tokens = blocks.tokens / query.geometry.block_size
        part = np.maximum(_part_bytes(query, blocks) * tokens, 1.0)
        return part * (query.rows * _POOL_NS + np.where(self._in_pool(blocks), 0.0, _BUS_NS))

    def _learn(self, expected_ns: float, took_ns: int) -> None:
        if expected_ns * self._pace >= _LEARN_NS:
            self._pace = min(took_ns / expected_ns, self._pace * _FORGET)

    def _settle(self) -> None:
        """Something went wrong: nothing may read blocks any more when the caller is told."""
        for stream in (self._device.to_device, self._device.compute):
            with contextlib.suppress(CudaError):  # the first error is the one that is told
                self._runtime.wait(self._device.gpu, stream)


def _has_kernels(query: Query) -> bool:
    return has_kernels(query.geometry.k_dim, query.values_dim)


def _variant(query: Query, code: int, *, finite: bool = True) -> Variant:
    """The kernel for blocks of a dtype; queries with Inf take CUDA cores, since they have no halves to be split in."""
    return choose(_NAMES[code], query.geometry.k_dim, query.values_dim, query.group if finite else 1)


def _reads_once(query: Query, variant: Variant) -> bool:
    """Whether a launch reads every byte of a block for one thread block alone."""
    readers = int(query.q.shape[0]) * tiles_of(variant, query.group) * (variant.v_dim // variant.part)
    return readers == 1 and query.geometry.v_dim > 0


def _part_bytes(query: Query, blocks: Blocks) -> Array:
    """Bytes of each block's part that kernels may read, uint64 [n]; ValueError for scales far from their codes."""
    g = query.geometry
    widths = np.array([WIDTHS[_NAMES[code]] for code in range(len(_NAMES))], np.uint64)
    elements = g.block_size * g.kv_heads * (g.k_dim + g.v_dim)
    sizes = np.uint64(elements) * widths[blocks.dtypes]
    scaled = np.flatnonzero(blocks.scales)
    if scaled.size:
        scale_bytes = np.uint64(4 * g.kv_heads * (2 if g.v_dim else 1))
        ends = blocks.scales[scaled] - blocks.addresses[scaled] + scale_bytes
        if (ends > sizes[scaled] + scale_bytes + np.uint64(ALIGNMENT)).any():
            raise ValueError(f"the scales of a block are not within {ALIGNMENT} bytes behind its codes")
        sizes[scaled] = np.maximum(sizes[scaled], ends)
    found: Array = sizes
    return found


def _batches(sizes: Array, limit: int) -> Iterator[tuple[int, int]]:
    """Cut a row of sizes, each within a limit, into runs that are."""
    ends, at = np.cumsum(sizes), 0
    while at < sizes.size:
        after = int(np.searchsorted(ends, (ends[at - 1] if at else 0) + limit, side="right"))
        yield at, after
        at = after


def _moved(blocks: Blocks, addresses: Array) -> Blocks:
    """Blocks as they lie at other addresses, their scales with them."""
    scales = np.where(blocks.scales == 0, np.uint64(0), blocks.scales - blocks.addresses + addresses)
    return dataclasses.replace(blocks, addresses=addresses, scales=scales)
