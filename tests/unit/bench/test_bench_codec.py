"""The bench of the codec: what it measures is the codec's work, and without torch it says what to install."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from kvtierd.bench import codec
from kvtierd.bench.copies import Threads
from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError


def test_without_torch_the_bench_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BenchError, match=r"pip install 'kvtierd\[demo\]'"):
        list(codec.rows(Options()))


def test_every_block_of_the_bench_goes_to_fp8_and_back() -> None:
    blocks, threads = codec.Blocks(3), Threads(2)
    try:
        blocks.encode_apart(threads)
        blocks.decode(threads)
        decoded = blocks.back.copy()
        blocks.scatter(threads)
        blocks.back[:] = 0
        blocks.gather(threads)
    finally:
        threads.close()
    values = [(array.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for array in (blocks.exact, blocks.back)]
    for exact, back in zip(*values, strict=True):
        assert 0.02 < np.linalg.norm(exact - back) / np.linalg.norm(exact) < 0.035
    assert np.array_equal(blocks.back, decoded)  # every page is of one block
    assert blocks.bytes == 3 * codec.SHAPE.slot_bytes
