"""`kvtierctl kernels`: compile the CUDA kernels without a GPU and show what each takes of a multiprocessor."""

from __future__ import annotations

import argparse
import importlib.util

from kvtierd.cli.errors import CommandError, Failure

_HEAD = ("kernel", "for", "registers", "bound", "spills", "stack", "shared", "cubin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which kernels."""
    parser.add_argument("--canonical", action="store_true", help="only those that `make test` compiles")


def run(args: argparse.Namespace) -> int:
    """Print a line a kernel and architecture; exit code 1 where a bound does not hold."""
    if importlib.util.find_spec("numba_cuda") is None:
        raise CommandError(Failure.UNAVAILABLE, "the CUDA compiler is missing: pip install 'numba-cuda[cu13]'")
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


def _line(cells: tuple[object, ...]) -> str:
    name, architecture, *numbers = (str(cell) for cell in cells)
    return f"{name:<44}{architecture:<8}" + "".join(f"{number:>10}" for number in numbers)
