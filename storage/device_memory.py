"""A piece of device memory through the CUDA driver alone, for trying GPUDirect Storage without torch.

Used only in the trial's own process: it makes the primary context of device 0 current there.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Self

from kvtierd.core.checksum import Bytes


class DeviceMemory:
    """`size` bytes on device 0, freed on exit; KvikIO takes it for its `__cuda_array_interface__`.

    Raises OSError when there is no driver or a call to it fails.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._device = ctypes.c_int()
        self._pointer = ctypes.c_uint64()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3: one row of bytes."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._pointer.value, False), "version": 3}

    def copy_in(self, source: Bytes) -> None:
        """Host to device, [size] uint8."""
        self._call("cuMemcpyHtoD_v2", self._pointer, ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(self.size))

    def copy_out(self, target: Bytes) -> None:
        """Device to host, [size] uint8."""
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(target.ctypes.data), self._pointer, ctypes.c_size_t(self.size))

    def __enter__(self) -> Self:
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(self.size))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._call("cuMemFree_v2", self._pointer)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: object) -> None:
        try:
            result = getattr(self._cuda, name)(*arguments)
        except AttributeError as error:
            raise OSError(0, f"the CUDA driver has no {name}") from error
        if result:
            raise OSError(0, f"{name} of the CUDA driver failed with {result}")
