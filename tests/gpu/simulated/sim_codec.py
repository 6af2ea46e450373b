"""The CUDA codec in the simulator: the bytes are those of the definition in float64, and of the CPU's kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import EncodedLayout, rotation
from kvtierd.gpu.codec import BlockCodec
from kvtierd.gpu.kernels.codec import DECODERS, ENCODERS, launch, supports
from kvtierd.gpu.reference import codec as oracle

Bytes = npt.NDArray[np.uint8]

SHAPES = {
    "rotated by 4, layers": Geometry(block_size=3, layers=2, kv_heads=1, k_dim=24, v_dim=8),
    "nhd": Geometry(block_size=3, layers=1, kv_heads=2, k_dim=48, v_dim=24),
    "hnd": Geometry(block_size=4, layers=1, kv_heads=2, k_dim=16, v_dim=24, layout="hnd"),
    "latent": Geometry(block_size=2, layers=1, kv_heads=1, k_dim=72, v_dim=0),
}
CARRIERS = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.uint32}


def _geometry(shape: str, dtype: str) -> Geometry:
    g = SHAPES[shape]
    return Geometry(
        block_size=g.block_size, layers=g.layers, kv_heads=g.kv_heads, k_dim=g.k_dim, v_dim=g.v_dim,
        layout=g.layout, dtype=dtype,
    )  # fmt: skip


def _raw(values: npt.NDArray[np.floating], dtype: str) -> Bytes:
    """Values as bytes of a dtype; bf16 by cutting off."""
    single = values.astype(np.float32)
    if dtype == "bf16":
        return (single.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return single.astype(np.float16).view(np.uint8) if dtype == "fp16" else single.view(np.uint8)


def _blocks(geometry: Geometry, count: int, *, special: bool) -> Bytes:
    rng = np.random.default_rng(11)
    blocks = np.zeros((count, geometry.slot_bytes), np.uint8)
    blocks[:] = _raw(rng.standard_normal(count * geometry.slot_bytes), geometry.dtype)[: blocks.size].reshape(count, -1)
    if special:  # random bits: NaN, Inf and every size among them
        blocks[:, : geometry.layer_bytes] = rng.integers(0, 256, (count, geometry.layer_bytes), np.uint8)
    return blocks


def _encoded(geometry: Geometry, blocks: Bytes, threads: int = 32) -> Bytes:
    """Blocks as the kernels encode them, into slots in another order."""
    layout, count = EncodedLayout(geometry), len(blocks)
    encoded, at = np.zeros((count, layout.slot_bytes), np.uint8), np.arange(count, dtype=np.int64)
    exact_at, encoded_at = at * geometry.slot_bytes, at[::-1].copy() * layout.slot_bytes
    launch(ENCODERS, geometry, blocks.reshape(-1), exact_at, encoded.reshape(-1), encoded_at, threads=threads)
    return encoded[::-1].copy()


def _decoded(geometry: Geometry, encoded: Bytes) -> Bytes:
    layout, count = EncodedLayout(geometry), len(encoded)
    exact, at = np.zeros((count, geometry.slot_bytes), np.uint8), np.arange(count, dtype=np.int64)
    exact_at, encoded_at = at * geometry.slot_bytes, at * layout.slot_bytes
    launch(DECODERS, geometry, exact.reshape(-1), exact_at, encoded.reshape(-1), encoded_at, threads=32)
    return exact


def _heads(layer: npt.NDArray[np.generic], geometry: Geometry) -> list[npt.NDArray[np.generic]]:
    """Views [tokens, dim] of a layer's elements or codes, K heads then V heads."""
    split = geometry.block_size * geometry.kv_heads * geometry.k_dim
    found: list[npt.NDArray[np.generic]] = []
    for part, dim in ((layer[:split], geometry.k_dim), (layer[split:], geometry.v_dim)):
        shape = (geometry.kv_heads, geometry.block_size, dim)
        if dim and geometry.layout == "hnd":
            found += list(part.reshape(shape))
        elif dim:
            found += list(part.reshape(shape[1], shape[0], dim).swapaxes(0, 1))
    return found


def _codes(encoded: Bytes, geometry: Geometry, layer: int) -> list[npt.NDArray[np.generic]]:
    layout = EncodedLayout(geometry)
    begin = layer * layout.layer_stride
    return _heads(encoded[begin : begin + layout.k_codes + layout.v_codes], geometry)


def _assert_encoded(encoded: Bytes, block: Bytes, geometry: Geometry) -> None:
    """Codes and scales are those of the CPU's kernels and of the definition, errors nearly."""
    codec = BlockCodec(geometry)
    wanted = np.zeros_like(encoded)
    codec.encode(block, wanted)
    for layer in range(geometry.layers):
        begin = layer * codec.layout.layer_stride
        end = begin + codec.layout.errors_offset
        assert np.array_equal(encoded[begin:end], wanted[begin:end])
        groups = oracle.layer_groups(block, geometry, layer)
        for group, (values, codes) in enumerate(zip(groups, _codes(encoded, geometry, layer), strict=True)):
            defined = oracle.encode_group(values)
            if group < geometry.kv_heads and rotation(geometry) > 1:
                # Which sign a NaN has that comes out of arithmetic is the processor's to say; in ours it has none.
                defined.codes[defined.codes == 0xFF] = 0x7F
            assert np.array_equal(codes.reshape(-1), defined.codes)
            assert codec.scales(encoded)[layer, group] == defined.scale
            found = codec.relative_l2(encoded)[layer, group], codec.largest_error(encoded)[layer, group]
            np.testing.assert_allclose(found, (defined.relative_l2, defined.largest_error), rtol=1e-5)


def _assert_decoded(exact: Bytes, encoded: Bytes, geometry: Geometry) -> None:
    """The bytes are those of the CPU's kernels, the values those of the definition."""
    codec = BlockCodec(geometry)
    wanted = np.zeros_like(exact)
    codec.decode(encoded, wanted)
    assert np.array_equal(exact, wanted)
    for layer in range(geometry.layers):
        groups = oracle.layer_groups(exact, geometry, layer, turned=False)
        for group, (values, codes) in enumerate(zip(groups, _codes(encoded, geometry, layer), strict=True)):
            some, scale = codes.reshape(-1).astype(np.uint8), float(codec.scales(encoded)[layer, group])
            if group < geometry.kv_heads:
                np.testing.assert_array_equal(values, oracle.decoded_keys(some, scale, geometry))
            else:
                np.testing.assert_array_equal(values, oracle.decoded(some, scale, geometry.dtype))


CASES = [
    *(("nhd", dtype, special) for dtype in ("bf16", "fp16", "fp32") for special in (False, True)),
    ("rotated by 4, layers", "bf16", False),
    ("rotated by 4, layers", "fp32", True),
    ("hnd", "fp16", True),
    *(("latent", dtype, special) for dtype in ("bf16", "fp16", "fp32") for special in (False, True)),
]


@pytest.mark.parametrize(("shape", "dtype", "special"), CASES)
def test_what_is_encoded_and_decoded_is_that_of_definition_and_cpu(shape: str, dtype: str, special: bool) -> None:
    geometry = _geometry(shape, dtype)
    blocks = _blocks(geometry, geometry.layers, special=special)
    encoded = _encoded(geometry, blocks)
    back = _decoded(geometry, encoded)
    for block in range(len(blocks)):
        _assert_encoded(encoded[block], blocks[block], geometry)
        _assert_decoded(back[block], encoded[block], geometry)


def test_a_thread_block_of_two_warps_agrees_with_the_definition() -> None:
    geometry = Geometry(block_size=8, layers=1, kv_heads=1, k_dim=80, v_dim=64, dtype="bf16")
    blocks = _blocks(geometry, 1, special=False)
    _assert_encoded(_encoded(geometry, blocks, threads=64)[0], blocks[0], geometry)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_nan_in_a_key_takes_the_numbers_it_meets_and_inf_leaves_nothing_of_them(dtype: str) -> None:
    """Of 32 channels those of even and of odd number meet; so in each token one half is as if the other were not."""
    geometry = Geometry(block_size=4, layers=1, kv_heads=1, k_dim=32, v_dim=8, dtype=dtype)
    keys = np.random.default_rng(3).standard_normal((4, 32))
    keys[1, 10] = -np.nan
    keys[2, 10] = -np.inf
    keys[3, [10, 14]] = np.inf
    raw = _raw(np.concatenate([keys.reshape(-1), np.zeros(32)]), dtype)
    block = np.zeros(geometry.slot_bytes, np.uint8)
    block[: raw.size] = raw
    encoded = _encoded(geometry, block[None])[0]
    _assert_encoded(encoded, block, geometry)

    codes = _codes(encoded, geometry, 0)[0]
    row = np.array([(5 & i).bit_count() % 2 for i in range(16)])  # channel 10 is row 5 of its column
    other = np.array([(7 & i).bit_count() % 2 for i in range(16)])
    assert (codes[1, ::2] == 0x7F).all()
    assert np.array_equal(codes[2, ::2], np.where(row == 0, 0xFE, 0x7E))
    assert np.array_equal(codes[3, ::2] == 0x7F, row != other)
    assert np.array_equal(codes[3, ::2][row == other], np.where(row[row == other], 0xFE, 0x7E))
    assert not (codes[0] & 0x7F == 0x7F).any()
    assert not (codes[:, 1::2] & 0x7F == 0x7F).any()
    assert np.isinf(BlockCodec(geometry).relative_l2(encoded)[0]).tolist() == [True, False]

    exact = _decoded(geometry, encoded[None])[0]
    _assert_decoded(exact, encoded, geometry)
    back = oracle.elements(exact[: geometry.layer_bytes].view(CARRIERS[dtype]), dtype)[: keys.size].reshape(4, 32)
    scale = float(BlockCodec(geometry).scales(encoded)[0, 0])
    alone = np.zeros(16)
    alone[5] = -448 * scale * 4
    assert np.isnan(back[1, ::2]).all()
    assert np.array_equal(back[2, ::2], alone)
    assert np.isnan(back[3, ::2]).all()
    np.testing.assert_allclose(back[:, 1::2], keys[:, 1::2], atol=0.5)


def test_a_key_that_is_beyond_the_dtype_once_decoded_is_the_largest_finite_one() -> None:
    geometry = Geometry(block_size=1, layers=1, kv_heads=1, k_dim=16, v_dim=8, dtype="fp16")
    block = np.zeros((1, geometry.slot_bytes), np.uint8)
    block[0, :32] = _raw(np.full(16, 65504.0), "fp16")  # rotated, one number of 262016: as FP8, 262144
    encoded = _encoded(geometry, block)
    assert _codes(encoded[0], geometry, 0)[0].tolist() == [[0x78, *[0] * 15]]
    assert np.array_equal(_decoded(geometry, encoded), block)


def test_dims_that_are_no_multiple_of_eight_are_refused() -> None:
    geometry = Geometry(block_size=1, layers=1, kv_heads=1, k_dim=12, v_dim=8)
    assert not supports(geometry)
    with pytest.raises(ValueError, match="K and V dims are 12 and 8; multiples of 8 are wanted"):
        launch(ENCODERS, geometry, None, [], None, [])
