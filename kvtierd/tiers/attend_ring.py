"""The staging ring: fixed memory through which parts of blocks come that attention cannot reach where they lie.

Parts of blocks of several shapes share it, in pieces of whole pages. Whoever asks first gets first, so that large parts
are not passed over for ever by small ones. What was brought ahead of any request goes as soon as a request needs room.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
from collections.abc import Callable

from kvtierd.core.checksum import Bytes
from kvtierd.storage.buffers import huge_buffer


class StagingRing:
    """Bounded memory, taken and given back in pieces; all methods run on the loop.

    `on_pressure` is asked to give back something that no request waits for; it says whether it did.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.on_pressure: Callable[[], bool] = lambda: False
        self._memory: Bytes | None = None
        self._begin = 0
        self._free: list[tuple[int, int]] = [(0, size_bytes)]
        """Free pieces as (offset, bytes), by offset; neighbours are joined."""
        self._serving = False
        self._waiters: collections.deque[tuple[int, asyncio.Future[int]]] = collections.deque()

    @property
    def memory(self) -> Bytes:
        """All of it, [size_bytes] uint8."""
        if self._memory is None:
            self._memory = huge_buffer(self.size_bytes)
            self._begin = int(self._memory.ctypes.data)
        return self._memory

    def view(self, offset: int, size: int) -> Bytes:
        """Memory of a piece, [size] uint8."""
        return self.memory[offset : offset + size]

    def address(self, offset: int) -> int:
        """Where a piece begins."""
        if self._memory is None:
            self.view(0, 1)
        return self._begin + offset

    def try_take(self, size: int) -> int:
        """Offset of a free piece, -1 where there is none or somebody waits for one."""
        return -1 if self._waiters else self._find(size)

    async def take(self, size: int) -> int:
        """Wait for a piece of at most the ring's size; its offset. Pieces are given in the order of asking."""
        assert 0 < size <= self.size_bytes, "the caller checks that a part fits"
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, waiter))
        self._serve()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(waiter.result(), size)
            else:
                waiter.cancel()
                self._serve()
            raise

    def give(self, offset: int, size: int) -> None:
        """Put a piece back."""
        self.used_bytes -= size
        at = bisect.bisect(self._free, (offset, 0))
        begin, end = offset, offset + size
        assert at == 0 or self._free[at - 1][0] + self._free[at - 1][1] <= begin, "a piece was given back twice"
        if at < len(self._free) and self._free[at][0] == end:
            end += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == begin:
            at -= 1
            begin = self._free.pop(at)[0]
        self._free.insert(at, (begin, end - begin))
        self._serve()

    def look_again(self) -> None:
        """Something has come that may give way: see whether somebody waits for its room."""
        if self._waiters:
            self._serve()

    def _find(self, size: int) -> int:
        for place, (offset, found) in enumerate(self._free):
            if found >= size:
                self._free[place : place + 1] = [(offset + size, found - size)] if found > size else []
                self.used_bytes += size
                return offset
        return -1

    def _serve(self) -> None:
        """Give the first in the row what is there."""
        if self._serving:
            return  # what gives way calls `give` from within the loop below, which looks again by itself
        self._serving = True
        try:
            self._serve_row()
        finally:
            self._serving = False

    def _serve_row(self) -> None:
        while self._waiters:
            size, waiter = self._waiters[0]
            if waiter.done():
                self._waiters.popleft()
                continue
            offset = self._find(size)
            if offset < 0:
                if not self.on_pressure():
                    return
                continue
            self._waiters.popleft()
            waiter.set_result(offset)
