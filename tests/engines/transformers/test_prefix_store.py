"""A real model's prefixes through a real daemon: the answers are the cold ones, byte for byte and token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from kvtierd import Client
from kvtierd.connectors import prefix_io
from kvtierd.connectors.transformers import PrefixStore

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

BLOCK = 32
GREEDY = {"max_new_tokens": 8, "do_sample": False}
MORE = {"max_new_tokens": 32, "do_sample": False}
NewStore = Callable[..., PrefixStore]
Plain = Callable[..., torch.Tensor]


def prefilled(model: Any, input_ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def test_a_restored_prefix_gives_the_cold_tokens(new_store: NewStore, plain: Plain, text_ids: torch.Tensor) -> None:
    prompt = text_ids[:, :400]
    cold = plain(prompt, **MORE)
    store = new_store()
    first = store.generate(prompt, **MORE)
    second = store.generate(prompt, **MORE)
    assert torch.equal(first, cold)
    assert torch.equal(second, cold)
    counters = store.counters
    assert (counters.restores, counters.restored_tokens, counters.failures) == (2, 12 * BLOCK, 0)
    assert counters.stored_blocks == (400 + 31) // BLOCK  # what was generated is stored as well


def test_restored_bytes_are_the_computed_ones(new_store: NewStore, model: Any, text_ids: torch.Tensor) -> None:
    prompt = text_ids[:, :200]
    cache = prefilled(model, prompt)
    store = new_store()
    stored = store.save(prompt, cache)
    assert (stored.stored, stored.existed, stored.refused) == (6, 0, 0)
    assert stored.payload_bytes == 6 * store.namespace.geometry.block_bytes
    restored = store.restore(prompt)
    assert restored.tokens == 6 * BLOCK
    assert restored.payload_bytes == stored.payload_bytes
    assert sum(restored.sources.values()) == 6
    for ours, theirs in zip(restored.cache.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, : 6 * BLOCK])
        assert torch.equal(ours.values, theirs.values[:, :, : 6 * BLOCK])
    again = store.save(prompt, cache)
    assert (again.stored, again.existed, again.refused) == (0, 6, 0)


@pytest.mark.parametrize("tokens", [1, 5, BLOCK - 1, BLOCK])
def test_a_prompt_no_longer_than_a_block_is_plain(
    tokens: int, new_store: NewStore, plain: Plain, text_ids: torch.Tensor
) -> None:
    store, prompt = new_store(), text_ids[:, :tokens]
    for _ in range(2):
        assert torch.equal(store.generate(prompt, **GREEDY), plain(prompt, **GREEDY))
    assert store.restore(prompt).tokens == 0


@pytest.mark.parametrize("blocks", [2, 4])
def test_a_prompt_of_whole_blocks_keeps_a_token_to_compute(
    blocks: int, new_store: NewStore, plain: Plain, text_ids: torch.Tensor
) -> None:
    store, prompt = new_store(), text_ids[:, : blocks * BLOCK]
    assert torch.equal(store.generate(prompt, **GREEDY), plain(prompt, **GREEDY))
    assert store.restore(prompt).tokens == (blocks - 1) * BLOCK
    assert torch.equal(store.generate(prompt, **GREEDY), plain(prompt, **GREEDY))
    longer = text_ids[:, : blocks * BLOCK + 1]
    assert store.restore(longer).tokens == blocks * BLOCK


def test_a_longer_prompt_goes_on_from_a_stored_prefix(
    new_store: NewStore, plain: Plain, text_ids: torch.Tensor
) -> None:
    store = new_store()
    store.generate(text_ids[:, :150], **GREEDY)
    longer = text_ids[:, :330]
    assert store.restore(longer).tokens == 4 * BLOCK
    assert torch.equal(store.generate(longer, **GREEDY), plain(longer, **GREEDY))
    assert store.restore(longer).tokens == 10 * BLOCK
    assert torch.equal(store.generate(longer, **GREEDY), plain(longer, **GREEDY))


def test_another_prompt_shares_only_the_common_blocks(
    new_store: NewStore, plain: Plain, text_ids: torch.Tensor
) -> None:
    store, prompt = new_store(), text_ids[:, :200]
    store.generate(prompt, **GREEDY)
    other = prompt.clone()
    other[0, 70] += 1
    assert store.restore(other).tokens == 2 * BLOCK
    assert torch.equal(store.generate(other, **GREEDY), plain(other, **GREEDY))


def test_a_second_turn_finds_the_first_answer(new_store: NewStore, plain: Plain, text_ids: torch.Tensor) -> None:
    store = new_store()
    first = store.generate(text_ids[:, :100], **MORE)
    second = torch.cat([first, text_ids[:, 500:520]], dim=1)
    assert store.restore(second).tokens == (100 + 31) // BLOCK * BLOCK
    assert torch.equal(store.generate(second, **GREEDY), plain(second, **GREEDY))


def test_case_27_one_cold_prompt_is_found_again(new_store: NewStore, text_ids: torch.Tensor) -> None:
    prompt = text_ids[:, :300]
    new_store().generate(prompt, max_new_tokens=1, do_sample=False)
    assert new_store().restore(prompt).tokens == 9 * BLOCK


def test_sampling_with_a_seed_is_the_same(new_store: NewStore, model: Any, text_ids: torch.Tensor) -> None:
    store, prompt = new_store(), text_ids[:, :100]
    answers = []
    for generate in (model.generate, store.generate, store.generate):
        torch.manual_seed(11)
        answers.append(generate(prompt, max_new_tokens=16, do_sample=True, temperature=0.8))
    assert store.counters.restored_tokens == 3 * BLOCK
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("as_object", [False, True])
def test_prefill_in_chunks_over_a_restored_prefix(
    as_object: bool, new_store: NewStore, plain: Plain, text_ids: torch.Tensor
) -> None:
    store, prompt = new_store(), text_ids[:, :300]
    store.generate(prompt[:, :100], **GREEDY)
    options: dict[str, Any] = {**GREEDY, "prefill_chunk_size": 64}
    if as_object:
        options = {"generation_config": GenerationConfig(**options)}
    assert torch.equal(store.generate(prompt, **options), plain(prompt, **GREEDY))
    assert store.counters.restored_tokens == 3 * BLOCK
    assert torch.equal(store.generate(prompt, **options), plain(prompt, **GREEDY))
    assert store.counters.restored_tokens == (3 + 9) * BLOCK


def test_outputs_asked_for_as_a_dict_come_as_one(new_store: NewStore, text_ids: torch.Tensor) -> None:
    store, prompt = new_store(), text_ids[:, :100]
    for _ in range(2):
        output = store.generate(prompt, **GREEDY, return_dict_in_generate=True, output_scores=True)
        assert output.sequences.shape == (1, 108)
        assert len(output.scores) == 8
        assert output.past_key_values.get_seq_length() == 107


def test_a_prefix_in_many_pieces(
    new_store: NewStore, plain: Plain, text_ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = new_store().namespace.geometry
    monkeypatch.setattr(prefix_io, "BATCH_BYTES", 2 * shape.slot_bytes)
    store, prompt = new_store(), text_ids[:, :330]
    store.generate(prompt, **GREEDY)
    assert torch.equal(store.generate(prompt, **GREEDY), plain(prompt, **GREEDY))
    assert store.counters.restored_tokens == 10 * BLOCK


def test_every_tier_gives_the_same_answer(
    new_store: NewStore, client: Client, plain: Plain, text_ids: torch.Tensor
) -> None:
    store, prompt = new_store(), text_ids[:, :200]
    cold = plain(prompt, **GREEDY)
    store.generate(prompt, **GREEDY)
    others: dict[Any, tuple[Any, ...]] = {"gpu": ("host",), "host": ("gpu",), "nvme": ("gpu", "host")}
    for tier in ("gpu", "host", "nvme"):
        client.flush()
        if tier != "nvme":
            assert store.prefetch(prompt, tier) == 6
        store.drop(others[tier])
        restored = store.restore(prompt)
        assert restored.sources == {tier: 6}
        output = store.generate(prompt, **GREEDY)
        assert torch.equal(output, cold), tier


def test_generation_killed_in_the_midst_leaves_its_prompt(new_store: NewStore, text_ids: torch.Tensor) -> None:
    class Crash:
        def __init__(self) -> None:
            self.calls = 0

        def put(self, _value: Any) -> None:
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    store, prompt = new_store(), text_ids[:, :200]
    with pytest.raises(KeyboardInterrupt):
        store.generate(prompt, **GREEDY, streamer=Crash())
    assert store.restore(prompt).tokens == 6 * BLOCK


def test_counters_say_what_happened(new_store: NewStore, text_ids: torch.Tensor) -> None:
    store = new_store()
    store.generate(text_ids[:, :100], max_new_tokens=4, do_sample=False)
    assert dataclasses.asdict(store.counters) == {
        "restores": 1,
        "restored_tokens": 0,
        "stored_blocks": 3,
        "refused_blocks": 0,
        "corrupt_blocks": 0,
        "failures": 0,
    }
