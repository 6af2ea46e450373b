"""Compiled code is loaded before anything is served: nothing compiles on a request."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtierd.index.jit import CacheState

SERVED = ("index", "policy", "tiers/steps", "gpu/host_kernels")
"""Folders whose functions requests call."""


def choose_cache(cache_dir: str) -> CacheState:
    """Fix the folder of compiled code; "" takes the default one (kvtierd.index.jit)."""
    # Deferred: importing Numba takes a while, and whoever only checks a configuration needs none of it.
    from kvtierd.index.jit import configure_cache, default_cache_directory

    return configure_cache(Path(cache_dir) if cache_dir else default_cache_directory())


def load_kernels(
    tell: Callable[[int, int], None] = lambda _done, _total: None, folders: Sequence[str] = SERVED
) -> float:
    """Load compiled functions, which importing their modules does; how many seconds it took.

    `tell` hears before each module how many are done, of how many.
    """
    from kvtierd.index.jit import PACKAGE

    begin_s = time.monotonic()
    paths = sorted(path for folder in folders for path in (PACKAGE / folder).rglob("[!_]*.py"))
    for number, path in enumerate(paths):
        tell(number, len(paths))
        importlib.import_module(".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)))
    return time.monotonic() - begin_s
