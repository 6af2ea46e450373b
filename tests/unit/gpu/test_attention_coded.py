"""Attention over blocks that the codec made: keys are rotated, and so is q for them; beside exact blocks in one go."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import CODED, DTYPE_CODES, Blocks, checked_query, from_fp32, rotated
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.codec import BlockCodec
from kvtierd.gpu.host_kernels import attention_vectors
from kvtierd.gpu.reference import codec as oracle
from kvtierd.gpu.reference.attention import reference_attention, relative_error

SHAPES = {
    "of 16": {"k_dim": 64, "v_dim": 64},
    "of 16, odd rows, hnd": {"k_dim": 80, "v_dim": 48, "layout": "hnd"},
    "of 16, three to a row": {"k_dim": 192, "v_dim": 128},
    "of 4": {"k_dim": 20, "v_dim": 24},
    "none": {"k_dim": 6, "v_dim": 8},
    "latent": {"k_dim": 64, "v_dim": 0},
}
TOKENS, BLOCKS, HEADS = 16, 5, 6


def parts(block, shape, dtype, v_dim):
    numbers = oracle.elements(block[: shape.layer_bytes].view(dtype), shape.dtype)
    split = shape.block_size * shape.kv_heads * shape.k_dim
    found = []
    for part, dim in ((numbers[:split], shape.k_dim), (numbers[split:], shape.v_dim)):
        if shape.layout == "hnd":
            found.append(part.reshape(shape.kv_heads, shape.block_size, -1).transpose(1, 0, 2))
        elif dim:
            found.append(part.reshape(shape.block_size, shape.kv_heads, dim))
    return (found[0], found[1]) if shape.v_dim else (found[0], found[0][:, :, :v_dim])


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_coded_blocks_beside_exact_ones_are_what_the_oracle_says(name: str, queries: int) -> None:
    shape = Geometry(block_size=TOKENS, layers=1, kv_heads=2, **SHAPES[name])
    wide = msgspec.structs.replace(shape, dtype="fp32")
    rng, codec, back = np.random.default_rng(5), BlockCodec(shape), BlockCodec(wide)
    v_dim = 0 if shape.v_dim else 40
    memory, rows, meant = [], [], []
    for index in range(BLOCKS):
        exact = np.zeros(shape.slot_bytes, np.uint8)
        exact[: shape.layer_bytes] = from_fp32(rng.standard_normal(shape.layer_bytes // 2, np.float32), "bf16").view(
            "u1"
        )
        if index % 2:
            memory.append(exact)
            rows.append((exact.ctypes.data, 0, DTYPE_CODES["bf16"]))
            meant.append(parts(exact, shape, np.uint16, v_dim))
            continue
        code, decoded = np.zeros(codec.layout.slot_bytes, np.uint8), np.zeros(wide.slot_bytes, np.uint8)
        codec.encode(exact, code)
        back.decode(code, decoded)  # in float32: what is turned back is no number of bf16
        memory.append(code)
        rows.append((code.ctypes.data, code.ctypes.data + codec.layout.scales_offset, CODED))
        meant.append(parts(decoded, wide, np.uint32, v_dim))
    addresses, scales, dtypes = zip(*rows, strict=True)
    positions = np.arange(BLOCKS) * TOKENS
    blocks = Blocks.make(addresses, scales=scales, dtypes=dtypes, tokens=TOKENS, positions=positions)
    q = rng.standard_normal((queries, HEADS, shape.k_dim), np.float32)
    query = checked_query(q, shape, layer=0, length=BLOCKS * TOKENS, available=BLOCKS * TOKENS, v_dim=v_dim)
    device = HostAttention()
    partial = device.begin(query)
    assert device.compute(partial, blocks)
    expected = reference_attention(
        q, [(k, v, int(at)) for (k, v), at in zip(meant, positions, strict=True)],
        scale=query.scale, v_dim=query.values_dim, position=query.position, window=0, soft_cap=0.0, sinks=None,
    )  # fmt: skip
    output, lse = partial.result()
    assert relative_error(output, expected[0]) <= 1e-5
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 4, 16])
def test_vectors_turned_twice_come_back_and_keep_their_products(n: int) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((3, 2, 80), np.float32) for _ in range(2))
    turned = rotated(a, n)
    np.testing.assert_array_equal(turned, oracle.rotated(a, n))
    np.testing.assert_allclose(rotated(turned, n), a, atol=1e-6)
    np.testing.assert_allclose((turned * rotated(b, n)).sum(-1), (a * b).sum(-1), atol=1e-5)


def test_the_code_is_that_of_the_kernel_and_of_no_dtype() -> None:
    assert attention_vectors.CODED == CODED
    assert CODED not in DTYPE_CODES.values()
