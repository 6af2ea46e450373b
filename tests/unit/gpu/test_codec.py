"""Blocks in FP8: every dtype, layout and shape against the definition in float64, errors included."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Codec, EncodedLayout, choose_codec, rotation
from kvtierd.gpu.codec import BlockCodec
from kvtierd.gpu.reference import codec as oracle

Bytes = npt.NDArray[np.uint8]

SHAPES = {
    "plain": {"block_size": 16, "layers": 3, "kv_heads": 2, "k_dim": 64, "v_dim": 64},
    "tails": {"block_size": 5, "layers": 2, "kv_heads": 3, "k_dim": 80, "v_dim": 33},
    "wide K": {"block_size": 4, "layers": 1, "kv_heads": 2, "k_dim": 192, "v_dim": 128},
    "rows of eight": {"block_size": 3, "layers": 2, "kv_heads": 2, "k_dim": 128, "v_dim": 64},
    "rows of sixteen": {"block_size": 2, "layers": 1, "kv_heads": 2, "k_dim": 256, "v_dim": 40},
    "latent": {"block_size": 7, "layers": 2, "kv_heads": 1, "k_dim": 576, "v_dim": 0},
    "tiny": {"block_size": 1, "layers": 1, "kv_heads": 1, "k_dim": 1, "v_dim": 2},
}


def random_block(geometry: Geometry, seed: int, spread: float = 1.0) -> Bytes:
    """A block in slot form of normally distributed elements; its padding is noise, which must not matter."""
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 256, geometry.slot_bytes, np.uint8)
    for layer in range(geometry.layers):
        begin = layer * geometry.layer_stride
        part = block[begin : begin + geometry.layer_bytes]
        part[:] = _raw(rng.standard_normal(part.size // _width(geometry)) * spread, geometry.dtype)
    return block


def _width(geometry: Geometry) -> int:
    return 4 if geometry.dtype == "fp32" else 2


def _raw(values: npt.NDArray[np.float64], dtype: str) -> Bytes:
    if dtype == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(np.float16 if dtype == "fp16" else np.float32).view(np.uint8)


def encode(block: Bytes, geometry: Geometry) -> tuple[BlockCodec, Bytes]:
    codec = BlockCodec(geometry)
    target = np.full(codec.layout.slot_bytes, 0xEE, np.uint8)
    codec.encode(block, target)
    return codec, target


def codes_by_group(encoded: Bytes, layout: EncodedLayout, layer: int) -> list[Bytes]:
    """The codes of each group in the order of memory, read by the layout's table alone."""
    shape, begin = layout.geometry, layer * layout.layer_stride
    found: list[Bytes] = []
    for first, count, dim in ((0, layout.k_codes, shape.k_dim), (layout.k_codes, layout.v_codes, shape.v_dim)):
        part = encoded[begin + first : begin + first + count]
        if dim and shape.layout == "hnd":
            found += list(part.reshape(shape.kv_heads, -1))
        elif dim:
            found += [head.reshape(-1) for head in part.reshape(shape.block_size, shape.kv_heads, dim).swapaxes(0, 1)]
    return found


def assert_agrees_with_the_oracle(block: Bytes, geometry: Geometry) -> None:
    codec, encoded = encode(block, geometry)
    back = np.full(geometry.slot_bytes, 0xEE, np.uint8)
    codec.decode(encoded, back)
    for layer in range(geometry.layers):
        wanted = [oracle.encode_group(group) for group in oracle.layer_groups(block, geometry, layer)]
        codes_found = codes_by_group(encoded, codec.layout, layer)
        values_found = oracle.layer_groups(back, geometry, layer, turned=False)
        for group, (codes, values) in enumerate(zip(codes_found, values_found, strict=True)):
            expected = wanted[group]
            assert np.array_equal(codes, expected.codes), (layer, group)
            assert codec.scales(encoded)[layer, group] == expected.scale
            if group < geometry.kv_heads:
                meant = oracle.decoded_keys(codes, expected.scale, geometry)
            else:
                meant = oracle.decoded(codes, expected.scale, geometry.dtype)
            np.testing.assert_array_equal(values, meant)
        np.testing.assert_allclose(codec.relative_l2(encoded)[layer], [w.relative_l2 for w in wanted], rtol=1e-5)
        np.testing.assert_allclose(codec.largest_error(encoded)[layer], [w.largest_error for w in wanted], rtol=1e-6)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_case_25_every_dtype_layout_and_shape_agrees_with_the_definition(shape: str, dtype: str, layout: str) -> None:
    geometry = Geometry(**SHAPES[shape], dtype=dtype, layout=layout)
    assert_agrees_with_the_oracle(random_block(geometry, 7), geometry)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("special", [0x0001, 0x8001, 0x0030, 0x0080, 0x7F80, 0xFFC0, 0x7F7F, 0x0000])
def test_keys_of_bf16_give_the_bytes_that_the_same_keys_give_as_fp32(special: int, layout: str) -> None:
    """Which are rotated and rounded exactly; denormals, NaN, Inf and overflow beside exact numbers, and a zero head."""
    shape = Geometry(block_size=3, layers=1, kv_heads=3, k_dim=128, v_dim=8, layout=layout)
    wide = Geometry(block_size=3, layers=1, kv_heads=3, k_dim=128, v_dim=8, layout=layout, dtype="fp32")
    heads = np.zeros((3, 3, 128), np.uint16)  # head, token, channel
    heads[0, :, 5] = 0x3F80  # 1: as rotated keys, numbers of e4m3
    heads[1] = _raw(np.random.default_rng(8).standard_normal(384), "bf16").view(np.uint16).reshape(3, 128)
    heads[0, 1, ::16] = special  # columns apart from channel 5, so that nothing absorbs it
    heads[1, 2, 7] = special
    keys = (heads if layout == "hnd" else heads.swapaxes(0, 1)).reshape(-1)
    block, wide_block = np.zeros(shape.slot_bytes, np.uint8), np.zeros(wide.slot_bytes, np.uint8)
    block.view(np.uint16)[: keys.size] = keys
    wide_block.view(np.uint32)[: keys.size] = keys.astype(np.uint32) << 16
    assert np.array_equal(encode(block, shape)[1], encode(wide_block, wide)[1])


def aligned(count: int, beyond: int) -> Bytes:
    """Memory that begins so many bytes behind the begin of a cache line."""
    memory = np.full(count + 128, 0xEE, np.uint8)
    begin = -memory.ctypes.data % 64 + beyond
    return memory[begin : begin + count]


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_codes_are_the_same_wherever_they_go_and_with_small_numbers_among_large_ones(dim: int, layout: str) -> None:
    """On whole cache lines and off, past the caches and not, in vectors with denormal numbers of e4m3 and without."""
    geometry = Geometry(block_size=6, layers=2, kv_heads=2, k_dim=dim, v_dim=dim, layout=layout)
    block = random_block(geometry, 5)
    elements = block.view(np.uint16)
    few = np.random.default_rng(6).integers(0, elements.size, elements.size // 200)
    elements[few] = elements[few] & 0x807F | np.arange(few.size, dtype=np.uint16) % 30 + 100 << 7
    assert_agrees_with_the_oracle(block, geometry)
    codec = BlockCodec(geometry)
    expected = encode(block, geometry)[1]
    for beyond in (0, 4, 32):
        for past_caches in (False, True):
            found = aligned(codec.layout.slot_bytes, beyond)
            codec.encode(block, found, past_caches=past_caches)
            assert np.array_equal(found, expected)


@given(st.data())
def test_any_bits_at_all_agree_with_the_definition(data: st.DataObject) -> None:
    """Random bits hold NaN, Inf, denormals and sizes from one end of the range to the other."""
    dtype = data.draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    geometry = Geometry(
        block_size=data.draw(st.integers(1, 9)),
        layers=1,
        kv_heads=data.draw(st.integers(1, 3)),
        k_dim=data.draw(st.integers(1, 70)),
        v_dim=data.draw(st.integers(0, 40)),
        dtype=dtype,
        layout=data.draw(st.sampled_from(["nhd", "hnd"])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spread = 2.0 ** data.draw(st.integers(-130, 120)) if dtype != "fp16" else 2.0 ** data.draw(st.integers(-24, 13))
    block = random_block(geometry, int(rng.integers(2**32)), spread)
    if data.draw(st.booleans()):
        elements = block.view(np.uint32 if dtype == "fp32" else np.uint16)
        places = rng.integers(0, elements.size, 3)
        elements[places] = rng.integers(0, np.iinfo(elements.dtype).max, 3, endpoint=True).astype(elements.dtype)
    assert_agrees_with_the_oracle(block, geometry)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_values_that_are_decoded_and_encoded_again_do_not_change(dtype: str) -> None:
    geometry = Geometry(**SHAPES["plain"], dtype=dtype)
    codec, encoded = encode(random_block(geometry, 3), geometry)
    once, twice = np.zeros(geometry.slot_bytes, np.uint8), np.zeros(geometry.slot_bytes, np.uint8)
    codec.decode(encoded, once)
    codec.decode(encode(once, geometry)[1], twice)
    for layer in range(geometry.layers):
        first, second = (oracle.layer_groups(block, geometry, layer, turned=False) for block in (once, twice))
        for a, b in zip(first[geometry.kv_heads :], second[geometry.kv_heads :], strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_keys_that_are_encoded_again_and_again_do_not_drift_away(dtype: str) -> None:
    """Only numbers much smaller than those they were spread with change, and then by as little as these were rounded
    by."""
    geometry = Geometry(**SHAPES["plain"], dtype=dtype)
    block = random_block(geometry, 3)
    exact = np.concatenate(oracle.layer_groups(block, geometry, 0, turned=False)[: geometry.kv_heads])
    errors = []
    for _ in range(60):
        codec, encoded = encode(block, geometry)
        codec.decode(encoded, block)
        found = np.concatenate(oracle.layer_groups(block, geometry, 0, turned=False)[: geometry.kv_heads])
        errors.append(float(np.linalg.norm(found - exact) / np.linalg.norm(exact)))
    assert 0.02 < errors[0] < 0.03
    assert errors[-1] < 1.05 * errors[0]
    assert errors[-1] - errors[30] < 0.001


def test_a_few_large_channels_of_keys_cost_less_of_a_score_than_they_would_alone() -> None:
    """What rotation is for: q and k are large in the same channels, which carry the score."""
    geometry = Geometry(block_size=128, layers=1, kv_heads=1, k_dim=128, v_dim=128)
    rng, size = np.random.default_rng(4), np.where(np.arange(128) % 32 == 5, 16.0, 1.0)
    block = np.zeros(geometry.slot_bytes, np.uint8)
    numbers = rng.standard_normal((2, 128, 128)) * size
    block[: geometry.layer_bytes] = _raw(numbers.reshape(-1), "bf16")
    q = rng.standard_normal((64, 128)) * size
    exact = oracle.layer_groups(block, geometry, 0, turned=False)[0].reshape(128, 128)
    codec, encoded = encode(block, geometry)
    codec.decode(encoded, block)
    turned = oracle.layer_groups(block, geometry, 0, turned=False)[0].reshape(128, 128)
    alone = oracle.encode_group(exact.reshape(-1))
    plain = oracle.decoded(alone.codes, alone.scale, "bf16").reshape(128, 128)
    with_rotation, without = (np.linalg.norm(q @ (exact - found).T) for found in (turned, plain))
    assert with_rotation < 0.6 * without


def test_nan_stays_inf_saturates_and_the_error_says_so() -> None:
    geometry = Geometry(block_size=1, layers=1, kv_heads=1, k_dim=64, v_dim=64, dtype="fp32")
    block = np.zeros(geometry.slot_bytes, np.uint8)
    values = block[: geometry.layer_bytes].view(np.float32)
    values[:] = 1.0
    values[[67, 70, 71]] = np.nan, np.inf, -np.inf
    codec, encoded = encode(block, geometry)
    codec.decode(encoded, block)
    assert np.isnan(values[67])
    assert np.count_nonzero(np.isnan(values)) == 1
    assert (values[70], values[71]) == (448 * codec.scales(encoded)[0, 1], -448 * codec.scales(encoded)[0, 1])
    assert codec.relative_l2(encoded).tolist() == [[0.0, np.inf]]
    assert codec.largest_error(encoded).tolist() == [[0.0, np.inf]]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_nan_and_inf_in_a_key_spoil_the_channels_they_are_spread_with_and_no_others(dtype: str) -> None:
    geometry = Geometry(block_size=2, layers=1, kv_heads=1, k_dim=64, v_dim=64, dtype=dtype)
    numbers = np.ones(geometry.layer_bytes // _width(geometry))
    numbers[3], numbers[64 + 2] = np.nan, np.inf  # rows of 4 channels: 3, 7, 11 ... and 2, 6, 10 ... of another token
    block = np.zeros(geometry.slot_bytes, np.uint8)
    block[: geometry.layer_bytes] = _raw(numbers, dtype)
    codec, encoded = encode(block, geometry)
    codec.decode(encoded, block)
    keys = oracle.layer_groups(block, geometry, 0, turned=False)[0].reshape(2, 16, 4)
    assert np.isnan(keys[0, :, 3]).all()
    assert np.isfinite(keys[1]).all()
    assert keys[1, 0, 2] == 4 * 448 * codec.scales(encoded)[0, 0]
    kept = np.ones((2, 16, 4), bool)
    kept[0, :, 3] = kept[1, :, 2] = False
    assert (keys[kept] == 1.0).all()
    assert codec.relative_l2(encoded)[0, 0] == np.inf


def test_how_many_channels_are_spread() -> None:
    def channels(k_dim: int, v_dim: int = 8) -> int:
        return rotation(Geometry(block_size=1, layers=1, kv_heads=1, k_dim=k_dim, v_dim=v_dim))

    assert [channels(dim) for dim in (64, 80, 96, 128, 192, 256)] == [16] * 6
    assert [channels(dim) for dim in (4, 24, 6, 1)] == [4, 4, 1, 1]
    assert channels(576, 0) == 1, "of a latent form keys are values too"


def test_layers_can_be_done_one_by_one_and_padding_becomes_zero() -> None:
    geometry = Geometry(**SHAPES["tails"])
    block = random_block(geometry, 9)
    codec, whole = encode(block, geometry)
    pieces, back = np.full_like(whole, 0xEE), np.full_like(block, 0xEE)
    for layer in range(geometry.layers):
        codec.encode(block, pieces, layer, layer + 1)
        codec.decode(pieces, back, layer, layer + 1)
    assert np.array_equal(pieces, whole)
    rows = back.reshape(geometry.layers, -1)
    assert not rows[:, geometry.layer_bytes :].any()
    assert not whole.reshape(geometry.layers, -1)[:, codec.layout.layer_bytes :].any()


def test_the_layout_of_a_layer_is_the_documented_one() -> None:
    layout = EncodedLayout(Geometry(block_size=128, layers=2, kv_heads=8, k_dim=128, v_dim=128))
    assert (layout.groups, layout.k_codes, layout.v_codes) == (16, 131072, 131072)
    assert (layout.scales_offset, layout.errors_offset, layout.layer_bytes) == (262144, 262208, 262336)
    assert (layout.layer_stride, layout.slot_bytes) == (266240, 532480)
    latent = EncodedLayout(Geometry(block_size=7, layers=1, kv_heads=1, k_dim=5, v_dim=0))
    assert (latent.groups, latent.v_codes, latent.scales_offset, latent.layer_bytes) == (1, 0, 64, 76)


@pytest.mark.parametrize("change", [{"dtype": "fp8_e4m3"}, {"dtype": "int8"}, {"layout": "opaque:engine"}])
def test_what_has_no_fp8_form_passes_through(change: dict[str, str]) -> None:
    geometry = Geometry(**SHAPES["plain"] | change)  # type: ignore[arg-type]
    assert choose_codec(geometry, lossy=True) is Codec.RAW
    with pytest.raises(ValueError, match="has no FP8 form; it stays as it is"):
        BlockCodec(geometry)


def test_fp8_is_chosen_only_where_loss_is_allowed_and_bytes_are_saved() -> None:
    large, tiny = Geometry(**SHAPES["plain"] | {"layers": 4, "k_dim": 128}), Geometry(**SHAPES["tiny"])
    assert choose_codec(large, lossy=True) is Codec.FP8_E4M3
    assert choose_codec(large, lossy=False) is Codec.RAW
    assert choose_codec(tiny, lossy=True) is Codec.RAW


def test_arrays_of_another_size_and_layers_beyond_the_block_are_refused() -> None:
    geometry = Geometry(**SHAPES["plain"])
    codec = BlockCodec(geometry)
    block, target = np.zeros(geometry.slot_bytes, np.uint8), np.zeros(codec.layout.slot_bytes, np.uint8)
    with pytest.raises(ValueError, match=r"the FP8 form is uint8 \(5,\)"):
        codec.encode(block, target[:5])
    with pytest.raises(ValueError, match="the block is uint8"):
        codec.decode(target, block[1:])
    with pytest.raises(ValueError, match=r"layers 2\.\.4 are not within the block's 3"):
        codec.encode(block, target, 2, 4)
