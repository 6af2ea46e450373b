"""Giving the compiler's own code back to the kernel, once everything compiled has been loaded.

Numba loads a kernel from its cache with LLVM's linker, which pages in some 70 MiB of the library. Nothing of it runs
while requests are served: calls of a kernel go straight to its machine code. Only the executable mapping is given
back. Its pages are the file's own and unchanged, so that whoever compiles later finds them again at a page fault.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
from pathlib import Path

_CODE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp \S+ \S+ \d+\s+.*/libllvmlite\.so")
logger = logging.getLogger(__name__)


def give_back_compiler() -> None:
    """Drop the pages of LLVM's code from this process. A refusal of the kernel changes nothing, and the log has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for begin, end in code_ranges(Path("/proc/self/maps").read_text()):
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
            logger.info("the compiler's code stays in memory: %s", os.strerror(ctypes.get_errno()))


def code_ranges(maps: str) -> list[tuple[int, int]]:
    """Begin and end of each executable, unwritable mapping of LLVM in the text of a `maps` file."""
    return [(int(begin, 16), int(end, 16)) for begin, end in _CODE.findall(maps)]
