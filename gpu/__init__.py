"""Device interface, slot pools and kernels: the only package that knows whether there is a GPU."""

from __future__ import annotations

from kvtierd.config.schema import Gpu
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import format_bytes
from kvtierd.gpu.cuda_device import CudaDevice
from kvtierd.gpu.cuda_runtime import TorchRuntime
from kvtierd.gpu.device import Device
from kvtierd.gpu.host_device import HostDevice

__all__ = ["Device", "HostDevice", "open_device"]


def open_device(settings: Gpu) -> Device:
    """Open the device of the `gpu` tier: `host`, `auto` or `cuda:N`.

    `auto` is `host`: the CUDA device has not run on a GPU yet, so it is taken only where it is asked for by name. Where
    that cannot be had, it is an error with exit code 69 rather than a silent fallback. Raises StartupError.
    """
    name = settings.device
    if name in {"auto", "host"}:
        try:
            return HostDevice(settings.capacity)
        except OSError as error:
            wanted = f"gpu.capacity: {format_bytes(settings.capacity)} of memory cannot be had"
            raise StartupError(ExitCode.CONFIG, f"{wanted}: {error.strerror}; lower it, or write 0") from error
    if name.startswith("cuda:"):
        return CudaDevice(int(name.removeprefix("cuda:")), settings.capacity, TorchRuntime(name))
    raise StartupError(ExitCode.CONFIG, f"gpu.device is {name!r}; use auto, host or cuda:N")
