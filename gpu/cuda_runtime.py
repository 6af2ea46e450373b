"""CUDA's calls for `cuda_device`, made with torch (memory, streams) and CUDA's own bindings (all else).

Importing this needs neither a GPU nor these packages; `TorchRuntime` needs both.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.gpu.cuda_interface import Allocation, CudaError, View

if TYPE_CHECKING:
    from kvtierd.gpu.kernels.registry import Kernel

INSTALL = "pip install 'kvtierd[gpu]'"
ARRAYS_KEPT = 1024
"""Numba's arrays over device memory: to make one takes some ten microseconds, a launch has a dozen of them, and those
of a decode step are the same in every step."""


class TorchRuntime:
    """The real calls. Raises StartupError with exit code 69 where torch, the bindings or a driver are missing."""

    def __init__(self, device: str) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._cuda: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            missing = f"gpu.device is {device!r}, which needs {error.name}: {INSTALL}"
            raise StartupError(ExitCode.NO_DEVICE, missing) from error
        self._kernels: Any = None
        self._array = functools.lru_cache(maxsize=ARRAYS_KEPT)(self._new_array)
        if not self._torch.cuda.is_available():
            raise StartupError(
                ExitCode.NO_DEVICE, f"gpu.device is {device!r}, and torch sees no GPU (nvidia-smi says why); use host"
            )

    def device_count(self) -> int:
        """GPUs that this process may see."""
        return int(self._torch.cuda.device_count())

    def allocate(self, gpu: int, count: int) -> Allocation:
        """One tensor. It is larger than what torch's allocator shares out, so that it is an allocation of its own."""
        with self._current(gpu):
            try:
                tensor = self._torch.empty(count, dtype=self._torch.uint8, device=f"cuda:{gpu}")
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                raise CudaError(str(error).partition(". ")[0]) from error
        return Allocation(tensor.data_ptr(), tensor)

    def free(self, gpu: int, allocation: Allocation) -> None:
        """Hand the tensor's memory back to the driver; whoever else holds the tensor keeps it."""
        with self._current(gpu):
            allocation.owner.resize_(0)
            self._torch.cuda.empty_cache()

    def new_stream(self, gpu: int) -> Any:
        """A torch stream; torch's streams do not wait for the default one."""
        with self._current(gpu):
            return self._torch.cuda.Stream(device=gpu)

    def copy(self, gpu: int, target: int, source: int, count: int, stream: Any) -> None:
        """`cudaMemcpyAsync`; CUDA sees from the addresses which way it goes."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        with self._current(gpu):
            self._call("cudaMemcpyAsync", target, source, count, kind, stream.cuda_stream)

    def wait(self, gpu: int, stream: Any) -> None:
        """Wait on an event and not on the stream: what others add meanwhile is not waited for."""
        with self._current(gpu), _told("what was in the stream failed", RuntimeError):
            event = self._torch.cuda.Event(blocking=True)
            event.record(stream)
            event.synchronize()

    def record(self, gpu: int, stream: Any) -> Any:
        """A torch event, for other streams to wait for."""
        with self._current(gpu), _told("an event cannot be recorded", RuntimeError):
            event = self._torch.cuda.Event()
            event.record(stream)
            return event

    def follow(self, gpu: int, stream: Any, event: Any) -> None:
        """`cudaStreamWaitEvent`."""
        with self._current(gpu), _told("an event cannot be waited for", RuntimeError):
            stream.wait_event(event)

    def launch(self, gpu: int, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[Any], stream: Any) -> None:
        """Numba's launch, in the context that torch made; the first one of a kernel compiles it."""
        cuda = self._numba()
        with self._current(gpu), cuda.gpus[gpu], _told(kernel.name, cuda.cudadrv.error.CudaDriverError):
            arrays = [self._array(argument) if isinstance(argument, View) else argument for argument in arguments]
            kernel.launch(grid, *arrays, stream=cuda.external_stream(stream.cuda_stream))

    def multiprocessors(self, gpu: int) -> int:
        """Of the device's properties."""
        return int(self._torch.cuda.get_device_properties(gpu).multi_processor_count)

    def register(self, gpu: int, address: int, count: int) -> int:
        """`cudaHostRegister`, portable and mapped."""
        flags = self._cuda.cudaHostRegisterPortable | self._cuda.cudaHostRegisterMapped
        with self._current(gpu):
            self._call("cudaHostRegister", address, count, flags)
            return int(self._call("cudaHostGetDevicePointer", address, 0))

    def unregister(self, gpu: int, address: int) -> None:
        """`cudaHostUnregister`."""
        with self._current(gpu):
            self._call("cudaHostUnregister", address)

    def export_handle(self, gpu: int, pointer: int) -> bytes:
        """`cudaIpcGetMemHandle`."""
        with self._current(gpu):
            return bytes(self._call("cudaIpcGetMemHandle", pointer).reserved)

    def open_handle(self, gpu: int, handle: bytes) -> int:
        """`cudaIpcOpenMemHandle`."""
        made = self._cuda.cudaIpcMemHandle_t()
        made.reserved = handle
        with self._current(gpu):
            return int(self._call("cudaIpcOpenMemHandle", made, self._cuda.cudaIpcMemLazyEnablePeerAccess))

    def close_handle(self, gpu: int, pointer: int) -> None:
        """`cudaIpcCloseMemHandle`."""
        with self._current(gpu):
            self._call("cudaIpcCloseMemHandle", pointer)

    def _numba(self) -> Any:
        if self._kernels is None:
            self._kernels = importlib.import_module("numba.cuda")
        return self._kernels

    def _new_array(self, view: View) -> Any:
        """A view as Numba's array of one dimension; it keeps no memory. The context must be the GPU's."""
        return self._numba().as_cuda_array(_Seen(view), sync=False)

    @contextlib.contextmanager
    def _current(self, gpu: int) -> Iterator[None]:
        with self._torch.cuda.device(gpu):
            yield

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call, and return the one result there is; CudaError names the call and the error."""
        error, *results = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise CudaError(f"{name}: {error.name}")
        return results[0] if results else None


@contextlib.contextmanager
def _told(what: str, kind: type[Exception]) -> Iterator[None]:
    """Have an error of a package be told as one of CUDA."""
    try:
        yield
    except kind as error:
        raise CudaError(f"{what}: {error}") from error


class _Seen:
    """Device memory as CUDA's array interface says it, version 3."""

    def __init__(self, view: View) -> None:
        self.__cuda_array_interface__ = {
            "shape": (view.count,),
            "typestr": view.dtype,
            "data": (view.pointer, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }
