"""From vLLM's configuration to the part of a namespace that all ranks share; what cannot be served is refused here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3

from kvtierd.connectors.vllm_plan import ModelFacts
from kvtierd.connectors.vllm_settings import Settings
from kvtierd.connectors.vllm_weights import commit_of, fingerprint

_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct")
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "yarn", "mrope", "proportional"})
"""Kinds whose angles do not depend on the length that the engine was started for."""

_FULL_ATTENTION = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


def check_config(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The one KV cache spec that we serve. Raises ValueError, saying what to do, for a configuration that we do not."""
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1:
        raise ValueError(
            f"KvtierdConnector serves models with one KV cache group; this one has {len(groups)} ({', '.join(kinds)}). "
            "Where the groups are full and sliding-window attention, --disable-hybrid-kv-cache-manager makes them one"
        )
    spec = groups[0].kv_cache_spec
    if kinds[0] not in _FULL_ATTENTION:
        raise ValueError(
            f"KvtierdConnector serves full attention; this model's KV cache is a {kinds[0]}, of which a prefix does "
            "not keep all blocks"
        )
    if getattr(spec, "non_causal", False):
        raise ValueError("KvtierdConnector serves causal attention; this model's KV depends on later tokens")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ValueError(f"KvtierdConnector does not serve {name}={size}: a rank then holds parts of blocks")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ValueError(
            "KvtierdConnector does not serve calculate_kv_scales: each start of the engine would give the same bytes "
            "another meaning. Use a checkpoint with scales, or none"
        )
    return spec


def model_facts(vllm_config: Any, settings: Settings) -> ModelFacts:
    """Name whatever shapes this engine's KV beside tokens, adapters and a rank's share; reads the weights' files where
    nothing else names them. Raises ValueError where they cannot be named."""
    model = vllm_config.model_config
    return ModelFacts(
        model=settings.model or model_name(str(model.model)),
        revision=settings.revision or _revision(vllm_config),
        tenant_salt=settings.tenant_salt,
        rope_digest=_rope_digest(model),
        quantisation=_precision(vllm_config),
    )


def model_name(path: str) -> str:
    """The hub's name, or the last part of a local path: the same model moved elsewhere is the same model."""
    local = Path(path)
    return local.resolve().name if local.exists() else path


def _revision(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy:{model.seed}"
    return weights_revision(str(model.model), model.revision, load.download_dir)


def weights_revision(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """Which weights a local path or a model of the hub are: their commit, else a fingerprint of their files.

    Raises ValueError where neither is to be had.
    """
    path = Path(model)
    if path.exists():
        return commit_of(path.resolve() / "config.json") or fingerprint(path)
    if commit := _hub_commit(model, revision, cache):
        return commit
    raise ValueError(
        f"cannot tell which weights {model} are: they are no local folder and not in the hub's cache. "
        'Name them by the setting "revision"'
    )


def _hub_commit(name: str, revision: str | None, cache: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache  # a dependency of vLLM, wanted for models of the hub only

    found = try_to_load_from_cache(name, "config.json", cache_dir=cache, revision=revision)
    return commit_of(Path(found)) if isinstance(found, str) else None


def _precision(vllm_config: Any) -> str:
    """Formats of weights, computation and cache: the same cache dtype can come from other computations."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "weights": str(model.quantization or ""),
        "weights_config": repr(getattr(model, "quantization_config", None) or ""),
        "compute": str(model.dtype),
        "cache": str(cache.cache_dtype),
        "skipped": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ())),
        "load": "" if str(vllm_config.load_config.load_format) != "dummy" else "dummy",
    }
    return _digest(facts)


def _rope_digest(model: Any) -> str:
    """RoPE as configured, with overrides; and the length the engine was started for where angles depend on it."""
    text = model.hf_text_config
    facts: dict[str, Any] = {name: value for name in _ROPE_FIELDS if (value := getattr(text, name, None)) is not None}
    if _rope_kinds(facts) - _PLAIN_ROPE:
        facts["max_model_len"] = model.max_model_len
    if overrides := getattr(model, "hf_overrides", None):
        facts["overrides"] = repr(overrides) if not isinstance(overrides, dict) else overrides
    return _digest(facts)


def _rope_kinds(facts: Any) -> set[str]:
    """All kinds of RoPE named anywhere in the configuration: some models nest them by kind of layer."""
    if not isinstance(facts, dict):
        return set()
    own = {str(facts[field]) for field in ("rope_type", "type") if field in facts}
    return own.union(*(_rope_kinds(value) for value in facts.values()))


def _digest(facts: dict[str, Any]) -> str:
    return blake3.blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(length=16)
