"""Compile kernels to PTX and cubin without a GPU, and read what they take of a multiprocessor.

Numba makes PTX for any architecture, nvJitLink (of the package nvidia-nvjitlink, which numba-cuda[cu13] brings)
assembles it; the report is what its assembler says with `-v`. Reports are kept as JSON in the cache folder, named by a
hash of the kernel's module and of those of this package that it imports, and of the compilers' versions.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda

from kvtierd.gpu.kernels.registry import Architecture, Kernel, architecture_name
from kvtierd.index.jit import default_cache_directory

PACKAGE = "kvtierd.gpu.kernels"
FOLDER = Path(__file__).resolve().parent
COMPILERS = ("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_SHARED = re.compile(r"(\d+) bytes smem")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one kernel takes on one architecture. `stack_bytes` is local memory of a thread, spills included."""

    kernel: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    ptx_bytes: int
    cubin_bytes: int
    compile_s: float

    @property
    def spill_bytes(self) -> int:
        """Bytes that spill, written and read."""
        return self.spill_store_bytes + self.spill_load_bytes


class Compiled(msgspec.Struct, frozen=True):
    """PTX as a text, cubin as bytes, and the report."""

    ptx: str
    cubin: bytes
    report: Report


def compile_kernel(kernel: Kernel, architecture: Architecture) -> Compiled:
    """Compile one kernel for one architecture. Numba's and the assembler's errors pass through."""
    begin_s = time.monotonic()
    ptx, _ = cuda.compile_ptx(
        kernel.function,
        kernel.signature,
        cc=architecture,
        fastmath=kernel.fastmath,
        launch_bounds=kernel.launch_bounds,
    )
    name = architecture_name(architecture)
    options = LinkerOptions(arch=name, ptxas_options=["-v"], verbose=True)
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    cubin = bytes(linker.link("cubin").code)
    report = _parse(kernel.name, name, linker.get_info_log(), len(ptx), len(cubin), time.monotonic() - begin_s)
    return Compiled(ptx, cubin, report)


def reports(kernels: Iterable[Kernel], architectures: Iterable[Architecture]) -> Iterator[Report]:
    """The report of each kernel on each architecture, from the cache where its sources have not changed."""
    folder = default_cache_directory() / "cuda"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = tuple(architectures)
    for kernel in kernels:
        for architecture in wanted:
            yield _cached(folder, kernel, architecture)


def violations(kernel: Kernel, architecture: Architecture, report: Report) -> list[str]:
    """What of the kernel's bounds does not hold, as sentences."""
    where = f"{report.kernel} on {report.architecture}"
    found = []
    if report.registers > (bound := kernel.register_bound(architecture)):
        found.append(f"{where} takes {report.registers} registers; its bound is {bound} ({kernel.reason})")
    if report.spill_bytes > (bound := kernel.spill_bound(architecture)):
        found.append(f"{where} spills {report.spill_bytes} bytes; its bound is {bound} ({kernel.reason})")
    return found


def _parse(kernel: str, architecture: str, log: str, ptx_bytes: int, cubin_bytes: int, compile_s: float) -> Report:
    spills, registers, shared = _SPILLS.search(log), _REGISTERS.search(log), _SHARED.search(log)
    if spills is None or registers is None:
        raise ValueError(f"the assembler's report on {kernel} for {architecture} has another form: {log!r}")
    stack, stores, loads = map(int, spills.groups())
    return Report(
        kernel=kernel,
        architecture=architecture,
        registers=int(registers[1]),
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        shared_bytes=int(shared[1]) if shared else 0,
        ptx_bytes=ptx_bytes,
        cubin_bytes=cubin_bytes,
        compile_s=compile_s,
    )


def _cached(folder: Path, kernel: Kernel, architecture: Architecture) -> Report:
    file = folder / f"{kernel.name}-{architecture_name(architecture)}-{digest_of(kernel, architecture)}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Report)
    except (FileNotFoundError, msgspec.DecodeError):
        report = compile_kernel(kernel, architecture).report
    torn_never = file.with_suffix(f".{os.getpid()}")
    torn_never.write_bytes(msgspec.json.encode(report))
    torn_never.replace(file)
    return report


def digest_of(kernel: Kernel, architecture: Architecture) -> str:
    """A hash of everything that the compiled code depends on."""
    return hashlib.sha256(_identity(kernel, architecture).encode()).hexdigest()[:32]


def entry_of(ptx: str) -> str:
    """The name of the one kernel in it. Raises ValueError where there is none, or more."""
    found = _ENTRY.findall(ptx)
    if len(found) != 1:
        raise ValueError(f"PTX has {len(found)} entries; one is wanted: {found}")
    return str(found[0])


def _identity(kernel: Kernel, architecture: Architecture) -> str:
    """Everything that the compiled code depends on, as a text; the bounds are not part of it."""
    versions = [f"{name}={_version(name)}" for name in COMPILERS]
    row = [kernel.name, kernel.signature, str(kernel.fastmath), str(kernel.launch_bounds), str(architecture)]
    module = inspect.getmodule(kernel.function)
    name = module.__name__ if module else ""
    # A kernel of a test lies outside the package: then its own file is all of ours that we can name.
    sources = (
        _sources(name.removeprefix(PACKAGE + ".")) if name.startswith(PACKAGE) else [inspect.getfile(kernel.function)]
    )
    hashes = [hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in sources]
    return "\n".join([*versions, *row, *hashes])


def _version(package: str) -> str:
    """Of an installed package; a compiler may also come from elsewhere, with a CUDA toolkit that the system has."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of the system"


def _sources(module: str) -> list[str]:
    """Files of this package that a module is made of: its own, and those that they import."""
    seen: dict[str, str] = {}
    waiting = [module, "compile"]
    while waiting:
        name = waiting.pop()
        path = FOLDER / f"{name}.py"
        if name not in seen and path.is_file():
            seen[name] = str(path)
            waiting += _imported(path)
    return [seen[name] for name in sorted(seen)]


def _imported(path: Path) -> Iterator[str]:
    prefix = PACKAGE + "."
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            yield node.module.removeprefix(prefix)
            yield from (alias.name for alias in node.names)
