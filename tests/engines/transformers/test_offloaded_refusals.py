"""What offloaded attention does not have is refused by name, and mistakes that would give wrong tokens are errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtierd import Client
from kvtierd.connectors.offloaded_attention import Mask, offloaded_attention, offloaded_mask
from kvtierd.connectors.transformers import OffloadedCache

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

ONE = {"max_new_tokens": 2, "do_sample": False}
NewCache = Callable[..., OffloadedCache]
Q = torch.ones(1, 4, 1, 8)
KV = torch.ones(1, 2, 3, 8)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sliding_window": 128}, "sliding_window="),
        ({"softcap": 30.0}, "softcap="),
        ({"s_aux": torch.ones(4)}, "s_aux="),
        ({"position_bias": torch.ones(1)}, "position_bias="),
        ({"is_causal": False}, "is_causal="),
        ({"something_new": 1}, "something_new="),
        ({"dropout": 0.1}, "dropout is 0.1"),
    ],
)
def test_options_that_shape_attention_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    mask = Mask(2, 1, None, None)
    with pytest.raises(ValueError, match=name):
        offloaded_attention(None, Q, KV, KV, mask, **options)


def test_options_that_ask_for_nothing_are_taken() -> None:
    output, weights = offloaded_attention(None, Q, KV, KV, Mask(2, 1, None, None), sliding_window=None, is_causal=True)
    assert output.shape == (1, 1, 4, 8)
    assert weights is None


def test_masks_that_are_not_causal_with_left_padding_are_refused() -> None:
    with pytest.raises(ValueError, match="asks for the mask sliding"):
        offloaded_mask(q_length=3, mask_function=sliding)
    hole = torch.tensor([[True, False, True], [True, True, True]])
    for mask in (hole, torch.tensor([[True, True, False]])):
        with pytest.raises(ValueError, match="pad on the left"):
            offloaded_mask(q_length=3, attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask is a tensor of shape"):
        offloaded_attention(None, Q, KV, KV, torch.ones(1, 1, 1, 3))


def sliding(*_places: int) -> bool:
    return True


def test_the_model_must_have_the_attention(
    client: Client, model: Any, new_cache: NewCache, offloaded_model: Any
) -> None:
    with pytest.raises(ValueError, match="the model's attention is 'sdpa'"):
        OffloadedCache(client, model)
    cache = new_cache()
    with pytest.raises(RuntimeError, match="something else than attn_implementation='kvtierd'"):
        model.generate(torch.arange(5)[None], past_key_values=cache, **ONE)
    cache.reset()
    assert offloaded_model.generate(torch.arange(5)[None], past_key_values=cache, **ONE).shape == (1, 7)


def test_models_with_other_layers_are_refused(client: Client, offloaded_model: Any) -> None:
    other = copy.copy(offloaded_model)
    other.config = copy.deepcopy(offloaded_model.config)
    other.config.layer_types = ["sliding_attention"] * other.config.num_hidden_layers
    other.config.sliding_window = 64
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        OffloadedCache(client, other)
    with pytest.raises(ValueError, match="tail_tokens is 0"):
        OffloadedCache(client, offloaded_model, tail_tokens=0)


def test_prompts_that_do_not_go_on_from_the_cache_are_refused(
    new_cache: NewCache, offloaded_model: Any, text_ids: torch.Tensor
) -> None:
    """transformers computes nonsense from these without a word, also over its own caches."""
    cache = new_cache()
    with torch.no_grad():
        offloaded_model(input_ids=text_ids[:, :120], past_key_values=cache, use_cache=True)
    for ids, options in (
        (text_ids[:, :120], {}),
        (text_ids[:, :80], {}),
        (text_ids[:, :300], {"prefill_chunk_size": 64}),
        (text_ids[:, :130], {"prompt_lookup_num_tokens": 3}),
        (text_ids[:, :80], {"attention_mask": torch.tensor([[0] + [1] * 79])}),
    ):
        with pytest.raises(ValueError, match="to go on from a cache that holds tokens"):
            offloaded_model.generate(ids, past_key_values=cache, **options, **ONE)
    with pytest.raises(ValueError, match="a batch of 2 rows over a cache of 1"):
        offloaded_model.generate(text_ids[:, :130].repeat(2, 1), past_key_values=cache, **ONE)
    assert cache.get_seq_length() == 120
    assert offloaded_model.generate(text_ids[:, :130], past_key_values=cache, **ONE).shape == (1, 132)


def test_padding_that_is_not_that_of_the_cache_is_refused(new_cache: NewCache, offloaded_model: Any) -> None:
    cache = new_cache()
    ids, mask = torch.arange(240).reshape(2, 120), torch.ones(2, 120, dtype=torch.long)
    mask[0, :7] = 0
    with torch.no_grad():
        offloaded_model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        for given in (None, torch.ones(2, 121, dtype=torch.long)):
            with pytest.raises(ValueError, match="padded by"):
                offloaded_model(input_ids=ids[:, :1], attention_mask=given, past_key_values=cache, use_cache=True)


def test_a_cache_is_not_copied_and_counts_what_it_crops(new_cache: NewCache) -> None:
    cache = new_cache()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"crop\(-5\) of a cache that holds 0 tokens"):
        cache.crop(-5)


def test_other_caches_get_plain_attention(offloaded_model: Any, model: Any, text_ids: torch.Tensor) -> None:
    ids = torch.stack([text_ids[0, :80], torch.cat([torch.zeros(30, dtype=torch.long), text_ids[0, 100:150]])])
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    ours, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        for begin, end in ((0, 60), (60, 61), (61, 80)):
            found, expected = (
                engine(
                    input_ids=ids[:, begin:end],
                    attention_mask=mask[:, :end],
                    position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, begin:end],
                    past_key_values=cache,
                ).logits
                for engine, cache in ((offloaded_model, ours), (model, theirs))
            )
            seen = mask[:, begin:end].bool()
            assert float((found - expected)[seen].abs().max()) < 1e-3


def test_there_are_no_gradients_through_the_past(
    new_cache: NewCache, offloaded_model: Any, text_ids: torch.Tensor
) -> None:
    cache = new_cache()
    with torch.no_grad():
        offloaded_model(input_ids=text_ids[:, :120], past_key_values=cache, use_cache=True)
    output = offloaded_model(input_ids=text_ids[:, 120:122], past_key_values=cache, use_cache=True)
    with pytest.raises(RuntimeError, match="no gradients through attention over an offloaded past"):
        output.logits.sum().backward()
