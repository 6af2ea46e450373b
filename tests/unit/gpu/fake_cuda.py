"""A stand-in for CUDA: device memory that is ordinary memory, and CUDA's rules where breaking them fails for real."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.gpu.cuda_device import IPC_HANDLE_BYTES
from kvtierd.gpu.cuda_interface import Allocation, CudaError

SHIFT = 1 << 44
"""The device sees registered host memory so many bytes further on."""


def memory_at(address: int, count: int) -> Bytes:
    """Memory of this process, whoever has it."""
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)


class FakeRuntime:
    """GPUs of `memory_bytes` each. `touched` are those on which something was made or done."""

    def __init__(self, gpus: int = 2, memory_bytes: int = 1 << 20, pinnable_bytes: int = 1 << 40) -> None:
        self.gpus, self.memory_bytes, self.pinnable_bytes = gpus, memory_bytes, pinnable_bytes
        self.touched: set[int] = set()
        self.registered: dict[int, int] = {}
        self.opened: list[int] = []
        self.waits = 0
        self.prepared: list[str] = []
        self.compiled: list[str] = []
        self.compiling_ended = False
        self.freed = 0
        self.pools: dict[int, Bytes] = {}
        self._host: list[Bytes] = []

    def knows(self, memory: Bytes) -> Bytes:
        """Host memory that copies may name by its address."""
        self._host.append(memory)
        return memory

    def device_count(self) -> int:
        return self.gpus

    def allocate(self, gpu: int, count: int) -> Allocation:
        self.touched.add(gpu)
        if count > self.memory_bytes:
            raise CudaError("CUDA out of memory")
        pool = np.zeros(count, np.uint8)
        self.pools[pool.ctypes.data] = pool
        return Allocation(pool.ctypes.data, pool)

    def free(self, gpu: int, allocation: Allocation) -> None:
        self.touched.add(gpu)
        del self.pools[allocation.pointer]
        self.freed += 1

    def new_stream(self, gpu: int) -> Any:
        self.touched.add(gpu)
        return object()

    def copy(self, gpu: int, target: int, source: int, count: int, stream: Any) -> None:
        self.touched.add(gpu)
        assert stream is not None
        for address in (target, source):
            self._refuse_edges(address, count)
        self._bytes(target, count)[:] = self._bytes(source, count)

    def wait(self, gpu: int, stream: Any) -> None:
        self.touched.add(gpu)
        assert stream is not None
        self.waits += 1

    def record(self, gpu: int, stream: Any) -> Any:
        self.touched.add(gpu)
        return stream

    def follow(self, gpu: int, stream: Any, event: Any) -> None:
        self.touched.add(gpu)
        assert stream is not None
        assert event is not None

    def launch(self, gpu: int, kernel: Any, grid: Sequence[int], arguments: Sequence[Any], stream: Any) -> None:
        self.touched.add(gpu)
        raise CudaError(f"{kernel.name} on {grid}, {len(arguments)} arguments, {stream}: nothing computes here")

    def compile_apart(self, gpu: int, kernels: Sequence[Any]) -> None:
        self.touched.add(gpu)
        self.compiled += [kernel.name for kernel in kernels]

    def stop_compiling(self) -> None:
        self.compiling_ended = True

    def prepare(self, gpu: int, kernel: Any) -> None:
        self.touched.add(gpu)
        self.prepared.append(kernel.name)

    def multiprocessors(self, gpu: int) -> int:
        self.touched.add(gpu)
        return 4

    def register(self, gpu: int, address: int, count: int) -> int:
        self.touched.add(gpu)
        if sum(self.registered.values()) + count > self.pinnable_bytes:
            raise CudaError("cudaHostRegister: cudaErrorMemoryAllocation")
        self.registered[address] = count
        return address + SHIFT

    def unregister(self, gpu: int, address: int) -> None:
        self.touched.add(gpu)
        del self.registered[address]

    def export_handle(self, gpu: int, pointer: int) -> bytes:
        self.touched.add(gpu)
        return pointer.to_bytes(IPC_HANDLE_BYTES, "little")

    def open_handle(self, gpu: int, handle: bytes) -> int:
        self.touched.add(gpu)
        pointer = int.from_bytes(handle, "little")
        if pointer in self.opened or pointer == 0:
            raise CudaError("cudaIpcOpenMemHandle: cudaErrorInvalidValue")
        self.opened.append(pointer)
        return pointer

    def close_handle(self, gpu: int, pointer: int) -> None:
        self.touched.add(gpu)
        self.opened.remove(pointer)

    def _refuse_edges(self, address: int, count: int) -> None:
        for begin, size in self.registered.items():
            inside = begin <= address < begin + size
            if (inside and address + count > begin + size) or (address < begin < address + count):
                raise CudaError("cudaMemcpyAsync: cudaErrorInvalidValue")

    def _bytes(self, address: int, count: int) -> Bytes:
        for memory in (*self.pools.values(), *self._host):
            begin = address - memory.ctypes.data
            if begin >= 0 and begin + count <= memory.size:
                return memory[begin : begin + count]
        if any(begin <= address and address + count <= begin + size for begin, size in self.registered.items()):
            return memory_at(address, count)
        raise CudaError("cudaMemcpyAsync: cudaErrorIllegalAddress")
