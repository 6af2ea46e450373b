from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtierd.index import memory
from kvtierd.index.memory import HUGE_PAGE_BYTES, Backing, reserve


def resident_bytes(array):
    """Bytes of an array's pages that have memory, by /proc/self/pagemap (bit 63 is present)."""
    first = array.ctypes.data // 4096
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read(-(-array.nbytes // 4096) * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * 4096


def wait_until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the memory was not backed"
        time.sleep(0.005)


def test_reserved_memory_is_zero_and_not_yet_there():
    array = reserve((1 << 20, 64), np.uint8)
    assert resident_bytes(array) == 0
    assert not array[::4096].any()


@pytest.mark.parametrize("rows", [0, 1, 100, 1 << 20])
def test_arrays_have_the_shape_and_are_aligned(rows):
    array = reserve((rows, 8), np.uint64)
    assert array.shape == (rows, 8)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0
    if array.nbytes >= 2 * HUGE_PAGE_BYTES:
        assert array.ctypes.data % HUGE_PAGE_BYTES == 0


def test_memory_is_backed_ahead_of_its_use_and_not_all_at_once():
    array = reserve((1 << 20, 64), np.uint8)
    backing = Backing(array, 1000)
    wait_until(lambda: resident_bytes(array[:1000]) >= 1000 * 64)
    for row in range(0, 300_001, 1000):
        backing.reached(row)
    wait_until(lambda: resident_bytes(array[:301_000]) >= 301_000 * 64)
    assert resident_bytes(array) <= 301_000 * 64 + 3 * HUGE_PAGE_BYTES
    assert not array.any()


def test_backing_ends_with_the_array():
    array = reserve((100_000, 64), np.uint8)
    backing = Backing(array, 90_000)
    for row in (0, 50_000, 100_000, 100_000):
        backing.reached(row)
    wait_until(lambda: resident_bytes(array) >= array.nbytes)


def test_touching_changes_nothing_that_others_write():
    array = reserve((4 * HUGE_PAGE_BYTES,), np.uint8)
    words = array.view(np.uint64)
    stop = threading.Event()

    def touch():
        while not stop.is_set():
            memory._touch_pages(array, 0, array.size)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        for value in range(1, 200):
            words[::512] = value
            assert (words[::512] == value).all()
    finally:
        stop.set()
        thread.join()


def test_small_arrays_start_no_backing():
    array = reserve((1000, 64), np.uint8)
    Backing(array, 10).reached(1000)
    assert resident_bytes(array) == 0
