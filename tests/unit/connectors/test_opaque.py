"""Geometries of objects whose bytes mean nothing to us."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.connectors.opaque import opaque_geometry
from kvtierd.core.geometry import MAX_BLOCK_BYTES

SMOOTH = st.lists(st.sampled_from([2, 2, 2, 2, 3, 5, 7, 13, 61]), min_size=1, max_size=18)


@given(SMOOTH)
def test_every_product_of_small_numbers_is_kept_to_the_byte(factors):
    nbytes = 1
    for factor in factors:
        if nbytes * factor <= MAX_BLOCK_BYTES:
            nbytes *= factor
    geometry = opaque_geometry(nbytes, "opaque:test")
    assert geometry.block_bytes == nbytes
    assert geometry.layers == 1


@pytest.mark.parametrize("nbytes", [0, -1, MAX_BLOCK_BYTES + 1])
def test_sizes_out_of_range_are_named(nbytes):
    with pytest.raises(ValueError, match=str(nbytes)):
        opaque_geometry(nbytes, "opaque:test")


def test_a_size_with_a_large_prime_factor_is_refused():
    with pytest.raises(ValueError, match="1000003 bytes"):
        opaque_geometry(1_000_003, "opaque:test")
