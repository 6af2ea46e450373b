"""A CPU of its own for each thread that is measured, on both sides of a comparison.

Some kernels of virtual machines pack short bursts of work onto one CPU: two threads of 20 ms then take 40, now and then
and not always. A figure of several threads would tell of that and not of what is measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")


@contextlib.contextmanager
def own_cpu() -> Iterator[None]:
    """Keep the calling thread on the first of its CPUs; afterwards it may run where it could before."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def own_cpus(cpus: set[int], *, caller_joins: bool) -> Iterator[None]:
    """Give each thread that is started meanwhile a CPU of `cpus`, in turn, for good.

    Where the caller works with them (`caller_joins`), as it does in OpenMP, the first CPU is left to it: see `own_cpu`.
    """
    known, order = _threads(), sorted(cpus)
    yield
    for index, thread in enumerate(sorted(_threads() - known), start=caller_joins):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, {order[index % len(order)]})


def _threads() -> set[int]:
    return {int(entry.name) for entry in _TASKS.iterdir()}
