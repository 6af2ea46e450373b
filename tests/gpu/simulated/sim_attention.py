"""Both forms of the CUDA attention kernels in the simulator, on tiny shapes, against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import Blocks, checked_query
from kvtierd.gpu.kernels.attention import MERGE, Variant, run_splits
from kvtierd.gpu.kernels.attention_common import NUMBERS, Q_EXPONENT
from kvtierd.gpu.kernels.registry import cuda_is_simulated
from kvtierd.gpu.kernels.twins import Everywhere
from kvtierd.gpu.reference.attention import relative_error
from tests.unit.gpu.attention_blocks import make_kv

LOG2_E = 1.4426950408889634
POOLS_APART = 1 << 30


def pooled(kv):
    """The blocks in one array, as slots of a pool are, and where they lie in it."""
    sizes = [-(-raw.size // 16) * 16 for raw in kv.memory]
    pool = np.full(sum(sizes) + 16, 0xFF, np.uint8)
    pool = pool[-pool.ctypes.data % 16 :]
    base, at, addresses, scales = pool.ctypes.data, 0, [], []
    for raw, size, address, scale in zip(kv.memory, sizes, kv.blocks.addresses, kv.blocks.scales, strict=True):
        pool[at : at + raw.size] = raw
        addresses.append(base + at)
        scales.append(base + at + int(scale) - int(address) if scale else 0)
        at += size
    b = kv.blocks
    return pool, Blocks.make(addresses, scales=scales, dtypes=b.dtypes, tokens=b.tokens, positions=b.positions)


def numbers_of(query):
    g, value_dim = query.geometry, query.geometry.v_dim or query.geometry.k_dim
    nhd, latent = g.layout == "nhd", g.v_dim == 0
    found = np.zeros(NUMBERS, np.int64)
    found[:11] = (
        g.kv_heads, query.group, query.q.shape[0], query.position, query.window,
        g.kv_heads * g.k_dim if nhd else g.k_dim, g.k_dim if nhd else g.block_size * g.k_dim,
        g.kv_heads * value_dim if nhd else value_dim, value_dim if nhd else g.block_size * value_dim,
        0 if latent else g.block_size * g.kv_heads * g.k_dim, 0 if latent else g.kv_heads,
    )  # fmt: skip
    return found


def attend_simulated(kv, query, form, rows, dtypes, *, threads=32, part=0, exponent=0, below=False):
    g = query.geometry
    pool, blocks = pooled(kv)
    memory, base = pool, pool.ctypes.data
    if below:
        base = pool.ctypes.data + POOLS_APART
        memory = Everywhere(base, lambda address, count: pool[address - pool.ctypes.data :][:count])
    unit = query.soft_cap or 1 / LOG2_E
    q = query.q.astype(np.float32) * np.float32(query.scale / unit) * np.float32(2.0**-exponent)
    q = q.reshape(-1, g.kv_heads, query.group, g.k_dim).transpose(1, 0, 2, 3).reshape(-1).copy()
    numbers = numbers_of(query)
    numbers[Q_EXPONENT] = exponent
    count, v_dim = g.kv_heads * query.rows, query.values_dim
    top, total = np.full(count, -np.inf, np.float32), np.zeros(count, np.float32)
    summed = np.zeros(count * v_dim, np.float32)
    for code, dtype in dtypes.items():
        variant = Variant(form, dtype, g.k_dim, v_dim, rows, part or v_dim)
        some = blocks.take(blocks.dtypes == code)
        tops, totals, sums, splits = run_splits(
            variant, memory, base, q, some, numbers, query.soft_cap * LOG2_E, 2, threads=threads
        )
        MERGE.launch(count, tops, totals, sums, splits, v_dim, top, total, summed, threads=16)
    with np.errstate(invalid="ignore"):
        output = np.where(total[:, None] == 0, 0, summed.reshape(count, v_dim) / total[:, None])
    order = (g.kv_heads, query.q.shape[0], query.group)
    output = output.reshape(*order, v_dim).transpose(1, 0, 2, 3).reshape(query.q.shape[0], -1, v_dim)
    lse = ((top + np.log2(total)) / LOG2_E).reshape(order).transpose(1, 0, 2).reshape(query.q.shape[0], -1)
    return output, lse


CODES = {0: "bf16", 1: "fp16", 2: "fp32", 3: "fp8_e4m3"}


def compare(form, rows, dtypes, geometry, length, heads, *, queries=1, tolerance=2e-6, **options):
    names = {code: name for code, name in CODES.items() if name in dtypes}
    run = {name: options.pop(name) for name in ("threads", "part", "exponent", "below") if name in options}
    rng = np.random.default_rng(length * 10 + heads)
    v_dim = options.pop("v_dim", 0)
    kv = make_kv(rng, geometry, length, dtypes, v_dim=v_dim)
    q = rng.standard_normal((queries, heads, geometry.k_dim)).astype(np.float32)
    query = checked_query(q, geometry, layer=0, length=length, available=length, v_dim=v_dim, **options)
    output, lse = attend_simulated(kv, query, form, rows, names, **run)
    expected, expected_lse = kv.reference(query)
    assert relative_error(output, expected) <= tolerance
    assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


LONG = pytest.mark.torture
"""Many threads of the operating system for long: `make torture`, and every run on a device."""


def shape(**fields):
    return Geometry(**{"block_size": 8, "layers": 1, "kv_heads": 1, "k_dim": 32, "v_dim": 32, **fields})


@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(name, marks=LONG) for name in ("fp16", "fp32", "fp8_e4m3"))])
def test_cuda_cores_compute_each_dtype(dtype):
    compare("simt", 2, (dtype,), shape(kv_heads=2), 13, 4)


@pytest.mark.skipif(not cuda_is_simulated(), reason="a device needs no stand-in for memory that lies anywhere")
def test_blocks_and_their_scales_may_lie_below_the_memory_that_a_kernel_is_given():
    compare("simt", 1, ("fp8_e4m3",), shape(), 7, 1, below=True)


@LONG
def test_cuda_cores_with_two_warps_mixed_dtypes_window_cap_and_other_layout():
    compare(
        "simt", 2, ("bf16", "fp8_e4m3"), shape(layout="hnd", k_dim=48, v_dim=16), 21, 3,
        queries=2, threads=64, window=9, soft_cap=2.0,
    )  # fmt: skip


def test_case_25_cuda_cores_read_values_from_a_latent():
    compare("simt", 1, ("bf16",), shape(k_dim=288, v_dim=0), 5, 1, v_dim=272)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3"])
def test_tensor_cores_compute_each_dtype(dtype):
    # Both halves of q and of the weights have 8 bits of precision in bf16 and 11 in fp16.
    compare("mma", 8, (dtype,), shape(block_size=24, v_dim=16), 17, 5, tolerance=2e-5, exponent=-2)


@LONG
def test_tensor_cores_with_sixteen_rows_two_warps_mixed_dtypes_and_window():
    compare(
        "mma", 16, ("bf16", "fp8_e4m3"), shape(block_size=20, k_dim=48, v_dim=80), 35, 11,
        threads=64, window=33, tolerance=2e-5,
    )  # fmt: skip


def test_case_25_tensor_cores_read_parts_of_values_from_a_latent():
    compare("mma", 8, ("bf16",), shape(k_dim=48, v_dim=0), 7, 4, v_dim=32, part=16, tolerance=2e-5)
