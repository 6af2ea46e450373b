"""Copies between the caller's memory and slots, with checksums, on a few threads (protocol/SPEC.md §3).

NumPy copies without the GIL; the hash holds it, so it runs over pieces just after they were copied, while other
threads copy.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtierd.core.checksum import (
    Bytes,
    CopyParts,
    Sums,
    copy_and_sum,
    copy_parts,
    fill_and_sum,
    layer_sums,
    packed_sums,
    unpack,
)
from kvtierd.core.geometry import Geometry

PARALLEL_BYTES = 1 << 20
"""Less than this is copied by the calling thread: waking another costs more."""


def default_threads() -> int:
    """2 to 4, by the CPUs that we may use."""
    return max(2, min(4, len(os.sched_getaffinity(0))))


class Copier:
    """Runs one function over many blocks; its threads start with the first large copy. `copies` moves the parts."""

    def __init__(self, threads: int, copies: CopyParts | None = None) -> None:
        if threads < 1:
            raise ValueError(f"copy_threads is {threads}; at least 1 is wanted")
        self._threads = threads
        self._copies = copies or copy_parts
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def copy_out(self, views: Sequence[Bytes], out: Sequence[Bytes] | Bytes, geometry: Geometry) -> None:
        """Copy slots into packed blocks, without looking at the bytes."""
        self.spread(lambda i: unpack(views[i], out[i], geometry, self._copies), len(views), geometry)

    def copy_out_and_sum(self, views: Sequence[Bytes], out: Sequence[Bytes] | Bytes, geometry: Geometry) -> Sums:
        """Copy slots into packed blocks and hash what arrived: [n, layers] u64."""
        sums = np.empty((len(views), geometry.layers), np.uint64)

        def copy(i: int) -> None:
            copy_and_sum(views[i], out[i], geometry, sums[i], packed=True, copies=self._copies)

        self.spread(copy, len(views), geometry)
        return sums

    def fill(self, blocks: Sequence[Bytes] | Bytes, views: Sequence[Bytes], geometry: Geometry) -> Sums:
        """Copy packed blocks into slots and hash them as they land: [n, layers] u64."""
        sums = np.empty((len(views), geometry.layers), np.uint64)

        def fill(i: int) -> None:
            fill_and_sum(blocks[i], views[i], geometry, sums[i], self._copies)

        self.spread(fill, len(views), geometry)
        return sums

    def sum_slots(self, views: Sequence[Bytes], geometry: Geometry) -> Sums:
        """Hash blocks in slot form where they lie: [n, layers] u64."""
        sums = np.empty((len(views), geometry.layers), np.uint64)
        self.spread(lambda i: layer_sums(views[i], geometry, sums[i]), len(views), geometry)
        return sums

    def sum_packed(self, blocks: Sequence[Bytes] | Bytes, geometry: Geometry) -> Sums:
        """Hash packed blocks: [n, layers] u64."""
        sums = np.empty((len(blocks), geometry.layers), np.uint64)
        self.spread(lambda i: packed_sums(blocks[i], geometry, sums[i]), len(blocks), geometry)
        return sums

    def spread(self, work: Callable[[int], object], count: int, geometry: Geometry) -> None:
        """Call `work` with 0 to count - 1, each for a block of this geometry; returns when all have ended."""
        threads = min(self._threads, count)
        if threads <= 1 or count * geometry.block_bytes < PARALLEL_BYTES:
            for i in range(count):
                work(i)
            return
        pool = self._helpers()

        # Each takes the next block when it is done with one: a thread that lost its CPU for a while holds up nobody.
        claims = itertools.count()

        def share() -> None:
            while (i := next(claims)) < count:
                work(i)

        others = [pool.submit(share) for _ in range(1, threads)]
        try:
            share()
        finally:
            # Nobody may still be writing into the caller's memory when we return, also not after an error. Who has not
            # begun would find nothing left to do, and may have to wait for the copies of another caller first.
            errors = [None if other.cancel() else other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error

    def _helpers(self) -> ThreadPoolExecutor:
        with self._lock:  # callers of several threads may come at the same time
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="kvtierd-copy")
            return self._pool

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def abandon(self) -> None:
        """In a forked child: the threads stayed with the parent."""
        self._lock = threading.Lock()
        self._pool = None
