"""Memory that is reserved at start and takes RAM only as it is used."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20


def reserve(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed array over anonymous memory, aligned to a page; the kernel backs its pages when they are first written.

    Larger arrays are aligned to huge pages and ask for them: random access to millions of rows would otherwise miss
    the TLB as often as the cache. Raises OSError (ENOMEM) when the address space cannot be had.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < 2 * HUGE_PAGE_BYTES:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(memory, np.uint8)[:size].view(dtype).reshape(shape)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(memory, np.uint8)
    start = -flat.ctypes.data % HUGE_PAGE_BYTES
    return flat[start : start + size].view(dtype).reshape(shape)
