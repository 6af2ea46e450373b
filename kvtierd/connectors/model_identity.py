"""From a loaded transformers model to the namespace of its KV: ask the model itself, refuse what cannot be reused.

Sizes and dtype come from the cache that one token leaves behind, not from configuration fields, whose names differ
from model to model. The weights are fingerprinted as they lie in memory: a folder has no revision, and weights
merged, cast or trained after loading are other weights whatever the folder says.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import chain
from pathlib import Path
from typing import Any

import blake3
import torch
from transformers import DynamicCache

from kvtierd.connectors.cache_tensors import TORCH_DTYPES, check_plain
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace

_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct")
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}

Stamp = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What a model's KV is called, and the device that each layer's part lies on."""

    namespace: Namespace
    devices: tuple[Any, ...]


def identify(model: Any, *, block_size: int, name: str | None, revision: str | None, tenant_salt: str) -> Identity:
    """Name everything that shapes this model's KV, at the cost of a forward pass over one token.

    `name` defaults to the hub's name or the folder's; `revision` to a fingerprint of the weights, which reads them
    all once. Raises ValueError, saying what to do, for a model whose prefixes cannot be reused.
    """
    check_model(model)
    layers = probe_layers(model)
    namespace = Namespace(
        model=name or model_name(model),
        geometry=_geometry(layers, block_size),
        revision=fingerprint(model) if revision is None else revision,
        tenant_salt=tenant_salt,
        rope_digest=_digest(_rope(model.config)),
        quantisation=_digest(_quantisation(model.config)),
    )
    return Identity(namespace, tuple(layer.keys.device for layer in layers))


def check_model(model: Any) -> None:
    """Raise ValueError for a model whose KV depends on more than the tokens before it, or is not plain K and V."""
    if model.training:
        raise ValueError("the model is in training mode, where dropout shapes its KV: call model.eval() first")
    if model.config.is_encoder_decoder:
        raise ValueError("encoder-decoder models are not supported: their KV depends on the encoder's input")
    if adapters := adapter_names(model):
        raise ValueError(
            f"the model carries adapters ({', '.join(adapters)}), which change its KV unseen: merge them into the "
            "weights (merge_and_unload), or unload them"
        )
    if bad := _rope_types(_rope(model.config)) & _LENGTH_DEPENDENT_ROPE:
        raise ValueError(f"RoPE of type {bad.pop()!r} makes a prefix's keys depend on the length of the whole prompt")
    check_plain(empty_cache(model))


def empty_cache(model: Any) -> Any:
    """The cache that `generate` would make for this model."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def adapter_names(model: Any) -> list[str]:
    """Names of loaded PEFT adapters, whether transformers loaded them or PEFT wraps the model."""
    return sorted(getattr(model, "peft_config", None) or {})


def probe_layers(model: Any) -> list[Any]:
    """Run one token and return the layers of the cache that it leaves."""
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    cache = empty_cache(model)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache, use_cache=True)
    return list(cache.layers)


def model_name(model: Any) -> str:
    """The hub's name, or the last part of a local folder's: the same model moved elsewhere is the same model."""
    name = str(model.config._name_or_path or "")
    if name and Path(name).is_dir():
        name = Path(name).resolve().name
    return name or type(model).__name__


def fingerprint(model: Any) -> str:
    """BLAKE3 over names, dtypes, shapes and bytes of all parameters and buffers; half a gigabyte takes 0.1 s.

    Raises ValueError naming a tensor that has no plain bytes (on the meta device, or packed by a quantiser).
    """
    digest = blake3.blake3(b"kvtierd weights", max_threads=blake3.blake3.AUTO)
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers()), key=lambda item: item[0]):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        try:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ValueError(f"cannot fingerprint {name}: {error}; pass revision= to the store") from error
        digest.update(data)
    return f"blake3:{digest.hexdigest()}"


def weights_stamp(model: Any) -> Stamp:
    """A cheap value that changes when parameters are replaced or written in place (milliseconds at most)."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters())


def _geometry(layers: list[Any], block_size: int) -> Geometry:
    shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers}
    dtypes = {part.dtype for layer in layers for part in (layer.keys, layer.values)}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise ValueError(f"layers differ, which one namespace cannot hold: (heads, K dim, V dim) {shapes}, {dtypes}")
    (kv_heads, k_dim, v_dim), dtype = shapes.pop(), dtypes.pop()
    names = [name for name, known in TORCH_DTYPES.items() if known == dtype]
    if not names:
        raise ValueError(f"KV of dtype {dtype} is not stored; {', '.join(TORCH_DTYPES)} are")
    return Geometry(
        block_size=block_size, layers=len(layers), kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, dtype=names[0]
    )


def _rope(config: Any) -> dict[str, Any]:
    text = config.get_text_config(decoder=True)
    return {name: value for name in _ROPE_FIELDS if (value := getattr(text, name, None)) is not None}


def _rope_types(facts: Any) -> set[str]:
    """All RoPE types named anywhere in the configuration: some models nest them by kind of layer."""
    if not isinstance(facts, dict):
        return set()
    own = {str(facts[field]) for field in ("rope_type", "type") if field in facts}
    return own.union(*(_rope_types(value) for value in facts.values()))


def _quantisation(config: Any) -> dict[str, Any]:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def _digest(facts: dict[str, Any]) -> str:
    if not facts:
        return ""
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake3.blake3(text.encode()).hexdigest(length=16)
