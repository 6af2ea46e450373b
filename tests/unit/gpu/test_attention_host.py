from __future__ import annotations

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu import attend
from kvtierd.gpu.attend import Blocks, checked_query, merge
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.host_kernels import attention_vectors
from kvtierd.gpu.reference.attention import relative_error
from tests.unit.gpu.attention_blocks import make_kv

DIMS = [64, 80, 96, 128, 192, 256]
EXACT = 1e-5
"""The goal of the accuracy bench: relative L2 of each head's output."""


def geometry(**fields):
    return Geometry(**{"block_size": 16, "layers": 2, "kv_heads": 2, "k_dim": 64, "v_dim": 64, **fields})


def attend_all(kv, query, device=None, order=None, pieces=True):
    device = device or HostAttention()
    blocks = kv.blocks if order is None else kv.blocks.take(order)
    partial = device.begin(query)
    for begin, end in device.pieces(query, blocks) if pieces else [(0, len(blocks))]:
        assert device.compute(partial, blocks, begin, end)
    return partial.result()


def check(kv, query, **options):
    output, lse = attend_all(kv, query, **options)
    expected, expected_lse = kv.reference(query)
    assert relative_error(output, expected) <= EXACT
    assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    return output, lse


def ask(kv, length, heads=4, queries=1, rng=None, **options):
    rng = rng or np.random.default_rng(1)
    q = options.pop("q", None)
    if q is None:
        q = rng.standard_normal((queries, heads, kv.geometry.k_dim)).astype(np.float32)
    v_dim = kv.v_dim if kv.geometry.v_dim == 0 else 0
    return checked_query(
        q, kv.geometry, layer=0, length=length, available=kv.blocks.token_count, v_dim=v_dim, **options
    )


def test_codes_of_dtypes_are_those_of_the_kernel():
    names = ("bf16", "fp16", "fp32", "fp8_e4m3")
    codes = (attention_vectors.BF16, attention_vectors.FP16, attention_vectors.FP32, attention_vectors.E4M3)
    assert tuple(attend.DTYPE_CODES[name] for name in names) == codes


@pytest.mark.parametrize("dtype", attend.DTYPE_CODES)
@pytest.mark.parametrize("dim", DIMS)
def test_each_dtype_and_head_dim_is_what_the_oracle_says(dtype, dim):
    kv = make_kv(np.random.default_rng(dim), geometry(k_dim=dim, v_dim=dim), 39, (dtype,))
    check(kv, ask(kv, 39))


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 17])
def test_groups_of_query_heads_in_both_layouts(layout, group):
    kv = make_kv(np.random.default_rng(group), geometry(layout=layout), 50, ("bf16", "fp8_e4m3"))
    check(kv, ask(kv, 50, heads=2 * group))


@pytest.mark.parametrize(("k_dim", "v_dim"), [(192, 128), (64, 96), (40, 24), (7, 100), (1, 1), (129, 65)])
def test_case_25_k_and_v_dims_may_differ_and_be_odd(k_dim, v_dim):
    kv = make_kv(np.random.default_rng(3), geometry(k_dim=k_dim, v_dim=v_dim), 37, tuple(attend.DTYPE_CODES), shift=1)
    check(kv, ask(kv, 37))


@pytest.mark.parametrize("dtype", attend.DTYPE_CODES)
def test_case_25_a_latent_form_reads_its_values_from_its_keys(dtype):
    kv = make_kv(np.random.default_rng(4), geometry(kv_heads=1, k_dim=576, v_dim=0), 70, (dtype,), v_dim=512)
    check(kv, ask(kv, 70, heads=16))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200])
@pytest.mark.parametrize("block_size", [16, 128])
def test_lengths_around_block_and_tile_edges(length, block_size):
    kv = make_kv(np.random.default_rng(length), geometry(block_size=block_size), length)
    check(kv, ask(kv, length))


@pytest.mark.parametrize("queries", [2, 5, 40, 300])
@pytest.mark.parametrize("window", [0, 1, 7, 20, 64])
def test_several_queries_see_what_causality_and_window_let_them(queries, window):
    length = max(queries, 45)
    kv = make_kv(np.random.default_rng(queries), geometry(kv_heads=1), length, ("bf16", "fp8_e4m3", "fp32"))
    check(kv, ask(kv, length, heads=2, queries=queries, window=window))


def test_case_25_a_sliding_window_ends_where_the_query_stands_beyond_the_blocks():
    kv = make_kv(np.random.default_rng(5), geometry(), 60)
    check(kv, ask(kv, 60, position=70, window=30))
    output, lse = attend_all(kv, ask(kv, 60, position=100, window=30))
    assert not output.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
def test_a_soft_cap_and_sinks(soft_cap):
    kv = make_kv(np.random.default_rng(6), geometry(), 90, ("bf16", "fp8_e4m3"))
    sinks = np.array([-np.inf, -3.0, 0.5, 20.0])
    check(kv, ask(kv, 90, soft_cap=soft_cap))
    check(kv, ask(kv, 90, sinks=sinks, scale=1.0))
    check(kv, ask(kv, 90, soft_cap=soft_cap, sinks=sinks))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_queries_and_results_of_each_dtype(dtype):
    kv = make_kv(np.random.default_rng(7), geometry(), 33)
    q = attend.from_fp32(np.random.default_rng(8).standard_normal((1, 4, 64)).astype(np.float32), dtype)
    query = ask(kv, 33, q=q)
    exact, _ = check(kv, query)
    partial = HostAttention().begin(query)
    HostAttention().compute(partial, kv.blocks)
    output, lse = partial.result(dtype)
    assert output.dtype == q.dtype
    assert lse.dtype == np.float32
    assert np.allclose(attend.to_fp32(output), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("block_size", [128, 80])  # 16 blocks to a chunk, and a number that is none
def test_the_result_does_not_depend_on_threads_or_pieces(block_size):
    kv = make_kv(np.random.default_rng(9), geometry(block_size=block_size, kv_heads=8, k_dim=128, v_dim=128), 8000)
    query = ask(kv, 8000, heads=32)
    one, two = HostAttention(threads=1), HostAttention()
    results = [
        attend_all(kv, query, one),
        attend_all(kv, query, one, pieces=False),
        attend_all(kv, query, two),
        attend_all(kv, query, two, pieces=False),
    ]
    for output, lse in results[1:]:
        assert np.array_equal(output, results[0][0])
        assert np.array_equal(lse, results[0][1])


def test_orders_and_places_of_blocks_change_nothing_beyond_rounding():
    rng = np.random.default_rng(10)
    kv = make_kv(rng, geometry(), 333, ("bf16", "fp8_e4m3", "fp16", "fp32"))
    query = ask(kv, 333, queries=3)
    before, _ = check(kv, query)
    for _ in range(3):
        after, _ = check(kv, query, order=rng.permutation(len(kv.blocks)))
        assert relative_error(after, before.astype(np.float64)) <= 1e-6


def test_results_merge_with_an_outside_tail_into_one_pass():
    kv = make_kv(np.random.default_rng(11), geometry(), 100, ("bf16", "fp8_e4m3"))
    query = ask(kv, 100, position=99)
    sides = [slice(0, 3), slice(3, 5), slice(5, 7)]
    parts = []
    for side in sides:
        partial = HostAttention().begin(query)
        HostAttention().compute(partial, kv.blocks.take(side))
        parts.append(partial.result())
    expected, expected_lse = kv.reference(query)
    for order in ([0, 1, 2], [2, 0, 1]):
        output, lse = merge([parts[i] for i in order])
        assert relative_error(output, expected) <= EXACT
        assert np.allclose(lse, expected_lse, rtol=1e-5)


def test_merging_nothing_is_refused_and_merging_with_the_empty_changes_nothing():
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])
    some = (np.ones((1, 2, 3), np.float32), np.zeros((1, 2), np.float32))
    none = (np.zeros((1, 2, 3), np.float32), np.full((1, 2), -np.inf, np.float32))
    output, lse = merge([none, some, none])
    assert np.array_equal(output, some[0])
    assert np.array_equal(lse, some[1])
    assert np.isneginf(merge([none, none])[1]).all()


def test_no_blocks_and_empty_blocks_give_nothing():
    kv = make_kv(np.random.default_rng(12), geometry(), 40)
    query = ask(kv, 40)
    device = HostAttention()
    partial = device.begin(query)
    assert list(device.pieces(query, kv.blocks.take(slice(0, 0)))) == []
    device.compute(partial, kv.blocks.take(slice(0, 0)))
    empty = Blocks.make([0, 0], tokens=0, positions=0)
    device.compute(partial, empty)
    output, lse = partial.result()
    assert not output.any()
    assert np.isneginf(lse).all()
    device.compute(partial, kv.blocks)
    assert relative_error(partial.result()[0], kv.reference(query)[0]) <= EXACT


@pytest.mark.parametrize("dtype", attend.DTYPE_CODES)
def test_nan_spoils_what_sees_it_and_nothing_else(dtype):
    def draw(rng, shape):
        numbers = rng.standard_normal(shape)
        if shape[0] == 8:  # the last block: its tokens 40..47
            numbers[5, 1, 3] = np.nan
        return numbers

    kv = make_kv(np.random.default_rng(13), geometry(), 40 + 8, ("bf16", dtype), draw=draw)
    kv = make_kv(np.random.default_rng(13), geometry(), 40, (dtype,), draw=draw)
    query = ask(kv, 40, queries=8)
    output, lse = attend_all(kv, query)
    expected, expected_lse = kv.reference(query)
    assert np.array_equal(np.isnan(output), np.isnan(expected))
    assert np.isnan(expected[5:, 2:]).all()
    assert not np.isnan(expected[:5]).any()
    assert np.allclose(output, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert np.allclose(lse, expected_lse, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_infinite_scores_are_what_the_oracle_says(dtype):
    def draw(rng, shape):
        numbers = rng.standard_normal(shape)
        numbers[0, 0, 0], numbers[0, 1, 0] = np.inf, -np.inf
        return numbers

    kv = make_kv(np.random.default_rng(14), geometry(), 10, (dtype,), draw=draw)
    query = ask(kv, 10)
    output, lse = attend_all(kv, query)
    expected, expected_lse = kv.reference(query)
    assert np.allclose(output, expected, rtol=1e-4, equal_nan=True)
    assert np.allclose(lse, expected_lse, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", attend.DTYPE_CODES)
@pytest.mark.parametrize("size", [1e-6, 1e-38, 1e4])
def test_denormals_and_large_numbers_count(dtype, size):
    kv = make_kv(
        np.random.default_rng(15), geometry(), 40, (dtype,), draw=lambda rng, shape: rng.standard_normal(shape) * size
    )
    query = ask(kv, 40, scale=0.125 / size if size < 1 else 0.125 / size**2)
    output, _ = attend_all(kv, query)
    expected, _ = kv.reference(query)
    if np.abs(expected).max() > 1e-37:
        assert relative_error(output, expected) <= EXACT
    assert np.abs(output - expected).max() <= max(EXACT * size, 1e-44)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**90, np.inf, np.nan, 0.0])
def test_scales_out_of_the_usual_range_are_applied_as_they_are(scale):
    kv = make_kv(np.random.default_rng(16), geometry(), 40, ("fp8_e4m3",))
    for raw, keys, values, at in zip(kv.memory, kv.keys, kv.values, kv.blocks.scales, strict=True):
        place = raw[int(at) - raw.ctypes.data :][:16].view(np.float32)
        with np.errstate(all="ignore"):
            keys[:, 1] *= np.float64(scale) / place[1]
            values[:, 1] *= np.float64(scale) / place[3]
        place[1] = place[3] = scale
    query = ask(kv, 40)
    output, _ = attend_all(kv, query)
    expected, _ = kv.reference(query)
    with np.errstate(over="ignore"):
        assert np.allclose(output, expected.astype(np.float32), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_was_cancelled_says_so():
    kv = make_kv(np.random.default_rng(17), geometry(), 64)
    query = ask(kv, 64)
    device = HostAttention()
    assert not device.compute(device.begin(query), kv.blocks, cancel=np.ones(1, np.uint8))
    assert device.compute(device.begin(query), kv.blocks, cancel=np.zeros(1, np.uint8))


@pytest.mark.parametrize("shift", [1, 2, 7, 64])
def test_the_same_blocks_in_other_memory_give_the_same_bits(shift):
    dtypes = ("bf16", "fp8_e4m3", "fp32")
    here, there = (make_kv(np.random.default_rng(18), geometry(), 90, dtypes, shift=at) for at in (0, shift))
    query = ask(here, 90, queries=2)
    assert np.array_equal(attend_all(here, query)[0], attend_all(there, query)[0])
