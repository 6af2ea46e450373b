"""The reference for host memory: the same bytes moved by NumPy's plain copy, on as many threads."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtierd.core.checksum import Bytes

_HUGE_BYTES = 2 << 20


def private_memory(count: int, seed: int, *, huge: bool = False) -> Bytes:
    """`count` random bytes in a private mapping, every page present; no page is a copy of the zero page.

    `huge`: in huge pages where the kernel gives them, as the pool of a device and NumPy's own large arrays are.
    """
    mapping = mmap.mmap(-1, count + huge * _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory: Bytes = np.frombuffer(mapping, np.uint8)
    if huge:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = memory[-memory.ctypes.data % _HUGE_BYTES :][:count]
    words = memory[: count // 8 * 8].view(np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 2**63, 1 << 17, np.uint64)[np.arange(words.size) % (1 << 17)]
    return memory


def cut(memory: Bytes, block_bytes: int) -> list[Bytes]:
    """Views of the whole blocks in a memory."""
    return [memory[at : at + block_bytes] for at in range(0, memory.size - block_bytes + 1, block_bytes)]


def batches(blocks: Sequence[Bytes], count: int) -> Iterator[Sequence[Bytes]]:
    """Blocks in groups of `count`."""
    for at in range(0, len(blocks), count):
        yield blocks[at : at + count]


class Threads:
    """A fixed set of threads that share out the blocks of a batch; used by both sides of a comparison."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="bench")

    def each(self, work: Callable[[int, int], None], items: int) -> None:
        """Call `work(begin, end)` on every thread with its share of `items`, and wait; an error is raised here."""
        edges = [items * index // self.count for index in range(self.count + 1)]
        shares = [self._pool.submit(work, begin, end) for begin, end in itertools.pairwise(edges) if end > begin]
        for share in shares:
            share.result()

    def copy(self, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
        """Copy block by block, `sources[i]` into `targets[i]`."""

        def work(begin: int, end: int) -> None:
            for source, target in zip(sources[begin:end], targets[begin:end], strict=True):
                target[:] = source

        self.each(work, len(sources))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
