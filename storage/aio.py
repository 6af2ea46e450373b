"""Many reads in one request of a thread: Linux's native asynchronous I/O, for files that are open with O_DIRECT.

Parts that lie apart from each other on the disk would be one `pread` each, and between two of them a thread waits for
its turn to run Python: the device idles meanwhile. Here all of them are handed to the kernel by one call and waited for
by another one, both without the GIL. Source: io_submit(2), io_getevents(2), and struct iocb of linux/aio_abi.h.

io_uring would do the same, and container runtimes forbid it by default.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
from typing import Any

import numpy as np
import numpy.typing as npt

MOST = 64
"""Reads that one thread has under way at once."""

_NUMBERS = {
    "x86_64": {"setup": 206, "destroy": 207, "getevents": 208, "submit": 209},
    "aarch64": {"setup": 0, "destroy": 1, "getevents": 4, "submit": 2},
}
"""System calls by machine; the C library has no functions for them."""

_PREAD = 0
_IOCB = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
        ("buffer", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("event", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("more", "<i8")])

Numbers = npt.NDArray[np.int64]


class AsyncReads:
    """A queue of one thread. Raises OSError where the system has none to give, or not this kind of machine."""

    def __init__(self) -> None:
        self._numbers = _NUMBERS.get(platform.machine())
        if self._numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._requests = np.zeros(MOST, _IOCB)
        self._requests["opcode"] = _PREAD
        self._pointers = int(self._requests.ctypes.data) + np.arange(MOST, dtype=np.uint64) * np.uint64(_IOCB.itemsize)
        self._events = np.zeros(MOST, _EVENT)
        self._context = ctypes.c_ulong(0)
        self._call("setup", ctypes.c_uint(MOST), ctypes.byref(self._context))

    def read(
        self, descriptors: Numbers, addresses: npt.NDArray[np.uint64], sizes: Numbers, offsets: Numbers
    ) -> Numbers:
        """Read `sizes` bytes at `offsets` of each file into memory at `addresses`, [n] each.

        What each brought, [n]: bytes, which may be fewer than asked for, or the negative errno of its failure. Returns
        when all have ended: memory is in use until then. Raises OSError where the system takes no requests at all.
        """
        found = np.zeros(sizes.size, np.int64)
        for begin in range(0, sizes.size, MOST):
            part = slice(begin, begin + MOST)
            self._read_some(descriptors[part], addresses[part], sizes[part], offsets[part], found[part])
        return found

    def close(self) -> None:
        """Give the queue back; again does nothing."""
        if self._context.value:
            self._call("destroy", self._context)
            self._context.value = 0

    def _read_some(
        self, descriptors: Numbers, addresses: Any, sizes: Numbers, offsets: Numbers, found: Numbers
    ) -> None:
        count = sizes.size
        requests = self._requests[:count]
        requests["data"] = np.arange(count)
        requests["fd"], requests["buffer"] = descriptors, addresses
        requests["size"], requests["offset"] = sizes, offsets
        begun = self._submit(count, found)
        while begun:
            begun -= self._wait(begun, found)

    def _submit(self, count: int, found: Numbers) -> int:
        """Hand over the first `count` requests: how many were taken. Of each that was not, note the errno."""
        begun = at = 0
        while at < count:
            try:
                taken = self._call("submit", self._context, ctypes.c_long(count - at), self._pointer(at))
            except InterruptedError:
                continue
            except OSError as error:
                found[at], taken = -(error.errno or errno.EIO), 0
                at += 1
            begun, at = begun + taken, at + taken
        return begun

    def _wait(self, count: int, found: Numbers) -> int:
        """Wait for so many to end, and note what they brought: how many did."""
        try:
            most, place = ctypes.c_long(count), ctypes.c_void_p(self._events.ctypes.data)
            ended = self._call("getevents", self._context, most, most, place, None)
        except InterruptedError:
            return 0
        events = self._events[:ended]
        found[events["data"].astype(np.intp)] = events["result"]
        return ended

    def _pointer(self, first: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(int(self._pointers.ctypes.data) + first * self._pointers.itemsize)

    def _call(self, name: str, *arguments: Any) -> int:
        assert self._numbers is not None
        found = int(_library().syscall(ctypes.c_long(self._numbers[name]), *arguments))
        if found < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return found


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library
