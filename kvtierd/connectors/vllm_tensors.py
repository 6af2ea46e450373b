"""From the tensors that vLLM registers to pages and their geometry; what cannot be served is refused by name."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import Any

import blake3
import numpy as np
import torch

from kvtierd.connectors.vllm_pages import EnginePages
from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import DTYPE_BYTES, Geometry

_DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8",
    "torch.uint8": "uint8",
}


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """How vLLM lays out one layer: `spec` is its KV cache spec, `blocks` the number of its blocks, `backend` text that
    names whatever else shapes a page (attention backend, instruction set)."""

    spec: Any
    blocks: int
    backend: str


def engine_pages(tensors: Sequence[Any], names: Sequence[str], layout: CacheLayout) -> tuple[Geometry, EnginePages]:
    """Pages over vLLM's cache, one tensor a layer, [blocks, heads, tokens, content] with any strides inside a block.

    Raises ValueError, naming the layer, for tensors that are not in host memory, or whose blocks are no single runs.
    """
    runs = {_run(tensor, name, layout) for tensor, name in zip(tensors, names, strict=True)}
    if len(runs) != 1:
        raise ValueError(f"layers differ, which one namespace cannot hold: (bytes, dtype, strides) {sorted(runs)}")
    page_bytes, dtype, order = runs.pop()
    geometry = _geometry(len(tensors), page_bytes, dtype, layout, _layout_name(layout, order, names))
    return geometry, EnginePages(geometry, _page_views(tensors, layout, page_bytes))


def _run(tensor: Any, name: str, layout: CacheLayout) -> tuple[int, str, str]:
    """Bytes of a block of one layer, its dtype, and the order of its axes; refuses a block that is not one run."""
    if tensor.device.type != "cpu":
        raise ValueError(f"layer {name} lies on {tensor.device}: this version serves KV caches in host memory only")
    if tensor.shape[0] % layout.blocks:
        raise ValueError(f"layer {name} has {tensor.shape[0]} blocks; the engine says {layout.blocks}")
    size = tensor.element_size()
    inner = sorted(zip(tensor.stride()[1:], tensor.shape[1:], range(1, tensor.dim()), strict=True))
    expected = 1
    for stride, length, _axis in inner:
        if length > 1 and stride != expected:
            raise ValueError(f"a block of layer {name} is no single run of bytes: strides {tensor.stride()}")
        expected *= length
    parts = tensor.shape[0] // layout.blocks  # a kernel may use smaller blocks than the scheduler
    if parts > 1 and tensor.stride(0) != expected:
        raise ValueError(f"the parts of a block of layer {name} do not lie side by side: strides {tensor.stride()}")
    order = "".join(str(axis) for _stride, _length, axis in reversed(inner))
    return expected * size * parts, str(tensor.dtype), f"{order}/{parts}"


def _geometry(layers: int, page_bytes: int, dtype: str, layout: CacheLayout, name: str) -> Geometry:
    """K and V by name where the page is nothing else, else bytes: packed formats have scales or states beside them."""
    spec = layout.spec
    element = _DTYPES.get(dtype, "uint8")
    tokens, heads = int(spec.block_size), int(spec.num_kv_heads)
    k_dim, v_dim = int(spec.head_size), int(spec.head_size_v or 0)
    if page_bytes != tokens * heads * (k_dim + v_dim) * DTYPE_BYTES[element]:
        if page_bytes % tokens:
            raise ValueError(f"a block of {tokens} tokens takes {page_bytes} bytes a layer, no whole number each")
        heads, k_dim, v_dim, element = 1, page_bytes // tokens, 0, "uint8"
    return Geometry(
        block_size=tokens, layers=layers, kv_heads=heads, k_dim=k_dim, v_dim=v_dim, dtype=element, layout=name
    )


def _layout_name(layout: CacheLayout, order: str, names: Sequence[str]) -> str:
    """Everything that decides what a page's bytes mean, beside sizes: other bytes must be in another namespace."""
    digest = blake3.blake3("\n".join(names).encode()).hexdigest(length=8)
    return f"opaque:vllm:{layout.backend}:{order}:{digest}"


def _page_views(tensors: Sequence[Any], layout: CacheLayout, page_bytes: int) -> list[Bytes]:
    storages: dict[int, Bytes] = {}
    views = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[storage.data_ptr()] = flat.numpy()
        memory = storages[storage.data_ptr()]
        begin = tensor.storage_offset() * tensor.element_size()
        step = tensor.stride(0) * tensor.element_size() * (tensor.shape[0] // layout.blocks)
        if begin + (layout.blocks - 1) * step + page_bytes > memory.size:
            raise ValueError(f"the last block ends behind its storage of {memory.size} bytes")
        views.append(np.ndarray((layout.blocks, page_bytes), np.uint8, memory, begin, (step, 1)))
    return views


def host_backend(backend: str) -> str:
    """A backend's name with what decides how it orders bytes on this processor: vLLM's CPU attention keeps K transposed
    or in tiles, as its instruction set has it."""
    amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
    return f"{backend}:{platform.machine()}:{torch.backends.cpu.get_cpu_capability()}{'+amx' if amx else ''}"
