"""A kernel's arguments as CUDA's driver takes them: one cell of 8 bytes for each parameter of the compiled function.

Numba passes an array of one dimension as seven parameters: its memory's header and its owner (there are none on a
device), the count of elements, their size, the address, and per axis length and stride. A test reads the parameters
out of compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.gpu.cuda_interface import View

_WORD = (1 << 64) - 1


def cells_of(arguments: Sequence[Any]) -> npt.NDArray[np.uint64]:
    """[parameters] uint64 of Views, integers (int64) and float32. Raises TypeError for anything else."""
    cells: list[int] = []
    for argument in arguments:
        if isinstance(argument, View):
            size = np.dtype(argument.dtype).itemsize
            cells += (0, 0, argument.count, size, argument.pointer, argument.count, size)
        elif isinstance(argument, np.float32):
            cells.append(int(argument.view(np.uint32)))
        elif isinstance(argument, int):
            cells.append(argument & _WORD)
        else:
            raise TypeError(f"a kernel takes views, integers and float32, not {type(argument).__name__}")
    return np.array(cells, np.uint64)


def pointers_to(cells: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The addresses of these cells: the array whose address a launch is given."""
    return np.uint64(cells.ctypes.data) + np.arange(cells.size, dtype=np.uint64) * np.uint64(cells.itemsize)
