"""A stand-in for CUDA that computes: kernels run in Numba's simulator, and streams run as late (or early) as they may.

What is in a stream runs when somebody waits for it, or when another stream follows an event of it, and no earlier: a
copy that a kernel forgot to wait for has not been made then. With `eager` the streams of copies run at once, and only
the first stream, which computes, as late: a buffer that is filled again before its reader has run is then found out.
Kernels read what a GPU could: device memory, and host memory that is registered, where the device sees it. Device
memory begins as NaN.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.gpu.cuda_device import CudaDevice
from kvtierd.gpu.cuda_interface import Allocation, CudaError, View
from kvtierd.gpu.cuda_runtime import TorchRuntime
from kvtierd.gpu.kernels.registry import Kernel, cuda_is_simulated
from kvtierd.gpu.kernels.twins import Everywhere
from tests.unit.gpu.fake_cuda import SHIFT, FakeRuntime, memory_at

SIMULATED_ARRAYS = "numba.cuda.simulator.cudadrv.devicearray"
THREADS = {"attention_merge": 16}
"""Of a thread block; 32 of all others."""


@dataclasses.dataclass(slots=True, eq=False)
class Stream:
    """What waits in a stream; `done` of all `begun` things have run."""

    waiting: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    begun: int = 0
    done: int = 0


class SimulatedRuntime(FakeRuntime):
    """One GPU. `launched` are the kernels' names, `copied` the bytes that went to the device, by where they came from:
    host memory that is registered ("pinned"), and other ("pageable")."""

    def __init__(self, *, eager: bool = False, memory_bytes: int = 1 << 28) -> None:
        super().__init__(gpus=1, memory_bytes=memory_bytes)
        self.eager = eager
        self.streams: list[Stream] = []
        self.launched: list[str] = []
        self.copied = {"pinned": 0, "pageable": 0}
        self.failing = ""
        self._one = threading.RLock()

    def allocate(self, gpu: int, count: int) -> Allocation:
        with self._one:
            made = super().allocate(gpu, count)
            made.owner[:] = 0xFF
            return made

    def free(self, gpu: int, allocation: Allocation) -> None:
        with self._one:
            for stream in self.streams:
                self._run(stream, stream.begun)
            super().free(gpu, allocation)

    def new_stream(self, gpu: int) -> Stream:
        super().new_stream(gpu)
        self.streams.append(Stream())
        return self.streams[-1]

    def copy(self, gpu: int, target: int, source: int, count: int, stream: Any) -> None:
        with self._one:
            self.touched.add(gpu)
            for address in (target, source):
                self._refuse_edges(address, count)
            if self._pool(target, count) is not None and self._pool(source, count) is None:
                self.copied["pinned" if self._is_registered(source, count) else "pageable"] += count

            def copy() -> None:
                self._bytes(target, count)[:] = self._bytes(source, count)

            self._add(stream, copy)

    def wait(self, gpu: int, stream: Any) -> None:
        with self._one:
            super().wait(gpu, stream)
            self._run(stream, stream.begun)

    def record(self, gpu: int, stream: Any) -> tuple[Stream, int]:
        self.touched.add(gpu)
        return stream, stream.begun

    def follow(self, gpu: int, stream: Any, event: Any) -> None:
        with self._one:
            self.touched.add(gpu)
            self._add(stream, lambda: self._run(*event))

    def launch(self, gpu: int, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[Any], stream: Any) -> None:
        with self._one:
            self.touched.add(gpu)
            if kernel.name.startswith(self.failing or "-"):
                raise CudaError(f"{kernel.name}: CUDA_ERROR_ILLEGAL_ADDRESS")
            self.launched.append(kernel.name)
            arrays = [self._array(argument) for argument in arguments]
            threads = THREADS.get(kernel.name, 32)
            self._add(stream, lambda: kernel.launch(grid, *arrays, threads=threads))

    def multiprocessors(self, gpu: int) -> int:
        return super().multiprocessors(gpu) // 4

    def seen(self, address: int, count: int) -> Bytes:
        """What the device sees at an address."""
        if (pool := self._pool(address, count)) is not None:
            return pool
        if self._is_registered(address - SHIFT, count):
            return memory_at(address - SHIFT, count)
        raise IndexError(f"the device cannot read {count} bytes at {address:#x}")

    def _array(self, argument: Any) -> Any:
        if not isinstance(argument, View):
            return argument
        if argument.dtype == "|u1":
            return Everywhere(argument.pointer, self.seen)
        size = argument.count * np.dtype(argument.dtype).itemsize
        found = self._pool(argument.pointer, size)
        assert found is not None, f"{argument} is not in device memory"
        # Numba's own functions would make a copy.
        return importlib.import_module(SIMULATED_ARRAYS).FakeCUDAArray(found.view(argument.dtype))

    def _add(self, stream: Stream, work: Callable[[], None]) -> None:
        stream.waiting.append(work)
        stream.begun += 1
        if self.eager and stream is not self.streams[0]:
            self._run(stream, stream.begun)

    def _run(self, stream: Stream, until: int) -> None:
        while stream.done < until:
            work = stream.waiting.pop(0)
            stream.done += 1
            work()

    def _pool(self, address: int, count: int) -> Bytes | None:
        for pointer, pool in self.pools.items():
            if pointer <= address and address + count <= pointer + pool.size:
                return pool[address - pointer : address - pointer + count]
        return None

    def _is_registered(self, address: int, count: int) -> bool:
        reached = address
        for begin, size in sorted(self.registered.items()):
            if begin <= reached < begin + size:
                reached = begin + size
        return reached >= address + count

    def _bytes(self, address: int, count: int) -> Bytes:
        found = self._pool(address, count)
        return memory_at(address, count) if found is None else found


def make_device(capacity_bytes: int, *, eager: bool = False) -> CudaDevice:
    """The GPU of this machine where kernels are not simulated, else the stand-in."""
    if not cuda_is_simulated():
        return CudaDevice(0, capacity_bytes, TorchRuntime("cuda:0"))
    return CudaDevice(0, capacity_bytes, SimulatedRuntime(eager=eager))
