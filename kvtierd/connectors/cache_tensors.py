"""Between torch's tensors and the NumPy views that kv_layout copies: no element is touched here on a CPU model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvtierd.connectors.kv_layout import Elements, LayerKv, carrier
from kvtierd.core.geometry import Geometry

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""KV dtypes that we store, as torch knows them."""

_SIGNED = {2: torch.int16, 4: torch.int32}  # torch hands NumPy no bf16; integers carry the bits


def check_plain(cache: Any) -> None:
    """Raise ValueError unless every layer is plain attention over the whole past of one sequence."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"layer {index} keeps its past in a {type(layer).__name__}; only a DynamicLayer can be stored and "
                "restored: no sliding windows, no recurrent state, no static, quantised or offloaded caches"
            )
        if layer.is_initialized and layer.keys.shape[0] != 1:
            raise ValueError(f"layer {index} holds a batch of {layer.keys.shape[0]}; the store serves one sequence")
    if getattr(cache, "offloading", False):
        raise ValueError("the cache is offloaded between layers, which cannot be stored and restored")


def layer_arrays(cache: Any, begin: int, end: int) -> list[LayerKv]:
    """View tokens `begin..end` of a cache of one sequence; layers on an accelerator are copied to the host."""
    return [LayerKv(*(carried(part[0, :, begin:end]) for part in (layer.keys, layer.values))) for layer in cache.layers]


def token_count(cache: Any) -> int:
    """Tokens that every layer of the cache holds: an interrupted forward pass leaves the last layers behind."""
    return min((layer.get_seq_length() for layer in cache.layers), default=0)


class LayerBuffers:
    """Host memory for the K and V of `tokens` tokens, one pair of tensors a layer, and their NumPy views in `arrays`.

    One allocation a layer and not one in all: the first forward pass concatenates each layer anew, and may then give
    the old one back.
    """

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        dtype = TORCH_DTYPES[geometry.dtype]
        self._tensors = [
            [torch.empty((1, geometry.kv_heads, tokens, dim), dtype=dtype) for dim in (geometry.k_dim, geometry.v_dim)]
            for _ in range(geometry.layers)
        ]
        element = carrier(geometry.dtype)
        self.arrays = [LayerKv(*(carried(part[0]).view(element) for part in pair)) for pair in self._tensors]

    def fill_cache(self, cache: Any, tokens: int, devices: Sequence[Any]) -> None:
        """Make the first `tokens` tokens the past of an empty cache, each layer on its device."""
        for layer, (keys, values), device in zip(cache.layers, self._tensors, devices, strict=True):
            k, v = (part[:, :, :tokens].to(device) for part in (keys, values))
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k, v


def carried(tensor: torch.Tensor) -> Elements:
    """A tensor as unsigned integers of its element size, a view where it lies in host memory already.

    Raises ValueError for a dtype that is not stored.
    """
    size = tensor.element_size()
    if size not in _SIGNED:
        raise ValueError(f"KV of dtype {tensor.dtype} is not stored; bf16, fp16 and fp32 are")
    array: Elements = tensor.detach().to("cpu").view(_SIGNED[size]).numpy()
    return array.view(f"u{size}")
