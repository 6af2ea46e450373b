"""What a prefix store cannot serve is refused by name, before anything is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from kvtierd.connectors.transformers import PrefixStore

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

NewStore = Callable[..., PrefixStore]


@pytest.fixture
def store(new_store: NewStore) -> PrefixStore:
    return new_store()


def test_a_batch_is_refused(store: PrefixStore, model: Any, text_ids: torch.Tensor) -> None:
    batch = text_ids[:, :64].repeat(2, 1)
    for call in (store.generate, store.restore, lambda ids: store.save(ids, DynamicCache(config=model.config))):
        with pytest.raises(ValueError, match="batch of 2; the store serves one sequence"):
            call(batch)


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        ([[1, 2, 3]], "input_ids is list"),
        (torch.ones(1, 4), "tensor of torch.float32"),
        (torch.ones(4, dtype=torch.long), r"shape \(4,\)"),
        (torch.ones((1, 0), dtype=torch.long), r"shape \(1, 0\)"),
    ],
)
def test_input_that_is_no_sequence_is_named(store: PrefixStore, input_ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store.generate(input_ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 3}, "beam_search is not supported"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation is not supported"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"token_healing": True}, "token_healing"),
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "beam_search is not supported"),
        ({"position_ids": torch.zeros((1, 64), dtype=torch.long)}, "position_ids= is not supported"),
        ({"inputs_embeds": torch.zeros((1, 64, 576))}, "inputs_embeds= is not supported"),
        ({"past_key_values": None}, "past_key_values= is not supported"),
        ({"assistant_model": object()}, "assistant_model= is not supported"),
        ({"attention_mask": torch.tensor([[0] * 3 + [1] * 61])}, "attention_mask hides tokens"),
        ({"attention_mask": torch.ones((1, 65))}, "attention_mask hides tokens"),
        ({"pad_token_id": 28, "eos_token_id": 2}, None),
    ],
)
def test_an_argument_in_the_way_is_named(
    store: PrefixStore, text_ids: torch.Tensor, arguments: dict[str, Any], message: str | None
) -> None:
    prompt = text_ids[:, :64].clone()
    if message is None:  # a pad token inside the prompt: generate would take it for padding
        prompt[0, 5] = 28
        message = "pad token 28"
    with pytest.raises(ValueError, match=message):
        store.generate(prompt, **arguments)
    assert store.counters.restores == 0


def test_a_mask_that_hides_nothing_is_welcome(store: PrefixStore, plain: Any, text_ids: torch.Tensor) -> None:
    prompt = text_ids[:, :64]
    output = store.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    assert torch.equal(output, plain(prompt, max_new_tokens=4, do_sample=False))


def test_a_cache_of_another_kind_is_refused(store: PrefixStore, model: Any, text_ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="layer 0 keeps its past in a StaticLayer"):
        store.save(text_ids, StaticCache(config=model.config, max_cache_len=64))
    with pytest.raises(ValueError, match="offloaded"):
        store.save(text_ids, DynamicCache(config=model.config, offloading=True))
    batch = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=text_ids[:, :40].repeat(2, 1), past_key_values=batch, use_cache=True)
    with pytest.raises(ValueError, match="batch of 2"):
        store.save(text_ids[:, :40], batch)


def test_a_cache_of_another_model_is_refused(store: PrefixStore, model: Any, text_ids: torch.Tensor) -> None:
    foreign = DynamicCache(config=model.config)
    for index in range(len(foreign.layers)):
        foreign.update(torch.zeros(1, 3, 40, 32), torch.zeros(1, 3, 40, 32), index)
    with pytest.raises(ValueError, match="K of layer 0 is"):
        store.save(text_ids[:, :40], foreign)
    assert store.restore(text_ids[:, :40]).tokens == 0


def changed(model: Any, **config: Any) -> Any:
    other = copy.copy(model)
    other.__dict__ = dict(model.__dict__)
    other.config = copy.deepcopy(model.config)
    for name, value in config.items():
        setattr(other.config, name, value)
    return other


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sliding_window": 128, "layer_types": ["sliding_attention"] * 30}, "DynamicSlidingWindowLayer"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "'longrope'"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_a_model_whose_prefixes_cannot_be_reused_is_refused(
    config: dict[str, Any], message: str, new_store: NewStore, model: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        new_store(model=changed(model, **config))


def test_a_model_in_training_mode_is_refused(store: PrefixStore, model: Any, text_ids: torch.Tensor) -> None:
    model.train()
    try:
        with pytest.raises(ValueError, match="training mode"):
            store.restore(text_ids)
    finally:
        model.eval()


def test_a_model_with_adapters_is_refused(new_store: NewStore, model: Any) -> None:
    adapted = changed(model)
    adapted.peft_config = {"style": object()}
    with pytest.raises(ValueError, match=r"adapters \(style\)"):
        new_store(model=adapted)
