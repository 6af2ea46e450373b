"""`kvtierctl kernels`: compile the CUDA kernels without a GPU and show what each takes of a multiprocessor.

With `--compile ARCHITECTURE` it fills the daemon's cache with those that a daemon on such a GPU serves attention with,
at install: the first sequence of a shape would else wait for them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time

from kvtierd.cli.errors import CommandError, Failure
from kvtierd.config.loader import load
from kvtierd.config.options import add_options
from kvtierd.daemon.kernels import choose_cache

_HEAD = ("kernel", "for", "registers", "bound", "spills", "stack", "shared", "cubin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which kernels; the options that choose the cache folder are those of the daemon."""
    parser.add_argument("--canonical", action="store_true", help="only those that `make test` compiles")
    parser.add_argument(
        "--compile",
        dest="architecture",
        metavar="ARCHITECTURE",
        help="compile attention for GPUs of this kind (sm_80, sm_90, sm_100) into the daemon's cache",
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line a kernel and architecture; exit code 1 where a bound does not hold."""
    if importlib.util.find_spec("numba_cuda") is None:
        raise CommandError(Failure.UNAVAILABLE, "the CUDA compiler is missing: pip install 'numba-cuda[cu13]'")
    if args.architecture is not None:
        return _fill_cache(args)
    # Deferred: these modules import CUDA's compilers.
    from kvtierd.gpu.kernels.compile import reports, violations
    from kvtierd.gpu.kernels.registry import ARCHITECTURES, all_kernels

    broken: list[str] = []
    print(_line(_HEAD))
    for kernel in all_kernels():
        if args.canonical and not kernel.canonical:
            continue
        for architecture, report in zip(ARCHITECTURES, reports([kernel], ARCHITECTURES), strict=True):
            sizes = (report.spill_bytes, report.stack_bytes, report.shared_bytes, report.cubin_bytes)
            bound = kernel.register_bound(architecture)
            print(_line((report.kernel, report.architecture, report.registers, bound, *sizes)), flush=True)
            broken += violations(kernel, architecture, report)
    for text in broken:
        print(text)
    return 1 if broken else 0


def _fill_cache(args: argparse.Namespace) -> int:
    """Compile what is missing of attention's kernels, and print a line each."""
    settings = load(config=args.config, options=args.options, environment=os.environ).settings
    cache = choose_cache(settings.cache_dir)
    if cache.directory is None:
        raise CommandError(Failure.IO, cache.note)
    # Deferred as above.
    from kvtierd.gpu.kernels.attention import ALL, MERGE
    from kvtierd.gpu.kernels.binaries import binary_of, is_kept
    from kvtierd.gpu.kernels.registry import architecture_of

    try:
        architecture = architecture_of(args.architecture)
    except ValueError as error:
        raise CommandError(Failure.USAGE, str(error)) from error
    for kernel in (MERGE, *ALL):
        if args.canonical and not kernel.canonical:
            continue
        begin_s, was_there = time.monotonic(), is_kept(kernel, architecture)
        binary = binary_of(kernel, architecture)
        if not is_kept(kernel, architecture):
            raise CommandError(Failure.IO, f"{kernel.name} could not be written to {cache.directory}")
        how = "was there" if was_there else f"compiled in {time.monotonic() - begin_s:.1f} s"
        print(f"{kernel.name:<44}{len(binary.cubin):>10}  {how}", flush=True)
    print(cache.note)
    return 0


def _line(cells: tuple[object, ...]) -> str:
    name, architecture, *numbers = (str(cell) for cell in cells)
    return f"{name:<44}{architecture:<8}" + "".join(f"{number:>10}" for number in numbers)
