"""What FP8 costs a real model: KV really goes through the codec, and a codec that loses nothing changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtierd.bench import perplexity
from kvtierd.connectors.demo_rig import prompt_ids
from kvtierd.connectors.model_files import model_folder

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def model() -> Any:
    return perplexity.load(model_folder())


def test_every_block_of_every_layer_goes_through_the_codec(model: Any) -> None:
    window, change = prompt_ids(model_folder(), 256), perplexity.Fp8()
    plain, lossy = perplexity.score(model, window), perplexity.score(model, window, change)
    assert change.blocks == 2 * model.config.num_hidden_layers
    assert plain.count == lossy.count == 255
    assert plain.nats != lossy.nats
    assert abs(plain.nats - lossy.nats) / plain.count < 0.1


def test_a_block_that_is_just_computed_sees_itself_as_the_engine_has_it(model: Any) -> None:
    window = prompt_ids(model_folder(), 256)
    plain, lossy, worst = (
        perplexity.score(model, window, *how, own_too=own)
        for how, own in (((), False), ((perplexity.Fp8(),), False), ((perplexity.Fp8(),), True))
    )
    first = perplexity.BLOCK_TOKENS - 1
    assert torch.equal(plain.choices[:first], lossy.choices[:first])
    assert perplexity.ATTENTION.change is None
    assert worst.nats not in {plain.nats, lossy.nats}


def test_attention_block_by_block_is_attention() -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 4, 300, 16, generator=generator)
    key, value = (torch.randn(1, 2, 300, 16, generator=generator) for _ in range(2))
    found, _ = perplexity.BlockAttention()(None, query, key, value, None, scaling=0.25)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="1 queries for 300 keys"):
        perplexity.BlockAttention()(None, query[:, :, :1], key, value, None)


def test_vectors_come_back_as_near_as_fp8_is_and_where_they_were() -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(1, 3, 256, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    got_keys, got_values = perplexity.Fp8()(keys, values)
    assert torch.all((values - got_values).abs() <= values.abs() / 16 + 2**-8)
    assert not torch.equal(values, got_values)
    # Channels of a key are spread over one another: what one loses depends on all of the vector.
    lost = (keys.float() - got_keys.float()).norm(dim=-1) / keys.float().norm(dim=-1)
    assert torch.all(lost <= 1 / 16)
    assert torch.all(lost > 0)
    with pytest.raises(ValueError, match=r"5 tokens of torch\.bfloat16; whole blocks of 128"):
        perplexity.Fp8()(keys[:, :, :5], values[:, :, :5])
