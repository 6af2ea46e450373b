"""From the tensors that vLLM registers to pages and their geometry; what cannot be served is refused by name."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import Any

import blake3
import numpy as np
import torch

from kvtierd.connectors.vllm_device_pages import DevicePages
from kvtierd.connectors.vllm_pages import EnginePages, Pages
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


def engine_pages(
    tensors: Sequence[Any], names: Sequence[str], layout: CacheLayout, *, staged: bool = False
) -> tuple[Geometry, Pages]:
    """Pages over vLLM's cache, one tensor a layer, [blocks, heads, tokens, content] with any strides inside a block.

    In host memory they are read and written in place, unless `staged` says to treat it as a device. Raises ValueError,
    naming the layer, for tensors on devices that we do not know, or whose blocks are no single runs.
    """
    runs = {_run(tensor, name, layout) for tensor, name in zip(tensors, names, strict=True)}
    if len(runs) != 1:
        raise ValueError(f"layers differ, which one namespace cannot hold: (bytes, dtype, strides) {sorted(runs)}")
    page_bytes, dtype, order = runs.pop()
    geometry = _geometry(len(tensors), page_bytes, dtype, layout, _layout_name(layout, order, names))
    flat = _page_tensors(tensors, layout, page_bytes)
    if staged or tensors[0].device.type != "cpu":
        return geometry, DevicePages(geometry, flat)
    return geometry, EnginePages(geometry, _page_arrays(flat))


def _run(tensor: Any, name: str, layout: CacheLayout) -> tuple[int, str, str]:
    """Bytes of a block of one layer, its dtype, and the order of its axes; refuses a block that is not one run."""
    if tensor.device.type not in {"cpu", "cuda"}:
        raise ValueError(
            f"layer {name} lies on {tensor.device}; KV caches in host memory and on CUDA devices are served"
        )
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


def _page_tensors(tensors: Sequence[Any], layout: CacheLayout, page_bytes: int) -> list[Any]:
    """Each layer as [blocks, words] over the same memory: words of 8 bytes where everything is aligned to that, since a
    device copies these faster than bytes."""
    views = []
    for tensor in tensors:
        size = tensor.element_size()
        begin, step = tensor.storage_offset() * size, tensor.stride(0) * size * (tensor.shape[0] // layout.blocks)
        aligned = not (begin | step | page_bytes) % 8 and not tensor.untyped_storage().nbytes() % 8
        word, dtype = (8, torch.int64) if aligned else (1, torch.uint8)
        flat = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())
        shape, strides = (layout.blocks, page_bytes // word), (step // word, 1)
        views.append(torch.as_strided(flat, shape, strides, begin // word))
    if len({view.dtype for view in views}) > 1:
        raise ValueError("layers differ in their alignment")
    return views


def _page_arrays(tensors: Sequence[Any]) -> list[Bytes]:
    """The same in NumPy, as bytes; layers of one storage are views of one array."""
    storages: dict[int, Bytes] = {}
    views = []
    for tensor in tensors:
        storage, word = tensor.untyped_storage(), tensor.element_size()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        shape = (tensor.shape[0], tensor.shape[1] * word)
        memory, begin = storages[storage.data_ptr()], tensor.storage_offset() * word
        views.append(np.ndarray(shape, np.uint8, memory, begin, (tensor.stride(0) * word, 1)))
    return views


def device_backend(device: Any, backend: str) -> str:
    """A backend's name with what decides how it orders bytes on this device."""
    if device.type == "cpu":
        return host_backend(backend)
    return f"{backend}:{device.type}:{torch.cuda.get_device_capability(device)}"


def host_backend(backend: str) -> str:
    """A backend's name with what decides how it orders bytes on this processor: vLLM's CPU attention keeps K transposed
    or in tiles, as its instruction set has it."""
    amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
    return f"{backend}:{platform.machine()}:{torch.backends.cpu.get_cpu_capability()}{'+amx' if amx else ''}"
