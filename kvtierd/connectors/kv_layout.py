"""Between an engine's cache tensors and blocks in slot form, in NumPy: the canonical layout `nhd`.

An engine holds one K and one V array a layer, [heads, tokens, dim]; a slot holds, per layer, K [tokens, heads, dim],
then V, then padding to 4 KiB. Elements are moved as unsigned integers of their size, so every dtype goes through
unchanged, bf16 too, which NumPy does not know. There is one strided copy per layer and K or V (some 100 KB), straight
between the engine's memory and the slot, and each part is hashed while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.geometry import DTYPE_BYTES, Geometry

Elements = npt.NDArray[np.unsignedinteger[Any]]

_CARRIERS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class LayerKv(NamedTuple):
    """One layer of an engine's cache as unsigned integers: `k` [heads, tokens, k_dim], `v` [heads, tokens, v_dim]."""

    k: Elements
    v: Elements


def carrier(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer that carries elements of a KV dtype. Raises ValueError for a dtype we do not know."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    return np.dtype(_CARRIERS[DTYPE_BYTES[dtype]])


class SlotView:
    """A slot as arrays: `k` [layers, tokens, heads, k_dim] and `v` [layers, tokens, heads, v_dim], both views.

    `slot` is [slot_bytes] uint8. Raises ValueError when it has another size or the layout is not `nhd`.
    """

    def __init__(self, slot: Bytes, geometry: Geometry) -> None:
        if geometry.layout != "nhd":
            raise ValueError(f"layout {geometry.layout!r} is not nhd, the one this copies")
        if slot.shape != (geometry.slot_bytes,):
            raise ValueError(f"the slot has shape {slot.shape}; ({geometry.slot_bytes},) is wanted")
        self._geometry = geometry
        self._layers = slot.reshape(geometry.layers, geometry.layer_stride)
        self.k = self._part(0, geometry.k_bytes, geometry.k_dim)
        self.v = self._part(geometry.k_bytes, geometry.v_bytes, geometry.v_dim)

    def fill(self, cache: Sequence[LayerKv], first_token: int, sums: Sums) -> None:
        """Write the block that starts at `first_token` of the cache and hash each layer part into `sums` [layers].

        The padding is zeroed, so that nothing that lay in the slot before travels with the block.
        """
        tokens = slice(first_token, first_token + self._geometry.block_size)
        self._layers[:, self._geometry.layer_bytes :] = 0
        for layer, (k, v) in enumerate(cache):
            self.k[layer] = k[:, tokens].swapaxes(0, 1)
            self.v[layer] = v[:, tokens].swapaxes(0, 1)
            sums[layer] = self._hash(layer)

    def read(self, cache: Sequence[LayerKv], first_token: int, sums: Sums) -> bool:
        """Copy the block to `first_token` of the cache; False as soon as a layer part does not match its sum.

        The cache then holds bytes of no use from `first_token` on.
        """
        tokens = slice(first_token, first_token + self._geometry.block_size)
        for layer, (k, v) in enumerate(cache):
            if self._hash(layer) != int(sums[layer]):
                return False
            k[:, tokens] = self.k[layer].swapaxes(0, 1)
            v[:, tokens] = self.v[layer].swapaxes(0, 1)
        return True

    def _part(self, begin: int, size: int, dim: int) -> Elements:
        shape = self._geometry
        part = self._layers[:, begin : begin + size].view(carrier(shape.dtype))
        return part.reshape(shape.layers, shape.block_size, shape.kv_heads, dim)

    def _hash(self, layer: int) -> int:
        return xxhash.xxh3_64_intdigest(self._layers[layer, : self._geometry.layer_bytes].data)


def check_cache(cache: Sequence[LayerKv], geometry: Geometry, tokens: int) -> None:
    """Raise ValueError naming the first layer whose shape or element size is not what the geometry says."""
    if len(cache) != geometry.layers:
        raise ValueError(f"the cache has {len(cache)} layers; the namespace has {geometry.layers}")
    element = carrier(geometry.dtype)
    for layer, pair in enumerate(cache):
        for name, array, dim in (("K", pair.k, geometry.k_dim), ("V", pair.v, geometry.v_dim)):
            wanted = (geometry.kv_heads, tokens, dim)
            if array.shape != wanted or array.dtype != element:
                found = f"{array.shape} of {array.dtype.itemsize} bytes"
                raise ValueError(f"{name} of layer {layer} is {found}; {wanted} of {element.itemsize} bytes is wanted")
