"""Spans of tokens within blocks: what part of a block in slot form belongs to which tokens, and copying it.

An extent of n tokens has the slot form of a block of n tokens: K, then V, of each layer. Its tokens are next to each
other for each layer (`nhd`) or for each layer and head (`hnd`), so a span is copied as one strided piece of each.
"""

from __future__ import annotations

import msgspec

from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import DTYPE_BYTES, LAYOUTS, Geometry


def of_tokens(geometry: Geometry, tokens: int) -> Geometry:
    """The shape of an extent of so many tokens. Raises ValueError for a layout whose bytes have no known order."""
    if geometry.layout not in LAYOUTS:
        raise ValueError(f"layout {geometry.layout!r} is opaque: nobody knows which of its bytes belong to which token")
    return geometry if tokens == geometry.block_size else msgspec.structs.replace(geometry, block_size=tokens)


def copy_tokens(source: Bytes, of: Geometry, first: int, target: Bytes, to: Geometry, at: int, tokens: int) -> None:
    """Copy `tokens` tokens from `first` of a block in slot form (shape `of`) to `at` of another (shape `to`).

    The shapes may differ in block_size only. Raises ValueError for tokens outside either.
    """
    if not (0 <= first <= of.block_size - tokens and 0 <= at <= to.block_size - tokens):
        raise ValueError(f"{tokens} tokens from {first} of {of.block_size} do not fit at {at} of {to.block_size}")
    for mine, theirs in zip(_by_token(source, of), _by_token(target, to), strict=True):
        theirs[:, :, at : at + tokens] = mine[:, :, first : first + tokens]


def clear_padding(slot: Bytes, geometry: Geometry) -> None:
    """Zero what follows each layer part, as the slot form has it."""
    if geometry.layer_stride != geometry.layer_bytes:
        slot[: geometry.slot_bytes].reshape(geometry.layers, -1)[:, geometry.layer_bytes :] = 0


def _by_token(slot: Bytes, geometry: Geometry) -> tuple[Bytes, Bytes]:
    """K and V as views [layers, heads or 1, tokens, bytes]."""
    parts = slot[: geometry.slot_bytes].reshape(geometry.layers, geometry.layer_stride)
    outer = geometry.kv_heads if geometry.layout == "hnd" else 1
    heads = geometry.kv_heads // outer
    row = heads * DTYPE_BYTES[geometry.dtype]
    shape = (geometry.layers, outer, geometry.block_size)
    keys = parts[:, : geometry.k_bytes].reshape(*shape, row * geometry.k_dim)
    values = parts[:, geometry.k_bytes : geometry.layer_bytes].reshape(*shape, row * geometry.v_dim)
    return keys, values
