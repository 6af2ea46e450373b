"""Compiled code is loaded before anything is served: nothing compiles on a request."""

from __future__ import annotations

import dataclasses
import importlib
import time
from pathlib import Path

KERNEL_MODULES = ("kvtierd.index.probe", "kvtierd.index.update")
"""Importing these compiles their functions, or loads them from the cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """Where compiled code is kept (None: nowhere), why, and how long loading it took."""

    directory: Path | None
    note: str
    seconds: float


def load_kernels(cache_dir: str) -> Kernels:
    """Load all compiled functions; `cache_dir` "" takes the default folder (kvtierd.index.jit)."""
    begin_s = time.monotonic()
    # Deferred: Numba reads its settings when it is imported, and whoever only checks a configuration needs none of it.
    from kvtierd.index.jit import configure_cache, default_cache_directory

    state = configure_cache(Path(cache_dir) if cache_dir else default_cache_directory())
    for name in KERNEL_MODULES:
        importlib.import_module(name)
    return Kernels(state.directory, state.note, time.monotonic() - begin_s)
