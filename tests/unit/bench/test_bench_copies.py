"""The plain copies that the host bench measures against."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtierd.bench.copies import Threads, batches, cut, private_memory


def test_every_page_of_private_memory_is_written() -> None:
    memory = private_memory(5 * 4096 + 8, seed=1)
    assert memory.size == 5 * 4096 + 8
    assert all(memory[at : at + 4096].any() for at in range(0, memory.size, 4096))
    assert (memory != private_memory(memory.size, seed=2)).any()


def test_blocks_are_views_and_batches_lose_none() -> None:
    memory = np.zeros(10 * 64 + 5, np.uint8)
    blocks = cut(memory, 64)
    assert [block.size for block in blocks] == [64] * 10
    assert all(np.shares_memory(block, memory) for block in blocks)
    assert [len(batch) for batch in batches(blocks, 4)] == [4, 4, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_threads_copy_every_block(count: int) -> None:
    source, target = private_memory(7 * 64, seed=3), np.zeros(7 * 64, np.uint8)
    threads = Threads(count)
    try:
        threads.copy(cut(source, 64), cut(target, 64))
    finally:
        threads.close()
    assert (source == target).all()


def test_an_error_of_a_thread_is_raised_and_the_threads_end() -> None:
    threads = Threads(2)
    try:
        with pytest.raises(ValueError, match="broadcast"):
            threads.copy([np.zeros(3, np.uint8)] * 2, [np.zeros(4, np.uint8)] * 2)
    finally:
        threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bench")]
