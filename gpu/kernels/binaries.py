"""Kernels as machine code of one architecture: from the cache folder, or compiled and kept there for the next start.

Numba's own cache misses kernels that are closures, as those of attention are, and is pickle. Here a file is
MessagePack, named by a hash of everything that the code depends on (`kvtierd.gpu.kernels.compile`), and lies in the
folder of compiled kernels, which is used only if it is ours and 0700 (`kvtierd.index.jit`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from kvtierd.gpu.kernels.compile import compile_kernel, digest_of, entry_of
from kvtierd.gpu.kernels.registry import Architecture, Kernel, architecture_name
from kvtierd.index.jit import cache_state


class Binary(msgspec.Struct, frozen=True):
    """A module for CUDA's driver, and the name of the kernel in it. `sum` is the SHA-256 of the module."""

    entry: str
    cubin: bytes
    sum: bytes

    @property
    def is_whole(self) -> bool:
        """Whether these are the bytes that were written."""
        return hashlib.sha256(self.cubin).digest() == self.sum


def binary_of(kernel: Kernel, architecture: Architecture) -> Binary:
    """Load it, or compile it, which takes seconds. Errors of the compilers pass through; a folder that cannot be
    written to costs the next start its time and nothing else."""
    file = _file_of(kernel, architecture)
    if file is None:
        return _compiled(kernel, architecture)
    if (found := _read(file)) is None:
        found = _compiled(kernel, architecture)
        _write(file, found)
    return found


def is_kept(kernel: Kernel, architecture: Architecture) -> bool:
    """Whether it would be loaded from the cache folder."""
    file = _file_of(kernel, architecture)
    return file is not None and _read(file) is not None


def _file_of(kernel: Kernel, architecture: Architecture) -> Path | None:
    folder = cache_state().directory
    if folder is None:
        return None
    return folder / f"{kernel.name}-{architecture_name(architecture)}-{digest_of(kernel, architecture)}.cubin"


def _compiled(kernel: Kernel, architecture: Architecture) -> Binary:
    made = compile_kernel(kernel, architecture)
    return Binary(entry_of(made.ptx), made.cubin, hashlib.sha256(made.cubin).digest())


def _read(file: Path) -> Binary | None:
    try:
        found = msgspec.msgpack.decode(file.read_bytes(), type=Binary)
    except (OSError, msgspec.DecodeError):  # none, or one that a failure of power left torn
        return None
    return found if found.is_whole else None


def _write(file: Path, binary: Binary) -> None:
    torn_never = file.with_suffix(f".{os.getpid()}")
    try:
        torn_never.write_bytes(msgspec.msgpack.encode(binary))
        torn_never.replace(file)
    except OSError:
        torn_never.unlink(missing_ok=True)
