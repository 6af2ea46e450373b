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
    folder = model_folder()
    loaded = perplexity.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return loaded.eval()


def test_every_block_of_every_layer_goes_through_the_codec(model: Any) -> None:
    window, change = prompt_ids(model_folder(), 256), perplexity.Fp8()
    plain, lossy = perplexity.score(model, window), perplexity.score(model, window, change)
    assert change.blocks == 2 * model.config.num_hidden_layers
    assert plain.count == lossy.count == 255
    assert plain.nats != lossy.nats
    assert abs(plain.nats - lossy.nats) / plain.count < 0.1


def test_vectors_come_back_as_near_as_fp8_is_and_where_they_were() -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(1, 3, 256, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    for sent, got in zip((keys, values), perplexity.Fp8()(keys, values), strict=True):
        assert torch.all((sent - got).abs() <= sent.abs() / 16 + 2**-8)
        assert not torch.equal(sent, got)
    with pytest.raises(ValueError, match=r"5 tokens of torch\.bfloat16; whole blocks of 128"):
        perplexity.Fp8()(keys[:, :, :5], values[:, :, :5])
