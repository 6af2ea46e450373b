"""Attention through the manager over dtypes, dims, groups, lengths and orders of tiers, against the float64 oracle."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.testing.attention import random_kv
from tests.unit.tiers.attending import run

DIMS = st.sampled_from([8, 17, 64, 80, 128])


@st.composite
def cases(draw):
    latent = draw(st.integers(0, 4)) == 0
    k_dim = draw(DIMS)
    geometry = Geometry(
        block_size=draw(st.sampled_from([1, 4, 16, 64])),
        layers=draw(st.integers(1, 3)),
        kv_heads=1 if latent else draw(st.integers(1, 3)),
        k_dim=k_dim,
        v_dim=0 if latent else draw(DIMS),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        layout=draw(st.sampled_from(["nhd", "hnd"])),
    )
    tiers = draw(st.lists(st.sampled_from(["gpu", "host", "nvme"]), min_size=1, max_size=6))
    size = geometry.block_size
    edge = size * draw(st.integers(0, len(tiers)))
    length = min(max(1, edge + draw(st.integers(-1, 1))), size * len(tiers))
    options = {"window": draw(st.sampled_from([0, 0, 1, size + 1])), "soft_cap": draw(st.sampled_from([0.0, 5.0]))}
    if latent:
        options["v_dim"] = draw(st.integers(1, k_dim))
    return {
        "geometry": geometry,
        "tiers": tiers,
        "length": length,
        "q": (draw(st.integers(1, min(3, length))), geometry.kv_heads * draw(st.integers(1, 5)), k_dim),
        "options": options,
        "layer": draw(st.integers(0, geometry.layers - 1)),
        "seed": draw(st.integers(0, 100)),
        "ring_parts": draw(st.integers(1, 4)),
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_blocks_in_any_tiers_are_what_the_oracle_says(case):
    geometry, length, options = case["geometry"], case["length"], case["options"]
    q = np.random.default_rng(case["seed"]).standard_normal(case["q"]).astype(np.float32)
    kv = random_kv(geometry, len(case["tiers"]), seed=case["seed"])

    async def scenario(made):
        await made.place(case["tiers"])
        sequence = await made.open()
        output, lse, reply = await made.attend(sequence, q, case["layer"], lengths=[length], **options)
        expected, expected_lse = kv.reference(q, case["layer"], length, **options)
        # A head whose values cancel has a small reference: the error is bounded by that of the values themselves.
        size = max(1.0, 1.0 / max(1e-3, float(np.min(np.linalg.norm(expected, axis=-1), initial=1.0))))
        assert relative_error(output, expected) <= 1e-5 * size
        assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
        assert reply.gpu_parts + reply.host_parts + reply.nvme_parts <= len(case["tiers"])

    run(scenario, kv, staging=case["ring_parts"] * geometry.layer_stride, capacity=8 << 20)
