"""Which calls of `generate` a prefix store understands; everything else is refused by name.

A keyword argument that shapes the KV and is not part of the block keys would make one prompt's KV answer to
another's, so the rule is: known and harmless, or an error.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode

_PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_PASSED_ON = frozenset(
    {
        "attention_mask",
        "generation_config",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
    }
)


def check_generate(model: Any, input_ids: Any, arguments: dict[str, Any]) -> GenerationConfig:
    """Return the generation configuration in effect, or raise ValueError naming the argument that is in the way."""
    check_input_ids(input_ids)
    settings = GenerationConfig()
    for name in arguments:
        if name not in _PASSED_ON and not hasattr(settings, name):
            raise ValueError(f"{name}= is not supported: the store cannot tell how it shapes the KV")
    config = _effective_config(model, arguments)
    if reason := _unsupported(config):
        raise ValueError(f"{reason}: the store serves greedy search and sampling of one sequence, in a dynamic cache")
    _check_padding(config, input_ids, arguments.get("attention_mask"))
    return config


def _unsupported(config: GenerationConfig) -> str:
    """What of a configuration is in the way, or an empty string."""
    mode = config.get_generation_mode(None)
    caches = (None, "hybrid")  # generate itself drops a "hybrid" that comes from the hub
    reasons = (
        (mode not in _PLAIN_MODES, f"{mode.value} is not supported"),
        (config.penalty_alpha, "contrastive search (penalty_alpha) is not supported"),
        ((config.num_return_sequences or 1) != 1, f"num_return_sequences is {config.num_return_sequences}"),
        (config.use_cache is False, "use_cache=False leaves no KV to store or restore"),
        (config.cache_implementation not in caches, f"cache_implementation is {config.cache_implementation!r}"),
        (config.token_healing, "token_healing changes the prompt after its KV was looked up"),
        (config.output_attentions, "output_attentions cannot cover tokens that are not computed"),
        (config.output_hidden_states, "output_hidden_states cannot cover tokens that are not computed"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def check_input_ids(input_ids: Any) -> None:
    """Raise ValueError unless `input_ids` is a tensor of integers of shape [1, tokens] with at least one token."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        raise ValueError(f"input_ids is {_kind(input_ids)}; a tensor of token ids is wanted")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; [1, tokens] with at least one token is wanted")
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids holds a batch of {input_ids.shape[0]}; the store serves one sequence a call")


def _effective_config(model: Any, arguments: dict[str, Any]) -> GenerationConfig:
    """What `generate` would settle on: keyword arguments over the given configuration over the model's own."""
    given = arguments.get("generation_config")
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**{name: value for name, value in arguments.items() if name not in _PASSED_ON})
    return config


def _check_padding(config: GenerationConfig, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    if mask is not None:
        if mask.shape != input_ids.shape or not bool((mask == 1).all()):
            raise ValueError("attention_mask hides tokens: padding is not supported, pass the bare prompt")
        return
    pad, eos = config.pad_token_id, config.eos_token_id
    if pad is None or pad in (eos if isinstance(eos, list) else [eos]):
        return
    if bool((input_ids == pad).any()):
        raise ValueError(
            f"the prompt holds the pad token {pad}, which generate would mask: pass attention_mask as well"
        )


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
