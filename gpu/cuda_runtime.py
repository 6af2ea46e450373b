"""CUDA's calls for `cuda_device`, made with torch (memory, streams) and CUDA's own bindings (all else).

Importing this needs neither a GPU nor these packages; `TorchRuntime` needs both.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.gpu.cuda_interface import Allocation, CudaError
from kvtierd.gpu.kernels.arguments import cells_of, pointers_to

if TYPE_CHECKING:
    from kvtierd.gpu.kernels.registry import Kernel

_log = logging.getLogger(__name__)

INSTALL = "pip install 'kvtierd[gpu]'"


class TorchRuntime:
    """The real calls. Raises StartupError with exit code 69 where torch, the bindings or a driver are missing."""

    def __init__(self, device: str) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._cuda: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            missing = f"gpu.device is {device!r}, which needs {error.name}: {INSTALL}"
            raise StartupError(ExitCode.NO_DEVICE, missing) from error
        self._driver: Any = None
        self._functions: dict[tuple[int, str], Any] = {}
        self._loading, self._loading_apart = threading.Lock(), threading.Lock()
        self._apart: Any = None
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
        """`cuLaunchKernel`, in the context that torch made. A kernel that was not prepared is loaded now."""
        function = self._function(gpu, kernel)
        cells = cells_of(arguments)
        pointers = pointers_to(cells)
        x, y, z = (*grid, 1, 1)[:3]
        with self._current(gpu), _told(kernel.name, CudaError):
            self._call("cudaSetDevice", gpu)
            self._drive(
                "cuLaunchKernel",
                function, x, y, z, kernel.threads, 1, 1, 0, stream.cuda_stream, int(pointers.ctypes.data), 0,
            )  # fmt: skip

    def compile_apart(self, gpu: int, kernels: Sequence[Kernel]) -> None:
        """In a process of its own (kvtierd.gpu.kernels.compile_apart). Where that fails `prepare` compiles, as it does
        what nobody has asked for before, and holds the GIL meanwhile: the log says so."""
        apart = self._apart_made()
        if problem := apart.fill(kernels, self._architecture(gpu)):
            if apart.stopped:
                raise CudaError("kernels are not compiled any more: the daemon ends")
            _log.warning("kernels are compiled in the daemon, which answers late meanwhile: %s", problem)

    def stop_compiling(self) -> None:
        """Kill that process."""
        self._apart_made().stop()

    def prepare(self, gpu: int, kernel: Kernel) -> None:
        """Compile with Numba for this GPU's architecture, or take it from the cache, and load it by the driver."""
        self._function(gpu, kernel)

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

    def _function(self, gpu: int, kernel: Kernel) -> Any:
        """CUDA's handle of a kernel on a GPU."""
        if (found := self._functions.get((gpu, kernel.name))) is None:
            with self._loading:  # one at a time: compilers are not made for more
                found = self._functions.get((gpu, kernel.name)) or self._load(gpu, kernel)
                self._functions[gpu, kernel.name] = found
        return found

    def _load(self, gpu: int, kernel: Kernel) -> Any:
        binaries = importlib.import_module("kvtierd.gpu.kernels.binaries")
        major, minor = self._architecture(gpu)
        with _told(f"{kernel.name} cannot be compiled for sm_{major}{minor}", Exception):
            binary = binaries.binary_of(kernel, (major, minor))
        with self._current(gpu), _told(kernel.name, CudaError):
            self._call("cudaSetDevice", gpu)
            module = self._drive("cuModuleLoadData", binary.cubin)
            return self._drive("cuModuleGetFunction", module, binary.entry.encode())

    def _architecture(self, gpu: int) -> tuple[int, int]:
        major, minor = self._torch.cuda.get_device_capability(gpu)
        return int(major), int(minor)

    def _apart_made(self) -> Any:
        with self._loading_apart:
            if self._apart is None:  # the compilers come with it
                self._apart = importlib.import_module("kvtierd.gpu.kernels.compile_apart").Apart()
            return self._apart

    def _drive(self, name: str, *arguments: Any) -> Any:
        """As `_call`, of the driver. Its context is that of the device that the runtime has made current."""
        if self._driver is None:
            self._driver = importlib.import_module("cuda.bindings.driver")
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name}: {error.name}")
        return results[0] if results else None

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
