"""How the codec's kernels are told where the layers, parts and groups of a block lie."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import SCALE_BYTES, EncodedLayout, rotation
from kvtierd.index.jit import Word


class Part(NamedTuple):
    """K or V of a layer, all int64: first element and how many, first group, and how a kernel walks over the groups.

    Its vectors are of `dim` elements, and `rotation` channels of each are spread over one another (1: none).
    """

    begin: Word
    count: Word
    first_group: Word
    groups: Word
    runs: Word
    length: Word
    group_stride: Word
    run_stride: Word
    dim: Word
    rotation: Word


class Form(NamedTuple):
    """Where the layers of a block lie, all int64, in elements and codes; `scales` in float32 from a layer's begin.

    The FP8 form of a layer is `codes` codes, zeros up to the scales, 3 x `groups` float32, and zeros.
    """

    element_stride: Word
    elements: Word
    code_stride: Word
    codes: Word
    scales: Word
    groups: Word


_named: Any = types.NamedUniTuple
FORM = _named(types.int64, len(Form._fields), Form)
PART = _named(types.int64, len(Part._fields), Part)
U1, U2, U4, F4 = types.uint8[::1], types.uint16[::1], types.uint32[::1], types.float32[::1]
LAYERS = (types.int64, types.int64)


def parts_of(geometry: Geometry) -> tuple[Part, Part]:
    """K and V; the V of a latent form has no elements."""
    k = _part(geometry, geometry.k_dim, 0, 0, rotation(geometry))
    return k, _part(geometry, geometry.v_dim, k.count, geometry.kv_heads if geometry.v_dim else 0, 1)


def _part(geometry: Geometry, dim: int, begin: int, first_group: int, spread: int) -> Part:
    tokens, heads = geometry.block_size, geometry.kv_heads
    if geometry.layout == "hnd":
        shape = (heads, 1, tokens * dim, tokens * dim, tokens * dim)
    else:
        shape = (heads, tokens, dim, dim, heads * dim)
    return Part(begin, tokens * heads * dim, first_group, *shape, dim, spread)


def form_of(layout: EncodedLayout, element_bytes: int) -> Form:
    """The form of a geometry's blocks; `element_bytes` is what an element takes before it is encoded."""
    geometry = layout.geometry
    return Form(
        element_stride=geometry.layer_stride // element_bytes,
        elements=geometry.layer_bytes // element_bytes,
        code_stride=layout.layer_stride,
        codes=layout.k_codes + layout.v_codes,
        scales=layout.scales_offset // SCALE_BYTES,
        groups=layout.groups,
    )
