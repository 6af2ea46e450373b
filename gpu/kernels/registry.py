"""The table of CUDA kernels: what each is compiled for, and how much of a multiprocessor it may take."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numba import cuda

Architecture = tuple[int, int] | tuple[int, int, str]

ARCHITECTURES: tuple[Architecture, ...] = ((8, 0), (9, 0), (9, 0, "a"), (10, 0))
"""A100, H100 and H200 (in both forms: numba-cuda picks 9.0a on them by itself), B200."""

SPILLS_FROM = (9, 0)
"""From here on no kernel may spill; before it there is no e4m3 in hardware, and emulating it takes registers."""


TOOLCHAIN = ("primitives", "ptx", "twins", "registry", "compile", "binaries", "arguments")
"""How the names of modules begin that hold no kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A CUDA kernel with the one signature that it is compiled for.

    `function` is the plain Python body, `signature` Numba's, as a text ("void(uint8[::1], int64)"). `threads` is the
    size of a thread block. `registers` bounds the registers a thread by "sm_80", "sm_90", "sm_90a", "sm_100" ("*" for
    those not named), `spill_bytes` what may spill before sm_90, and `reason` says where these numbers come from.
    `canonical` kernels are compiled by `make test`, all by `make kernels`. `blocks_per_multiprocessor` is a promise to
    the compiler (launch bounds); it makes it spill when it is more than the registers allow.
    """

    name: str
    function: Callable[..., None]
    signature: str
    threads: int
    registers: Mapping[str, int]
    reason: str
    spill_bytes: int = 0
    canonical: bool = False
    fastmath: bool = False
    blocks_per_multiprocessor: int | None = None

    @property
    def launch_bounds(self) -> int | tuple[int, int]:
        """What is promised to the compiler about launches."""
        blocks = self.blocks_per_multiprocessor
        return self.threads if blocks is None else (self.threads, blocks)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """Numba's launchable form; compiled at its first launch, or for the simulator when that is on."""
        bounds = {} if cuda_is_simulated() else {"launch_bounds": self.launch_bounds}
        return cuda.jit(self.function, fastmath=self.fastmath, **bounds)

    def launch(self, grid: int | tuple[int, ...], *arguments: Any, threads: int | None = None, stream: Any = 0) -> None:
        """Launch on `grid` thread blocks. `threads` shrinks them for the simulator, where bodies allow it."""
        self.dispatcher[grid, threads or self.threads, stream](*arguments)

    def register_bound(self, architecture: Architecture) -> int:
        """Most registers a thread may use there."""
        name = architecture_name(architecture)
        return self.registers[name] if name in self.registers else self.registers["*"]

    def spill_bound(self, architecture: Architecture) -> int:
        """Most bytes that may spill there."""
        return 0 if architecture[:2] >= SPILLS_FROM else self.spill_bytes


_kernels: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to the table; ValueError for a name that another one has."""
    if kernel.name in _kernels:
        raise ValueError(f"two kernels are named {kernel.name!r}")
    _kernels[kernel.name] = kernel
    return kernel


def all_kernels() -> tuple[Kernel, ...]:
    """Every kernel of this package, by name; imports the modules that hold them."""
    package = __package__ or ""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith(TOOLCHAIN):
            importlib.import_module(f"{package}.{module.name}")
    return tuple(_kernels[name] for name in sorted(_kernels))


def architecture_name(architecture: Architecture) -> str:
    """`sm_90a` for (9, 0, "a")."""
    return "sm_" + "".join(str(part) for part in architecture)


def architecture_of(name: str) -> Architecture:
    """(9, 0, "a") for `sm_90a`. Raises ValueError for what is no such name."""
    if (found := re.fullmatch(r"sm_(\d+)(\d)([a-z]?)", name)) is None:
        raise ValueError(f"{name!r} is no architecture; one looks like sm_90 or sm_90a")
    major, minor, feature = int(found[1]), int(found[2]), found[3]
    return (major, minor, feature) if feature else (major, minor)


def cuda_is_simulated() -> bool:
    """Whether Numba's simulator stands in for CUDA in this process (NUMBA_ENABLE_CUDASIM=1)."""
    return bool(importlib.import_module("numba.core.config").ENABLE_CUDASIM)
