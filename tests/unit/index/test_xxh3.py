"""The compiled xxh3-64 is the library's, for every length from the shortest on."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvtierd.index.xxh3 import SHORTEST, sums_of


@pytest.mark.parametrize("step", [1, 4099])
def test_every_length_has_the_sum_that_the_library_gives(step):
    rng = np.random.default_rng(step)
    data = rng.integers(0, 256, 2_000_000 if step > 1 else 4200, np.uint8)
    for size in range(SHORTEST, data.size - 7, step):
        (found,) = sums_of(np.array([data.ctypes.data + 7], np.uint64), size)
        assert int(found) == xxhash.xxh3_64_intdigest(data[7 : 7 + size].data), size


def test_many_parts_at_once_are_summed_each_by_itself():
    data = np.random.default_rng(1).integers(0, 256, (9, 4096), np.uint8)
    begins = data.ctypes.data + np.arange(9, dtype=np.uint64) * np.uint64(4096)
    expected = [xxhash.xxh3_64_intdigest(row[:3072].data) for row in data]
    assert sums_of(begins, 3072).tolist() == expected
    assert sums_of(begins[::-1], 3072).tolist() == expected[::-1]
    assert sums_of(begins[:0], 3072).size == 0


def test_extreme_bytes_have_the_library_s_sum_too():
    for value in (0, 255, 128):
        data = np.full(70_001, value, np.uint8)
        (found,) = sums_of(np.array([data.ctypes.data], np.uint64), data.size)
        assert int(found) == xxhash.xxh3_64_intdigest(data.data)


def test_parts_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="240 bytes; 241"):
        sums_of(np.zeros(1, np.uint64), SHORTEST - 1)
