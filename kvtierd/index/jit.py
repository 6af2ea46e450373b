"""The one place that compiles: decorators for Numba kernels and the folder of their cache.

Nothing compiles on a request: a kernel has explicit signatures, so that importing its module compiles it or loads it
from the folder. `configure_cache` must come before the first such import; otherwise the default folder is taken.

Numba's cache is pickle, and unpickling runs code. Therefore the folder must belong to this user with mode 0700; one
that does not is not used, and `cache_state` says so. Numba stamps a kernel with its own source file only and would
miss a change of a function that it calls in another one, or of a constant, therefore the folder is named by a hash of
all of them.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
import numba.core.config

import kvtierd

_F = TypeVar("_F", bound=Callable[..., Any])

Word = Any
"""A scalar inside compiled code: what it is there is up to the signature, and no type checker knows."""

PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = ("index", "policy", "tiers/steps", "gpu/host_kernels")
"""Folders of the package that hold compiled functions."""
_IMPORT = re.compile(r"^from (kvtierd\.[\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheState:
    """Where compiled kernels are kept (None: nowhere, they compile at every start), and why."""

    directory: Path | None
    note: str


_state: CacheState | None = None


def default_cache_directory() -> Path:
    """`$CACHE_DIRECTORY` (which systemd sets) or the user's cache folder."""
    if given := os.environ.get("CACHE_DIRECTORY"):
        return Path(given.split(":")[0])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtierd"


def configure_cache(directory: Path) -> CacheState:
    """Keep compiled kernels in a subfolder of `directory`, which is made with mode 0700 if it is not there.

    Whatever is wrong with the folder is in the note of the returned state, and then nothing is cached: a daemon
    that compiles for some seconds at start is better than one that runs somebody's pickle. Once a kernel is loaded
    the folder is fixed, and a call changes nothing.
    """
    global _state  # noqa: PLW0603 - Numba's own setting is one per process
    if _state is None:
        _state = _prepare(directory.expanduser())
        setattr(numba.core.config, "CACHE_DIR", str(_state.directory or ""))  # noqa: B010 - made at run time
    return _state


def cache_state() -> CacheState:
    """Where kernels are cached; settles on the default folder if nobody chose one."""
    return _state or configure_cache(default_cache_directory())


def compiled(*signatures: str | Any) -> Callable[[_F], _F]:
    """Compile for these Numba signatures now, or load from the cache; the function runs without the GIL.

    Division follows NumPy (no exception): a compiled function never raises. Pass contiguous arrays of exactly the
    declared dtypes.
    """
    cached = cache_state().directory is not None

    def decorate(function: _F) -> _F:
        kernel: Any = numba.njit(list(signatures), nogil=True, cache=cached, error_model="numpy")(function)
        return cast(_F, kernel)

    return decorate


def helper(function: _F) -> _F:
    """Mark a function that compiled functions call in their midst: always inlined, so that loops vectorise."""
    inner: Any = numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return cast(_F, inner)


def subroutine(function: _F) -> _F:
    """Mark a function that compiled functions call where a call costs nothing that matters: the rare and long ways."""
    inner: Any = numba.njit(nogil=True, error_model="numpy")(function)
    return cast(_F, inner)


def _prepare(directory: Path) -> CacheState:
    folder = directory / _cache_name()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in (directory, folder):
            if problem := _not_ours(path):
                return CacheState(None, f"kernels are not cached: {problem}")
        _drop_torn_files(folder)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return CacheState(None, f"kernels are not cached: {error}")
    return CacheState(folder, f"kernels are cached in {folder}")


def _not_ours(path: Path) -> str:
    found = path.stat()
    if found.st_uid != os.geteuid():
        return f"{path} belongs to uid {found.st_uid}, not {os.geteuid()}; give it to the user that runs this"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so that others may write there; chmod 0700 {path}"
    return ""


def _drop_torn_files(folder: Path) -> None:
    """Remove empty files: Numba renames without fsync, so a power failure can leave them, and then no start works."""
    for file in folder.rglob("*.nb[ic]"):
        with contextlib.suppress(FileNotFoundError):  # another process may be doing the same
            if file.stat().st_size == 0:
                file.unlink()


def _constants() -> Iterator[str]:
    """Constants of other modules that compiled functions may have frozen in, and those that these are made of."""
    own = [file for folder in SOURCES for file in sorted((PACKAGE / folder).glob("**/*.py"))]
    waiting = sorted({name for file in own for name, _ in _IMPORT.findall(file.read_text())})
    known = set(waiting)
    while waiting:
        file = PACKAGE.parent.joinpath(*waiting.pop().split(".")).with_suffix(".py")
        if not file.is_file() or file in own:
            continue
        text = file.read_text()
        yield from (f"{file.name}: {text}" for text in _assigned(ast.parse(text)))
        found = {
            name for name, names in _IMPORT.findall(text) if any(map(_CONSTANT.fullmatch, re.split(r"\W+", names)))
        }
        waiting += sorted(found - known)
        known |= found


def _assigned(tree: ast.Module) -> Iterator[str]:
    """Assignments to names of constants, of a module and of its classes."""
    for node in (*tree.body, *(inner for one in tree.body if isinstance(one, ast.ClassDef) for inner in one.body)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [part.id for target in targets if target is not None for part in ast.walk(target)
                 if isinstance(part, ast.Name)]  # fmt: skip
        if any(map(_CONSTANT.fullmatch, names)):
            yield ast.dump(node)


def _cache_name() -> str:
    """Package version, processor and a hash of everything else that compiled code depends on."""
    features = llvm.get_host_cpu_features().flatten()
    digest = hashlib.sha256(f"{features}|{numba.__version__}|{sys.version}".encode())
    for folder in SOURCES:
        for file in sorted((PACKAGE / folder).glob("**/*.py")):
            digest.update(f"{folder}/{file.name}".encode() + b"\0" + file.read_bytes())
    for constant in _constants():
        digest.update(constant.encode())
    return f"{getattr(kvtierd, '__version__', '0')}-{llvm.get_host_cpu_name()}-{digest.hexdigest()[:16]}"
