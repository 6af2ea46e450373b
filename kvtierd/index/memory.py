"""Memory that is reserved at start and takes RAM only as it is used."""

from __future__ import annotations

import atexit
import math
import mmap
import queue
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.core.units import MIB, PAGE_BYTES, align_up
from kvtierd.index.intrinsics import touch
from kvtierd.index.jit import compiled

Flat = npt.NDArray[np.uint8]

HUGE_PAGE_BYTES: Final = 2 * MIB
_SMALL_BYTES: Final = 2 * HUGE_PAGE_BYTES
"""An array below this is left to ordinary pages: aligning it to huge ones would waste as much."""


def reserve(shape: tuple[int, ...], dtype: npt.DTypeLike, *, huge: bool = True) -> npt.NDArray[Any]:
    """A zeroed array over anonymous memory, aligned to a page; the kernel backs its pages when they are first written.

    Larger arrays are aligned to huge pages and ask for them: random access to millions of rows would otherwise miss
    the TLB as often as the cache. With `huge` false they do not: for what is walked in order, and mostly stays small.
    Raises OSError (ENOMEM) when the address space cannot be had.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size < _SMALL_BYTES or not huge:
        memory = mmap.mmap(-1, max(size, 1), flags=flags)
        if not huge:
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # Some machines give them unasked.
        return np.frombuffer(memory, np.uint8)[:size].view(dtype).reshape(shape)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(memory, np.uint8)
    start = -flat.ctypes.data % HUGE_PAGE_BYTES
    return flat[start : start + size].view(dtype).reshape(shape)


@compiled(types.void(types.uint8[::1], types.int64, types.int64))
def _touch_pages(memory: Flat, begin: int, end: int) -> None:
    for offset in range(begin, end, PAGE_BYTES):
        touch(memory, offset)


class _Backer:
    """A thread that touches pages, started when first needed; it sleeps until there are some.

    It ends before the interpreter does: a thread that comes back from compiled code into an interpreter that is being
    taken down is ended there and then, with compiled frames on its stack, and the process may end with SIGSEGV.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Flat, int, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def touch(self, memory: Flat, begin: int, end: int) -> None:
        """Touch bytes begin..end-1 soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtierd-memory", daemon=True)
            self._thread.start()
            atexit.register(self._end, self._thread)
        self._jobs.put((memory, begin, end))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            memory, begin, end = job
            for piece in range(begin, end, HUGE_PAGE_BYTES):
                if self._ended:
                    return
                _touch_pages(memory, piece, min(end, piece + HUGE_PAGE_BYTES))

    def _end(self, thread: threading.Thread) -> None:
        self._ended = True
        self._jobs.put(None)
        thread.join()


_backer: Final = _Backer()


class Backing:
    """Has memory backed ahead of its use, which grows row by row from the first.

    To zero a huge page takes a tenth of a millisecond, and some milliseconds in a virtual machine whose host has to
    find the memory first: too long for the loop to wait. Another thread touches the next ones before the loop gets
    there. (It takes page faults, and not MADV_POPULATE_WRITE: that holds the lock of the whole address space.)
    `ahead_rows` are kept ready beyond those in use, at least, in whole huge pages: what the loop may fill while the
    other thread waits for a processor. Arrays too small for huge pages are left alone.
    """

    def __init__(self, array: npt.NDArray[Any], ahead_rows: int) -> None:
        self._memory: Flat = array.reshape(-1).view(np.uint8)
        self._row_bytes = max(1, array.nbytes // max(1, len(array)))
        self._ahead_bytes = align_up(ahead_rows * self._row_bytes, HUGE_PAGE_BYTES)
        self._backed_bytes, self.trigger_row = 0, len(array) + 1
        if array.nbytes >= _SMALL_BYTES:
            self.trigger_row = 0
            self.reached(0)

    def reached(self, row: int) -> None:
        """Rows below `row` are in use."""
        if row < self.trigger_row:
            return
        begin, size = self._backed_bytes, self._memory.size
        end = min(size, max(align_up(row * self._row_bytes, HUGE_PAGE_BYTES), begin) + self._ahead_bytes)
        self._backed_bytes = end
        last_row = size // self._row_bytes
        self.trigger_row = last_row + 1 if end == size else (end - self._ahead_bytes) // self._row_bytes + 1
        _backer.touch(self._memory, begin, end)
