"""`generate` over a past that lives in the daemon answers, token for token, what it answers over a plain cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtierd import Client
from kvtierd.connectors.transformers import OffloadedCache

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

BLOCK, TAIL = 32, 64
GREEDY = {"max_new_tokens": 12, "do_sample": False}
NewCache = Callable[..., OffloadedCache]
Plain = Callable[..., torch.Tensor]


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of different lengths as one batch, padded on the left."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("chunk", [None, 200])
def test_greedy_tokens_are_the_plain_ones(
    chunk: int | None,
    new_cache: NewCache,
    offloaded_model: Any,
    plain: Plain,
    text_ids: torch.Tensor,
    client: Client,
) -> None:
    expected = plain(text_ids, **GREEDY)
    cache = new_cache(block_size=128, tail_tokens=128)
    found = offloaded_model.generate(text_ids, past_key_values=cache, prefill_chunk_size=chunk, **GREEDY)
    assert torch.equal(found, expected)
    assert cache.offloaded_tokens == [6 * 128]
    assert (cache.offloaded_blocks, cache.get_seq_length()) == (6, 1000 + 11)
    cache.close()
    assert client.stats()["sequences"] == 0
    assert cache.offloaded_blocks == 0


def test_logits_are_those_of_a_plain_cache(
    new_cache: NewCache, offloaded_model: Any, model: Any, text_ids: Any
) -> None:
    ours, theirs = new_cache(), DynamicCache(config=model.config)
    worst = 0.0
    for begin, end in ((0, 300), (300, 301), (301, 420), (420, 421), (421, 600)):
        with torch.no_grad():
            chunk = text_ids[:, begin:end]
            found = offloaded_model(input_ids=chunk, past_key_values=ours, use_cache=True).logits
            expected = model(input_ids=chunk, past_key_values=theirs, use_cache=True).logits
        worst = max(worst, float((found - expected).abs().max()))
    assert ours.offloaded_tokens == [512]
    assert worst < 1e-3


def test_a_batch_of_rows_padded_on_the_left(
    new_cache: NewCache, offloaded_model: Any, plain: Plain, text_ids: torch.Tensor
) -> None:
    batch = padded([text_ids[:, :400], text_ids[:, 300:637], text_ids[:, 700:830]])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = plain(ids, attention_mask=mask, **GREEDY)
    for chunk in (None, 50):
        cache = new_cache()
        found = offloaded_model.generate(
            ids, attention_mask=mask, past_key_values=cache, prefill_chunk_size=chunk, **GREEDY
        )
        assert torch.equal(found, expected)
        assert cache.offloaded_tokens == [320, 256, 64]  # whole blocks of a row's own tokens, but for its last 64


def test_sampled_tokens_are_the_plain_ones_and_rows_share_their_prompt(
    new_cache: NewCache, offloaded_model: Any, model: Any, text_ids: torch.Tensor
) -> None:
    prompt = text_ids[:, :300]
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12, "temperature": 1.5}
    torch.manual_seed(5)
    expected = model.generate(prompt, **options)
    cache = new_cache()
    torch.manual_seed(5)
    found = offloaded_model.generate(prompt, past_key_values=cache, prefill_chunk_size=128, **options)
    assert torch.equal(found, expected)
    assert len({tuple(row) for row in found.tolist()}) == 3
    assert cache.offloaded_tokens == [224] * 3
    assert cache.offloaded_blocks == 7, "one block for three rows, as far as they have it in common"
    layers, steps = 30, 11
    assert cache.attends == layers * (2 + steps), "three rows over one past are asked for at once"


def test_beams_move_numbers_of_blocks(
    new_cache: NewCache, offloaded_model: Any, plain: Plain, text_ids: torch.Tensor, client: Client
) -> None:
    prompt = text_ids[:, :200]
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 50}
    expected = plain(prompt, **options)
    cache = new_cache(block_size=16, tail_tokens=16)
    found = offloaded_model.generate(prompt, past_key_values=cache, **options)
    assert torch.equal(found, expected)
    stored = (200 + 49 - 16) // 16
    assert cache.offloaded_tokens == [stored * 16] * 3
    assert stored <= cache.offloaded_blocks < 2 * stored, "beams share what they have in common, and no more is kept"
    assert client.stats()["sequences"] <= 5


def test_assisted_decoding_takes_tokens_back(
    new_cache: NewCache, offloaded_model: Any, plain: Plain, text_ids: torch.Tensor
) -> None:
    prompt = text_ids[:, :300]
    expected = plain(prompt, **GREEDY)
    for options in ({"prompt_lookup_num_tokens": 6}, {"assistant_model": offloaded_model}):
        cache = new_cache(tail_tokens=BLOCK)
        assert torch.equal(offloaded_model.generate(prompt, past_key_values=cache, **options, **GREEDY), expected)
        assert cache.offloaded_tokens[0] >= 256


def test_a_second_turn_goes_on_from_the_first(
    new_cache: NewCache, offloaded_model: Any, plain: Plain, text_ids: torch.Tensor
) -> None:
    cache = new_cache()
    first = offloaded_model.generate(text_ids[:, :250], past_key_values=cache, **GREEDY)
    second = torch.cat([first, text_ids[:, 600:800]], dim=1)
    assert torch.equal(
        offloaded_model.generate(second, past_key_values=cache, **GREEDY),
        plain(second, **GREEDY),
    )
    assert cache.offloaded_tokens == [(len(second[0]) + 11 - TAIL) // BLOCK * BLOCK]


@pytest.mark.parametrize("left", [320, 250, 1])
def test_what_was_cropped_is_gone_and_the_rest_is_whole(
    left: int, new_cache: NewCache, offloaded_model: Any, plain: Plain, text_ids: torch.Tensor, client: Client
) -> None:
    """Cropped in the tail, at the end of a block, and in the midst of one: what is left of that comes back."""
    cache = new_cache()
    with torch.no_grad():
        offloaded_model(input_ids=text_ids[:, :400], past_key_values=cache, use_cache=True)
    assert cache.offloaded_tokens == [320]
    cache.crop(left - 400)
    assert (cache.get_seq_length(), cache.offloaded_tokens) == (left, [left // BLOCK * BLOCK if left < 320 else 320])
    assert cache.offloaded_blocks == cache.offloaded_tokens[0] // BLOCK
    other = torch.cat([text_ids[:, :left], text_ids[:, 700:720]], dim=1)
    assert torch.equal(offloaded_model.generate(other, past_key_values=cache, **GREEDY), plain(other, **GREEDY))
    cache.crop(0)
    cache.crop(-cache.get_seq_length())
    assert (cache.get_seq_length(), cache.offloaded_blocks) == (0, 0)
    client.ping()
    assert client.stats()["sequences"] == 0


def test_rows_can_be_chosen_and_repeated(
    new_cache: NewCache, offloaded_model: Any, model: Any, text_ids: torch.Tensor
) -> None:
    batch = padded([text_ids[:, :200], text_ids[:, 300:450], text_ids[:, 700:780]])
    ours, theirs = new_cache(), DynamicCache(config=model.config)
    caches = ((offloaded_model, ours), (model, theirs))
    with torch.no_grad():
        for engine, cache in caches:
            engine(**batch, past_key_values=cache, use_cache=True)
    mask, chosen = batch["attention_mask"], torch.tensor([2, 0, 0])
    for cache in (ours, theirs):
        cache.batch_select_indices(chosen)
        cache.batch_repeat_interleave(2)
    mask = mask[chosen].repeat_interleave(2, dim=0)
    mask = torch.cat([mask, torch.ones(6, 1, dtype=mask.dtype)], dim=1)
    places = mask.cumsum(-1)[:, -1:] - 1
    token = torch.arange(6)[:, None] + 40
    with torch.no_grad():
        found, expected = (
            engine(input_ids=token, attention_mask=mask, position_ids=places, past_key_values=cache).logits
            for engine, cache in caches
        )
    assert ours.offloaded_tokens == [0, 0, 128, 128, 128, 128]
    assert ours.offloaded_blocks == 4
    assert float((found - expected).abs().max()) < 1e-3
