"""Attention over any blocks is what the float64 oracle says, in any order, in any split, merged in any order."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import DTYPE_CODES, checked_query, merge
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.reference.attention import relative_error
from tests.unit.gpu.attention_blocks import make_kv

DIMS = st.sampled_from([1, 8, 17, 64, 80, 96, 128, 192, 256])


@st.composite
def cases(draw):
    block_size = draw(st.sampled_from([1, 3, 16, 64, 70]))
    latent = draw(st.booleans()) and draw(st.booleans())
    k_dim = draw(DIMS)
    geometry = Geometry(
        block_size=block_size,
        layers=1,
        kv_heads=1 if latent else draw(st.integers(1, 3)),
        k_dim=k_dim,
        v_dim=0 if latent else draw(DIMS),
        layout=draw(st.sampled_from(["nhd", "hnd"])),
    )
    edge = block_size * draw(st.integers(1, 3))
    length = max(1, edge + draw(st.integers(-1, 1)))
    queries = draw(st.integers(1, min(length, 6)))
    return {
        "geometry": geometry,
        "length": length,
        "queries": queries,
        "heads": geometry.kv_heads * draw(st.integers(1, 9)),
        "v_dim": draw(st.integers(1, k_dim)) if latent else 0,
        "dtypes": tuple(draw(st.lists(st.sampled_from(["coded", *sorted(DTYPE_CODES)]), min_size=1, max_size=4))),
        "window": draw(st.sampled_from([0, 0, 1, block_size, 2 * block_size + 1])),
        "soft_cap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "seed": draw(st.integers(0, 1000)),
        "shift": draw(st.sampled_from([0, 0, 1, 2, 5])),
    }


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(), st.integers(0, 10))
def test_any_blocks_in_any_order_and_split_are_what_the_oracle_says(case, cut):
    rng = np.random.default_rng(case["seed"])
    geometry, length = case["geometry"], case["length"]
    kv = make_kv(rng, geometry, length, case["dtypes"], v_dim=case["v_dim"], shift=case["shift"])
    q = rng.standard_normal((case["queries"], case["heads"], geometry.k_dim)).astype(np.float32)
    query = checked_query(
        q, geometry, layer=0, length=length, available=length,
        window=case["window"], soft_cap=case["soft_cap"], v_dim=case["v_dim"],
    )  # fmt: skip
    expected, expected_lse = kv.reference(query)
    device = HostAttention()
    order = rng.permutation(len(kv.blocks))
    parts = []
    for side in (order[:cut], order[cut:]):
        partial = device.begin(query)
        assert device.compute(partial, kv.blocks.take(side))
        parts.append(partial.result())
    whole = device.begin(query)
    assert device.compute(whole, kv.blocks.take(order))
    for output, lse in (merge(parts), merge(parts[::-1]), whole.result()):
        # A head whose values cancel has a small reference: the error is bounded by that of the values themselves.
        size = max(1.0, 1.0 / max(1e-3, float(np.min(np.linalg.norm(expected, axis=-1), initial=1.0))))
        assert relative_error(output, expected) <= 1e-5 * size
        assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
