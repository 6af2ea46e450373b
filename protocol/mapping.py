"""A shared mapping of a file, as NumPy takes it: no descriptor kept, unmapped with its last view, not inherited.

Python's own mmap keeps a duplicate of the descriptor for every mapping, and an arena of many chunks would use up the
limit of open files; it would also unmap, in a forked child, addresses that the mapping never had there. And it cannot
choose addresses: where a file lies in huge pages, a mapping that begins at the boundary of one uses them, and a copy of
blocks takes about a quarter less time than through 4 KiB pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_MAP_FIXED_NOREPLACE = 0x100000  # asm-generic/mman-common.h, Linux 4.17
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25  # Linux 6.1
HUGE_PAGE_BYTES = 2 << 20
"""What one entry of the page table maps at most; x86-64 and arm64 with 4 KiB pages."""
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SharedMapping:
    """`nbytes` of a file, mapped shared. `np.asarray` makes a [nbytes] uint8 view that keeps it alive.

    Raises OSError when the kernel refuses. A forked child does not get the mapping: one that kept writing after its
    parent's end would write into slots that changed hands.
    """

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _map_aligned(nbytes, protection, descriptor)
        self.address = address
        self.nbytes = nbytes
        self._unmap = weakref.finalize(self, _libc.munmap, address, nbytes)
        self._unmap.atexit = False  # a thread may still be copying; the kernel unmaps soon enough
        if _libc.madvise(address, nbytes, mmap.MADV_DONTFORK):
            raise OSError(ctypes.get_errno(), "cannot keep a mapping out of forked children")
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, not writable)}
        _alive.add(self)

    def advise(self, advice: int) -> int:
        """madvise the whole mapping; 0, or the kernel's errno."""
        return ctypes.get_errno() if _libc.madvise(self.address, self.nbytes, advice) else 0

    def collapse(self) -> int:
        """Have a memory file that has one page at least in each piece of HUGE_PAGE_BYTES lie in huge pages, holes
        filled with zeros; 0, or the errno of the first piece that could not, the rest being as it was or done."""
        return self.advise(_MADV_COLLAPSE)

    def reserve_in_child(self) -> None:
        """After a fork, in the child: occupy the addresses, so that a view that came along faults, whatever the child
        allocates."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
        try:
            _map(self.address, self.nbytes, 0, flags, -1)
        except OSError:
            self._unmap.detach()  # something of the child's is there already: not ours to unmap


def _map_aligned(nbytes: int, protection: int, descriptor: int) -> int:
    """Map a file shared, from the boundary of a huge page if it is as large as one."""
    if nbytes < HUGE_PAGE_BYTES:
        return _map(None, nbytes, protection, mmap.MAP_SHARED, descriptor)
    # Addresses with room to move are reserved first, so that nobody else gets what lies around the boundary.
    reserved = nbytes + HUGE_PAGE_BYTES
    base = _map(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _map(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(base, reserved)
        raise
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    for begin, size in ((base, address - base), (end, base + reserved - end)):
        if size:
            _libc.munmap(begin, size)
    return address


def _map(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
    if result is None or result == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)


_alive: weakref.WeakSet[SharedMapping] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for mapping in list(_alive):
        mapping.reserve_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
