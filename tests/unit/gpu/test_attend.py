from __future__ import annotations

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import ANYWHERE, Blocks, checked_query, code_of, from_fp32, to_fp32

SHAPE = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)
LATENT = Geometry(block_size=16, layers=2, kv_heads=1, k_dim=576, v_dim=0)


def query(geometry=SHAPE, **changes):
    given = {"q": np.ones((1, 4, geometry.k_dim), np.float32), "layer": 0, "length": 10, "available": 16, **changes}
    return checked_query(given.pop("q"), geometry, **given)


def test_a_query_stands_at_the_tail_unless_told_otherwise():
    assert query().position == 9
    assert query(position=40).position == 40
    assert query(causal=False).position == ANYWHERE
    assert query().scale == 0.125


def with_nan():
    q = np.ones((1, 4, 64), np.float32)
    q[0, 2, 5] = np.nan
    return q


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": np.ones((4, 64), np.float32)}, r"q has shape \(4, 64\)"),
        ({"q": np.ones((0, 4, 64), np.float32)}, r"q has shape \(0, 4, 64\)"),
        ({"q": np.ones((1, 4, 65), np.float32)}, r"\[queries, heads, 64\]"),
        ({"q": np.ones((1, 3, 64), np.float32)}, "3 heads"),
        ({"q": np.ones((1, 4, 64), np.float64)}, "q is float64"),
        ({"q": with_nan()}, r"NaN, first at \[0, 2, 5\]"),
        ({"q": np.full((1, 4, 64), 0x7FC0, np.uint16)}, "NaN"),
        ({"length": 0}, "length is 0"),
        ({"length": 17}, "length is 17, and the blocks hold 16"),
        ({"layer": 2}, "layer 2"),
        ({"layer": -1}, "layer -1"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"soft_cap": -1.0}, "soft_cap is -1"),
        ({"window": -1}, "window is -1"),
        ({"causal": False, "window": 3}, "set causal"),
        ({"position": -2}, "position is -2"),
        ({"q": np.ones((11, 4, 64), np.float32)}, "11 queries and length is 10"),
        ({"sinks": np.zeros(3)}, "sinks"),
        ({"sinks": np.full(4, np.nan)}, "sinks"),
        ({"v_dim": 32}, "v_dim is 32"),
        ({"geometry": LATENT}, "v_dim is 0"),
        ({"geometry": LATENT, "v_dim": 577}, "v_dim is 577"),
        ({"geometry": Geometry(block_size=1, layers=1, kv_heads=1, k_dim=1025, v_dim=1)}, "limit of 1024"),
        ({"geometry": Geometry(block_size=1, layers=1, kv_heads=1, k_dim=8, v_dim=8, layout="opaque:x")}, "opaque:x"),
        ({"geometry": Geometry(block_size=1, layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="int8")}, "int8"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        query(**changes)


def test_columns_of_blocks_must_fit_together():
    good = Blocks.make([1, 2], tokens=[3, 4], positions=[0, 16])
    assert good.token_count == 7
    assert len(good.take(slice(0, 1))) == 1
    with pytest.raises(ValueError, match="tokens is int64"):
        Blocks(good.addresses, good.scales, good.dtypes, good.positions, good.positions, good.tiers)
    with pytest.raises(ValueError, match="scales"):
        Blocks(good.addresses, good.scales[:1], good.dtypes, good.tokens, good.positions, good.tiers)


def test_bf16_is_rounded_to_nearest_even_and_keeps_nan():
    values = np.array([1.0, 1.00390625, 1.01171875, np.nan, np.inf, -3.0e38, 1e-40], np.float32)
    bits = from_fp32(values, "bf16")
    assert bits[:3].tolist() == [0x3F80, 0x3F80, 0x3F82]
    assert np.isnan(to_fp32(bits[3:4]))[0]
    assert np.isposinf(to_fp32(bits[4:5]))[0]
    with pytest.raises(ValueError, match="int8"):
        from_fp32(values, "int8")


def test_a_namespace_has_the_code_of_its_dtype_or_is_refused():
    assert code_of(SHAPE) == 0
    with pytest.raises(ValueError, match="int8"):
        code_of(Geometry(block_size=1, layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="int8"))
