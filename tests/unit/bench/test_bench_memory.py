"""The naive baseline, and the share of memory that holds KV."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtierd.bench import memory
from kvtierd.bench.naive_kv import ContiguousKv, token_bytes, use_of
from kvtierd.bench.workload import daemon_and_client
from kvtierd.core.geometry import Geometry

SHAPE = Geometry(block_size=16, layers=2, kv_heads=1, k_dim=8, v_dim=8)
WIDTH = token_bytes(SHAPE) // SHAPE.layers


def kv(tokens: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SHAPE.layers, tokens, WIDTH), np.uint8)


@pytest.mark.parametrize("growth", [0, 8])
def test_a_context_keeps_its_bytes_while_it_grows_and_moves(growth: int) -> None:
    request, data = ContiguousKv(SHAPE, 100, growth), kv(61)
    for begin in range(0, 61, 7):
        request.append(data[:, begin : begin + 7])
    assert np.array_equal(request.saved(), data)
    other = ContiguousKv(SHAPE, 100, growth)
    other.load(request.saved())
    assert np.array_equal(other.saved(), data)
    assert request.tokens == other.tokens == 61


def test_growing_copies_everything_each_time_and_static_never() -> None:
    static, grown = ContiguousKv(SHAPE, 64), ContiguousKv(SHAPE, 64, 8)
    for request in (static, grown):
        for number in range(32):
            request.append(kv(1, number))
    assert static.copied_bytes == 0
    assert static.taken_bytes == 64 * token_bytes(SHAPE)
    assert grown.copied_bytes == (8 + 16 + 24) * token_bytes(SHAPE)
    assert grown.taken_bytes == 32 * token_bytes(SHAPE)
    assert use_of([static, grown], SHAPE) == pytest.approx(64 / 96)


def test_more_than_the_longest_request_is_refused() -> None:
    request = ContiguousKv(SHAPE, 10)
    with pytest.raises(ValueError, match="11 tokens; room is for 10"):
        request.append(kv(11))


def test_contiguous_allocation_uses_what_the_founding_document_says() -> None:
    one, two = memory.MIXES.values()
    assert memory.contiguous(*one, 0) == pytest.approx(0.5)
    assert memory.contiguous(two[0], memory.CLAIMED_LONGEST, 0) == pytest.approx(0.187, abs=0.001)


def test_blocks_waste_no_more_than_the_last_one_of_each_request(tmp_path: Path) -> None:
    settings = {"nvme__directory": "", "gpu__capacity": 0, "host__capacity": 32 << 20, "host__chunk_bytes": 1 << 20}
    with daemon_and_client(tmp_path, 1, **settings) as (_, client):
        exact = memory.in_blocks(client, [256, 512], 64)
        client.purge()
        odd = memory.in_blocks(client, [250, 500], 64)
    assert 0.99 < exact <= 1
    assert odd == pytest.approx(exact * 750 / 768)
