"""FP8 on the CPU: whole layers of a block between the exact form and the FP8 form (`kvtierd.core.stored_form`).

One call runs on one thread without the GIL, and goes to compiled code once, however many layers it has. Callers share
out blocks and layers on their threads: a layer of half a MiB takes some 0.05 ms, so a range of layers is a piece that
can be kept as short as cancelling wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import EncodedLayout
from kvtierd.gpu.host_kernels import codec as kernels
from kvtierd.gpu.host_kernels import codec_decode
from kvtierd.gpu.host_kernels.codec_form import form_of, parts_of

_ENCODERS: dict[str, Callable[..., None]] = {
    "bf16": kernels.encode_bf16,
    "fp16": kernels.encode_fp16,
    "fp32": kernels.encode_fp32,
}
_DECODERS: dict[str, Callable[..., None]] = {
    "bf16": codec_decode.decode_bf16,
    "fp16": codec_decode.decode_fp16,
    "fp32": codec_decode.decode_fp32,
}
_CARRIERS: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "fp16": np.dtype(np.uint16),
    "fp32": np.dtype(np.uint32),
}

Floats = npt.NDArray[np.float32]


class BlockCodec:
    """Encodes and decodes the blocks of one geometry. Raises ValueError for a geometry that has no FP8 form."""

    def __init__(self, geometry: Geometry) -> None:
        self.layout = EncodedLayout(geometry)
        self._geometry = geometry
        self._element = _CARRIERS[geometry.dtype]
        self._form = (form_of(self.layout, self._element.itemsize), *parts_of(geometry))
        self._encode, self._decode = _ENCODERS[geometry.dtype], _DECODERS[geometry.dtype]

    def encode(
        self,
        block: Bytes,
        target: Bytes,
        first_layer: int = 0,
        end_layer: int | None = None,
        *,
        past_caches: bool = False,
    ) -> None:
        """Encode layers of a block into its FP8 form, scales, errors and padding included.

        `block` is [geometry.slot_bytes] uint8, `target` [layout.slot_bytes]; they must not overlap. ValueError where a
        size is another or the layers are not within the block. `past_caches` writes codes of bf16 to memory without
        bringing them into the caches (where target and runs lie on whole cache lines): a seventh faster where the
        target is not in a cache, for callers who do not read it soon. Whoever hashes it next is a quarter faster with
        it in the cache.
        """
        self._check(block, target)
        first, end = self._layers(first_layer, end_layer)
        what = (block.view(self._element), target, target.view(np.float32), first, end)
        self._encode(*what, *self._form, kernels.CHOOSE, past_caches)

    def decode(self, encoded: Bytes, target: Bytes, first_layer: int = 0, end_layer: int | None = None) -> None:
        """Decode layers of the FP8 form into the exact form's place; the padding becomes zero.

        `encoded` is [layout.slot_bytes] uint8, `target` [geometry.slot_bytes]. ValueError as `encode`.
        """
        self._check(target, encoded)
        first, end = self._layers(first_layer, end_layer)
        self._decode(encoded, encoded.view(np.float32), target.view(self._element), first, end, *self._form)

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

    def _layers(self, first: int, end: int | None) -> tuple[int, int]:
        last = self._geometry.layers if end is None else end
        if not 0 <= first <= last <= self._geometry.layers:
            raise ValueError(f"layers {first}..{last} are not within the block's {self._geometry.layers}")
        return first, last

    def _check(self, exact: Bytes, encoded: Bytes) -> None:
        for name, array, size in (
            ("the block", exact, self._geometry.slot_bytes),
            ("the FP8 form", encoded, self.layout.slot_bytes),
        ):
            if array.shape != (size,) or array.dtype != np.uint8 or not array.flags.c_contiguous:
                raise ValueError(f"{name} is {array.dtype} {array.shape}; contiguous uint8 ({size},) is wanted")
