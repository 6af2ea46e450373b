"""The CUDA codec in the simulator: the bytes are those of the CPU's kernels and of the definition in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.codec import BlockCodec
from kvtierd.gpu.kernels.codec import DECODERS, ENCODERS, launch, supports
from kvtierd.gpu.reference import codec as oracle

Bytes = npt.NDArray[np.uint8]

SHAPES = {
    "layers": Geometry(block_size=3, layers=2, kv_heads=1, k_dim=24, v_dim=8),
    "nhd": Geometry(block_size=3, layers=1, kv_heads=2, k_dim=16, v_dim=24),
    "hnd": Geometry(block_size=4, layers=1, kv_heads=2, k_dim=16, v_dim=24, layout="hnd"),
    "latent": Geometry(block_size=2, layers=1, kv_heads=1, k_dim=72, v_dim=0),
}


def _geometry(shape: str, dtype: str) -> Geometry:
    g = SHAPES[shape]
    return Geometry(
        block_size=g.block_size, layers=g.layers, kv_heads=g.kv_heads, k_dim=g.k_dim, v_dim=g.v_dim,
        layout=g.layout, dtype=dtype,
    )  # fmt: skip


def _blocks(geometry: Geometry, count: int, *, special: bool) -> Bytes:
    rng = np.random.default_rng(11)
    values = rng.standard_normal(count * geometry.slot_bytes // 4).astype(np.float32)
    if geometry.dtype == "bf16":
        raw = (np.tile(values, 2).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elif geometry.dtype == "fp16":
        raw = np.tile(values, 2).astype(np.float16).view(np.uint8)
    else:
        raw = values.view(np.uint8)
    blocks = raw[: count * geometry.slot_bytes].reshape(count, geometry.slot_bytes).copy()
    if special:  # random bits: NaN, Inf and every size among them
        blocks[:, : geometry.layer_bytes] = rng.integers(0, 256, (count, geometry.layer_bytes), np.uint8)
    return blocks


CASES = [
    *(("latent", dtype, special) for dtype in ("bf16", "fp16", "fp32") for special in (False, True)),
    ("layers", "bf16", False),
    ("nhd", "bf16", True),
    ("hnd", "fp32", True),
]


@pytest.mark.parametrize(("shape", "dtype", "special"), CASES)
def test_encoding_and_decoding_are_those_of_the_cpu(shape: str, dtype: str, special: bool) -> None:
    geometry = _geometry(shape, dtype)
    codec, count = BlockCodec(geometry), 2 if shape == "layers" else 1
    blocks = _blocks(geometry, count, special=special)
    places = np.arange(count, dtype=np.int64)[::-1].copy()  # slots in another order than the blocks
    wanted = np.zeros((count, codec.layout.slot_bytes), np.uint8)
    for block in range(count):
        codec.encode(blocks[block], wanted[count - 1 - block])
    encoded = np.zeros_like(wanted)
    exact_at, encoded_at = np.arange(count) * geometry.slot_bytes, places * codec.layout.slot_bytes
    launch(ENCODERS, geometry, blocks.reshape(-1), exact_at, encoded.reshape(-1), encoded_at, threads=32)
    for block in range(count):
        _assert_same(codec, encoded[block], wanted[block])
    back, exact = np.zeros_like(blocks), np.zeros_like(blocks)
    launch(DECODERS, geometry, back.reshape(-1), exact_at, wanted.reshape(-1), encoded_at, threads=32)
    for block in range(count):
        codec.decode(wanted[count - 1 - block], exact[block])
    assert np.array_equal(back, exact)


def _assert_same(codec: BlockCodec, found: Bytes, wanted: Bytes) -> None:
    stride, layout = codec.layout.layer_stride, codec.layout
    for begin in range(0, found.size, stride):
        assert np.array_equal(found[begin : begin + layout.errors_offset], wanted[begin : begin + layout.errors_offset])
    np.testing.assert_allclose(codec.relative_l2(found), codec.relative_l2(wanted), rtol=1e-5)
    np.testing.assert_allclose(codec.largest_error(found), codec.largest_error(wanted), rtol=1e-6)


def test_a_thread_block_of_two_warps_agrees_with_the_definition() -> None:
    geometry = Geometry(block_size=8, layers=1, kv_heads=1, k_dim=80, v_dim=0, dtype="bf16")
    codec, block = BlockCodec(geometry), _blocks(geometry, 1, special=False)[0]
    encoded, at = np.zeros(codec.layout.slot_bytes, np.uint8), np.zeros(1, np.int64)
    launch(ENCODERS, geometry, block, at, encoded, at, threads=64)
    (group,) = oracle.layer_groups(block, geometry, 0)
    wanted = oracle.encode_group(group)
    assert np.array_equal(encoded[: group.size], wanted.codes)
    assert codec.scales(encoded)[0, 0] == wanted.scale
    np.testing.assert_allclose(codec.relative_l2(encoded)[0, 0], wanted.relative_l2, rtol=1e-5)
    np.testing.assert_allclose(codec.largest_error(encoded)[0, 0], wanted.largest_error, rtol=1e-6)


def test_dims_that_are_no_multiple_of_eight_are_refused() -> None:
    geometry = Geometry(block_size=1, layers=1, kv_heads=1, k_dim=12, v_dim=8)
    assert not supports(geometry)
    with pytest.raises(ValueError, match="K and V dims are 12 and 8; multiples of 8 are wanted"):
        launch(ENCODERS, geometry, None, [], None, [])
