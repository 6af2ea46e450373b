"""Punching holes into files: Python has no call for it."""

from __future__ import annotations

import ctypes
import os

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of <linux/falloc.h>."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
_libc.fallocate.restype = ctypes.c_int


def punch(fd: int, offset: int, length: int) -> None:
    """Give pages back to the file system, or to the memory; they read as zeros then. OSError where it has no holes."""
    if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def punch_and_claim(fd: int, offset: int, length: int) -> None:
    """Give pages back to the file system, which tells the device, and take the space again.

    They read as zeros then. Raises OSError where the file system has no holes, or when somebody else took the space
    in between: then the range is a hole.
    """
    punch(fd, offset, length)
    os.posix_fallocate(fd, offset, length)
