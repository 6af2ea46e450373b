"""Compiled code is loaded before anything is served: nothing compiles on a request."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtierd.index.jit import CacheState

SERVED = ("index", "policy", "tiers/steps")
"""Folders whose functions every daemon calls."""
LATER = ("gpu/host_kernels",)
"""Folders whose functions are loaded when somebody may want them (kvtierd.tiers.later_kernels), once they are compiled
and in the cache."""

LOCK_RETRY_S = 0.2
LOCK_PATIENCE_S = 600.0
"""Longer than all of it takes to compile: whoever holds the cache then hangs, and is waited for no more."""


def choose_cache(cache_dir: str) -> CacheState:
    """Fix the folder of compiled code; "" takes the default one (kvtierd.index.jit)."""
    # Deferred: importing Numba takes a while, and whoever only checks a configuration needs none of it.
    from kvtierd.index.jit import configure_cache, default_cache_directory

    return configure_cache(Path(cache_dir) if cache_dir else default_cache_directory())


def load_kernels(
    tell: Callable[[int, int], None] = lambda _done, _total: None, folders: Sequence[str] | None = None
) -> float:
    """Load compiled functions, which importing their modules does; how many seconds it took.

    Without `folders` these are the `SERVED` ones, and of `LATER` those that the cache does not have yet: what is loaded
    on a request must not compile. `tell` hears before each module how many are done, of how many.
    """
    from kvtierd.index.jit import PACKAGE

    begin_s = time.monotonic()
    if folders is None:
        folders = (*SERVED, *(folder for folder in LATER if not is_compiled(folder)))
    paths = sorted(path for folder in folders for path in (PACKAGE / folder).rglob("[!_]*.py"))
    with _alone_where_it_compiles(folders, lambda: tell(0, len(paths))):
        for number, path in enumerate(paths):
            tell(number, len(paths))
            importlib.import_module(".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)))
        for folder in folders:
            if (mark := _mark(folder)) is not None:
                mark.touch()
    return time.monotonic() - begin_s


@contextlib.contextmanager
def _alone_where_it_compiles(folders: Sequence[str], tell: Callable[[], None]) -> Iterator[None]:
    """Hold the cache alone while it is filled; others who start meanwhile wait, and then load what they need.

    Numba replaces each file of its cache atomically, but not the index and the code that it names together: of three
    processes that compile a function with three signatures at a time, one may be given the code of another signature.
    """
    from kvtierd.index.jit import cache_state

    directory = cache_state().directory
    if directory is None or all(map(is_compiled, folders)):
        yield
        return
    with (directory / "lock").open("a") as file:
        until_s = time.monotonic() + LOCK_PATIENCE_S
        while time.monotonic() < until_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if all(map(is_compiled, folders)):  # whoever has it only loads what is there by now
                    break
                tell()
                time.sleep(LOCK_RETRY_S)
        yield


def is_compiled(folder: str) -> bool:
    """Whether all of a folder's functions were loaded once, so that the cache has them."""
    mark = _mark(folder)
    return mark is not None and mark.exists()


def _mark(folder: str) -> Path | None:
    """The file that says so; None where nothing is cached.

    The cache's own folder is one of these very sources. Numba goes by where they lie and when they were written, too:
    what another installation of the same version has compiled is not ours.
    """
    from kvtierd.index.jit import PACKAGE, cache_state

    directory = cache_state().directory
    if directory is None:
        return None
    digest = hashlib.sha256(os.fsencode(PACKAGE / folder))
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        found = path.stat()
        digest.update(f"|{path.name}|{found.st_mtime_ns}|{found.st_size}".encode())
    return directory / f"complete-{folder.replace('/', '-')}-{digest.hexdigest()[:16]}"
