"""FP8 on the CPU: whole layers of a block between the exact form and the FP8 form (`kvtierd.core.stored_form`).

One call runs on one thread without the GIL. Callers share out blocks and layers on their threads: a layer of half a
MiB takes about 0.1 ms, so a range of layers is a piece that can be kept as short as cancelling wants it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import EncodedLayout
from kvtierd.gpu.host_kernels import codec as kernels

_ENCODERS: dict[str, Callable[..., None]] = {
    "bf16": kernels.encode_bf16,
    "fp16": kernels.encode_fp16,
    "fp32": kernels.encode_fp32,
}
_DECODERS: dict[str, Callable[..., None]] = {
    "bf16": kernels.decode_bf16,
    "fp16": kernels.decode_fp16,
    "fp32": kernels.decode_fp32,
}
_CARRIERS: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "fp16": np.dtype(np.uint16),
    "fp32": np.dtype(np.uint32),
}

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """K or V of a layer: where its elements, codes and groups begin, and how a kernel walks over it.

    `elements` and `codes` count elements; `shape` is (groups, runs, length, group stride, run stride).
    """

    begin: int
    count: int
    first_group: int
    shape: tuple[int, int, int, int, int]


def parts_of(geometry: Geometry) -> tuple[Part, ...]:
    """K, and V where there is one."""
    k = _part(geometry, geometry.k_dim, 0, 0)
    return (k, _part(geometry, geometry.v_dim, k.count, geometry.kv_heads)) if geometry.v_dim else (k,)


def _part(geometry: Geometry, dim: int, begin: int, first_group: int) -> Part:
    tokens, heads = geometry.block_size, geometry.kv_heads
    if geometry.layout == "hnd":
        shape = (heads, 1, tokens * dim, tokens * dim, tokens * dim)
    else:
        shape = (heads, tokens, dim, dim, heads * dim)
    return Part(begin, tokens * heads * dim, first_group, shape)


class BlockCodec:
    """Encodes and decodes the blocks of one geometry. Raises ValueError for a geometry that has no FP8 form."""

    def __init__(self, geometry: Geometry) -> None:
        self.layout = EncodedLayout(geometry)
        self._geometry = geometry
        self._parts = parts_of(geometry)
        self._element = _CARRIERS[geometry.dtype]
        self._encode, self._decode = _ENCODERS[geometry.dtype], _DECODERS[geometry.dtype]

    def encode(self, block: Bytes, target: Bytes, first_layer: int = 0, end_layer: int | None = None) -> None:
        """Encode layers of a block into its FP8 form, scales, errors and padding included.

        `block` is [geometry.slot_bytes] uint8, `target` [layout.slot_bytes]; they must not overlap. ValueError where a
        size is another or the layers are not within the block.
        """
        self._check(block, target)
        for layer in self._layers(first_layer, end_layer):
            elements, encoded = self._elements(block, layer), self._encoded(target, layer)
            encoded[self.layout.k_codes + self.layout.v_codes : self.layout.scales_offset] = 0
            encoded[self.layout.layer_bytes :] = 0
            columns = self._columns(encoded)
            for part in self._parts:
                codes = encoded[part.begin : part.begin + part.count]
                groups = slice(part.first_group, part.first_group + part.shape[0])
                source = elements[part.begin : part.begin + part.count]
                self._encode(source, codes, *(column[groups] for column in columns), *part.shape, kernels.CHOOSE)

    def decode(self, encoded: Bytes, target: Bytes, first_layer: int = 0, end_layer: int | None = None) -> None:
        """Decode layers of the FP8 form into the exact form's place; the padding becomes zero.

        `encoded` is [layout.slot_bytes] uint8, `target` [geometry.slot_bytes]. ValueError as `encode`.
        """
        self._check(target, encoded)
        for layer in self._layers(first_layer, end_layer):
            elements, layer_codes = self._elements(target, layer), self._encoded(encoded, layer)
            scales = self._columns(layer_codes)[0]
            for part in self._parts:
                codes = layer_codes[part.begin : part.begin + part.count]
                groups = slice(part.first_group, part.first_group + part.shape[0])
                result = elements[part.begin : part.begin + part.count]
                self._decode(codes, result, scales[groups], *part.shape)
            stride = self._geometry.layer_stride
            target[layer * stride + self._geometry.layer_bytes : (layer + 1) * stride] = 0

    def scales(self, encoded: Bytes) -> Floats:
        """The scales of a block in FP8, float32 [layers, groups], a view."""
        return self._column(encoded, 0)

    def relative_l2(self, encoded: Bytes) -> Floats:
        """Relative L2 error of each group, float32 [layers, groups], a view."""
        return self._column(encoded, 1)

    def largest_error(self, encoded: Bytes) -> Floats:
        """Largest error of each group over its largest magnitude, float32 [layers, groups], a view."""
        return self._column(encoded, 2)

    def _column(self, encoded: Bytes, index: int) -> Floats:
        layout = self.layout
        rows = encoded.reshape(self._geometry.layers, layout.layer_stride)
        begin = layout.scales_offset + 4 * index * layout.groups
        column: Floats = rows[:, begin : begin + 4 * layout.groups].view(np.float32)
        return column

    def _columns(self, layer: Bytes) -> tuple[Floats, Floats, Floats]:
        groups, begin = self.layout.groups, self.layout.scales_offset
        values = layer[begin : begin + 12 * groups].view(np.float32)
        return values[:groups], values[groups : 2 * groups], values[2 * groups :]

    def _elements(self, block: Bytes, layer: int) -> npt.NDArray[Any]:
        begin = layer * self._geometry.layer_stride
        return block[begin : begin + self._geometry.layer_bytes].view(self._element)

    def _encoded(self, block: Bytes, layer: int) -> Bytes:
        stride = self.layout.layer_stride
        return block[layer * stride : (layer + 1) * stride]

    def _layers(self, first: int, end: int | None) -> range:
        last = self._geometry.layers if end is None else end
        if not 0 <= first <= last <= self._geometry.layers:
            raise ValueError(f"layers {first}..{last} are not within the block's {self._geometry.layers}")
        return range(first, last)

    def _check(self, exact: Bytes, encoded: Bytes) -> None:
        for name, array, size in (
            ("the block", exact, self._geometry.slot_bytes),
            ("the FP8 form", encoded, self.layout.slot_bytes),
        ):
            if array.shape != (size,) or array.dtype != np.uint8 or not array.flags.c_contiguous:
                raise ValueError(f"{name} is {array.dtype} {array.shape}; contiguous uint8 ({size},) is wanted")
