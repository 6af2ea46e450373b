"""The calls of CUDA that the device and its attention make, as an interface: real ones, or a stand-in of a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvtierd.gpu.device import DeviceError

if TYPE_CHECKING:
    from kvtierd.gpu.kernels.registry import Kernel


class CudaError(DeviceError):
    """A call of CUDA failed; the text has CUDA's name of the error and which call it was."""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Device memory: its address there, and the object (torch's tensor) that keeps it."""

    pointer: int
    owner: Any


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Memory that a kernel takes as an array: where it begins for the GPU, and `count` elements of a NumPy dtype."""

    pointer: int
    count: int
    dtype: str


class Runtime(Protocol):
    """The calls of CUDA that a device makes; each makes `gpu` the thread's current device first.

    Each raises CudaError. `kvtierd.gpu.cuda_runtime` makes them with torch and CUDA's own bindings.
    """

    def device_count(self) -> int:
        """GPUs that this process may see; makes a context on none."""
        ...

    def allocate(self, gpu: int, count: int) -> Allocation:
        """`count` bytes of device memory in one allocation of its own."""
        ...

    def free(self, gpu: int, allocation: Allocation) -> None:
        """Give the memory back to the GPU."""
        ...

    def new_stream(self, gpu: int) -> Any:
        """A stream that does not wait for the default one."""
        ...

    def copy(self, gpu: int, target: int, source: int, count: int, stream: Any) -> None:
        """Begin a copy between any two addresses, as it stands in the stream."""
        ...

    def wait(self, gpu: int, stream: Any) -> None:
        """Return when what is in the stream now is done, without the GIL meanwhile."""
        ...

    def record(self, gpu: int, stream: Any) -> Any:
        """An event that happens when what is in the stream now is done."""
        ...

    def follow(self, gpu: int, stream: Any, event: Any) -> None:
        """What comes into the stream from now on waits for an event of another one; the caller does not."""
        ...

    def launch(self, gpu: int, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[Any], stream: Any) -> None:
        """Begin a kernel, as it stands in the stream; of its arguments a `View` is an array, others are numbers."""
        ...

    def compile_apart(self, gpu: int, kernels: Sequence[Kernel]) -> None:
        """Have these compiled outside of this process, where they never were: `prepare` then only loads them."""
        ...

    def stop_compiling(self) -> None:
        """End what `compile_apart` began, at once; nothing is compiled after it."""
        ...

    def prepare(self, gpu: int, kernel: Kernel) -> None:
        """Load a kernel, which is compiled where it never was: a launch of it then compiles nothing."""
        ...

    def multiprocessors(self, gpu: int) -> int:
        """How many the GPU has."""
        ...

    def register(self, gpu: int, address: int, count: int) -> int:
        """Pin host memory and map it; returns its address on the device."""
        ...

    def unregister(self, gpu: int, address: int) -> None:
        """Undo `register`."""
        ...

    def export_handle(self, gpu: int, pointer: int) -> bytes:
        """The IPC handle of the allocation at a device address."""
        ...

    def open_handle(self, gpu: int, handle: bytes) -> int:
        """Map another process's allocation; returns its address here."""
        ...

    def close_handle(self, gpu: int, pointer: int) -> None:
        """Undo `open_handle`."""
        ...
