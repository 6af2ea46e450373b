"""Attention on a GPU as the daemon computes it: arguments, streams, copies, splits and merging around the kernels.

In the simulator over a stand-in for CUDA (tests/gpu/simulated_cuda.py), or on a device.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu import attend_cuda, cuda_device
from kvtierd.gpu.attend import Blocks, checked_query
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.cuda_interface import CudaError
from kvtierd.gpu.kernels.registry import cuda_is_simulated
from kvtierd.gpu.reference.attention import relative_error
from tests.gpu.simulated_cuda import make_device
from tests.unit.gpu.attention_blocks import make_kv

POOL, PIECE = 1 << 20, 1 << 16
SIMULATED = pytest.mark.skipif("not cuda_is_simulated()", reason="looks into the stand-in")


@pytest.fixture(params=[False, True], ids=["late", "eager"])
def eager(request):
    return request.param


class Placed:
    """A sequence's blocks on a device: block i in the pool ("gpu"), in registered host memory, or in other."""

    def __init__(self, device, kv, places, capacity=POOL):
        self.host = np.frombuffer(mmap.mmap(-1, capacity), np.uint8)
        self.other = np.frombuffer(mmap.mmap(-1, capacity), np.uint8)
        for _ in device.register_pieces(self.host):
            pass
        addresses, scales, begin = [], [], {"gpu": device.pointer, "host": self.host.ctypes.data, "other": 0}
        begin["other"], used = self.other.ctypes.data, dict.fromkeys(begin, 0)
        for raw, place, address, scale in zip(kv.memory, places, kv.blocks.addresses, kv.blocks.scales, strict=True):
            at = used[place]
            if place == "gpu":
                device.copy_in(at, raw)
            else:
                {"host": self.host, "other": self.other}[place][at : at + raw.size] = raw
            addresses.append(begin[place] + at)
            scales.append(begin[place] + at + int(scale) - int(address) if scale else 0)
            used[place] += -(-raw.size // 256) * 256
        if cuda_is_simulated():
            device.runtime.copied = dict.fromkeys(device.runtime.copied, 0)
        b = kv.blocks
        self.blocks = Blocks.make(addresses, scales=scales, dtypes=b.dtypes, tokens=b.tokens, positions=b.positions)


def shape(**fields):
    return Geometry(**{"block_size": 8, "layers": 1, "kv_heads": 1, "k_dim": 64, "v_dim": 64, **fields})


def compare(
    device, geometry, length, heads, places, *,
    dtypes=("bf16",), queries=1, pieces=False, rng=None, v_dim=0, capacity=POOL, **options,
):  # fmt: skip
    """Compute in one go or in pieces, against the oracle; returns the attention that computed."""
    rng = rng or np.random.default_rng(length * 10 + heads)
    kv = make_kv(rng, geometry, length, dtypes, v_dim=v_dim)
    placed = Placed(device, kv, [places[i % len(places)] for i in range(len(kv.memory))], capacity)
    q = rng.standard_normal((queries, heads, geometry.k_dim)).astype(np.float32)
    query = checked_query(q, geometry, layer=0, length=length, available=length, v_dim=v_dim, **options)
    attention = device.attention(HostAttention(1))
    partial = attention.begin(query)
    bounds = attention.pieces(query, placed.blocks) if pieces else [(0, len(placed.blocks))]
    try:
        for begin, end in bounds:
            assert attention.compute(partial, placed.blocks, begin, end)
    finally:
        device.unregister_host(placed.host)
    output, lse = partial.result()
    expected, expected_lse = kv.reference(query)
    assert relative_error(output, expected) <= 2e-5
    assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    return attention


def test_blocks_in_the_pool_and_in_pinned_memory_are_read_where_they_lie(monkeypatch):
    monkeypatch.setattr(cuda_device, "PIECE_BYTES", PIECE)
    device = make_device(POOL)
    compare(device, shape(block_size=4), 10, 4, ["host", "gpu", "gpu"], dtypes=("coded", "bf16"))
    if cuda_is_simulated():
        runtime = device.runtime
        assert [name.split("_k")[0] for name in runtime.launched] == [
            "attention_mma_bf16", "attention_merge", "attention_mma_fp8_e4m3", "attention_merge",
        ]  # fmt: skip
        assert runtime.copied["pageable"] == 0
    device.close()


def test_what_several_thread_blocks_read_is_copied_once_and_each_buffer_waits_for_its_reader(monkeypatch, eager):
    monkeypatch.setattr(cuda_device, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(attend_cuda, "STAGE_BYTES", 1 << 11)  # two blocks
    device = make_device(POOL, eager=eager)
    compare(device, shape(block_size=4), 21, 2, ["host", "other", "gpu", "host"], queries=2, window=20)
    if cuda_is_simulated():
        runtime, part = device.runtime, 2 * 4 * 64 * 2
        assert runtime.copied["pageable"] == 2 * part
        assert runtime.copied["pinned"] >= 3 * part
        assert len([name for name in runtime.launched if "simt" in name]) == 4, "the pool, then three times a buffer"
    device.close()


def test_a_piece_at_a_time_is_the_same_as_all_at_once(monkeypatch):
    monkeypatch.setattr(attend_cuda, "PIECE_NS", 0)
    device = make_device(POOL)
    attention = compare(device, shape(kv_heads=2), 20, 2, ["gpu", "host"], pieces=True, soft_cap=2.0)
    query = checked_query(np.ones((1, 2, 64), np.float32), shape(kv_heads=2), layer=0, length=9, available=9)
    assert list(attention.pieces(query, Blocks.make([4096, 8192], tokens=[8, 1], positions=[0, 8]))) == [(0, 1), (1, 2)]
    device.close()


def test_dims_without_a_kernel_are_left_to_the_processors():
    device = make_device(POOL)
    compare(device, shape(k_dim=48, v_dim=32), 29, 3, ["gpu", "host", "other"], dtypes=("bf16", "coded"))
    if cuda_is_simulated():
        assert device.runtime.launched == []
    device.close()


def test_many_queries_go_in_passes_that_are_merged_apart(monkeypatch):
    monkeypatch.setattr("kvtierd.gpu.attend_host.ROWS_AT_ONCE", 2)
    device = make_device(POOL)
    compare(device, shape(), 11, 1, ["gpu", "host"], queries=3)
    device.close()


@SIMULATED
def test_an_error_of_a_kernel_is_told_and_leaves_nothing_under_way():
    device = make_device(POOL)
    device.runtime.failing = "attention_merge"
    with pytest.raises(CudaError, match="attention_merge: CUDA_ERROR_ILLEGAL_ADDRESS"):
        compare(device, shape(), 9, 1, ["gpu", "host"])
    assert all(stream.done == stream.begun for stream in device.runtime.streams)
    device.runtime.failing = ""
    compare(device, shape(), 9, 1, ["gpu"])
    device.close()
    assert device.runtime.pools == {}
    assert device.runtime.registered == {}


@SIMULATED
def test_host_memory_that_is_not_registered_is_no_memory_of_the_device():
    device = make_device(POOL)
    memory = np.frombuffer(mmap.mmap(-1, POOL), np.uint8)
    with pytest.raises(IndexError, match="cannot read 16 bytes"):
        device.runtime.seen(memory.ctypes.data, 16)
    device.register_host(memory)
    found = device.device_pointer(memory)
    assert device.runtime.seen(found, POOL).ctypes.data == memory.ctypes.data
    device.close()
