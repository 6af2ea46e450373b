"""A context of 8k tokens whose KV is eight times what gpu and host together hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvtierd import Client
from kvtierd.connectors.transformers import OffloadedCache, register_offloaded_attention
from kvtierd.core.units import MIB
from kvtierd.daemon.embedded import EmbeddedDaemon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

TOKENS = 8100
NEW = 64
STEPS = 16
BLOCK = 64


@pytest.fixture(scope="module", autouse=True)
def _both_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def long_ids(folder: Path) -> torch.Tensor:
    from kvtierd.connectors.demo_rig import prompt_ids

    return prompt_ids(folder, TOKENS)


@pytest.fixture(scope="module")
def plain_run(model: Any, long_ids: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
    """64 greedy tokens in float32 over a plain cache, and that, as it was when only the last token was missing."""
    cache = DynamicCache(config=model.config)
    output = model.generate(long_ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    cache.crop(TOKENS - 1 - cache.get_seq_length())
    return output, cache


@contextlib.contextmanager
def small_daemon(folder: Path, host_bytes: int, gpu_bytes: int) -> Iterator[Client]:
    settings = {"host__capacity": host_bytes, "host__chunk_bytes": host_bytes // 2, "gpu__capacity": gpu_bytes}
    with (
        EmbeddedDaemon(folder, nvme__capacity="3GiB", **settings) as daemon,
        Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as client,
    ):
        give_up_s = time.monotonic() + 90
        while client.stats()["host_ready_bytes"] < host_bytes:
            assert time.monotonic() < give_up_s
            time.sleep(0.02)
        yield client


def kv_bytes(cache: DynamicCache) -> int:
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


def test_64_greedy_tokens_in_float32_are_the_plain_ones(
    tmp_path: Path, offloaded_model: Any, plain_run: tuple[torch.Tensor, DynamicCache], long_ids: torch.Tensor
) -> None:
    expected, computed = plain_run
    assert kv_bytes(computed) >= 8 * 44 * MIB
    with small_daemon(tmp_path, 32 * MIB, 12 * MIB) as client:
        with OffloadedCache(client, offloaded_model, block_size=BLOCK, timeout_s=120) as cache:
            cache.adopt(computed)
            assert cache.offloaded_tokens == [(TOKENS - 1 - 128) // BLOCK * BLOCK]
            found = offloaded_model.generate(long_ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        stats = client.stats()
    assert torch.equal(found, expected)
    read = stats["attend_nvme_bytes"] / (NEW * kv_bytes(computed))
    assert read > 0.8, "most of it was read from the disk, token by token"


def test_bf16_logits_differ_no_more_than_those_of_eager_and_sdpa(
    tmp_path: Path, folder: Path, plain_run: tuple[torch.Tensor, DynamicCache]
) -> None:
    """The same past, rounded once, and the same tokens; what each attention makes of them.

    The largest difference of each step, on average over the steps. That of all steps is one logit, which is .6 from one
    run to the next and .9 in another: parts are merged in the order in which they come, and bf16 makes of the last bit
    of a float32 whatever the layers behind it make of that.
    """
    tokens, computed = plain_run
    register_offloaded_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()

    def logits(kind: str, cache: Any) -> torch.Tensor:
        model.set_attn_implementation(kind)
        with torch.no_grad():
            return torch.cat(
                [
                    model(input_ids=tokens[:, at : at + 1], past_key_values=cache, use_cache=True).logits[0]
                    for at in range(TOKENS - 1, TOKENS - 1 + STEPS)
                ]
            ).float()

    sdpa, eager = (logits(kind, rounded(computed, model.config)) for kind in ("sdpa", "eager"))
    model.set_attn_implementation("kvtierd")
    with (
        small_daemon(tmp_path, 16 * MIB, 6 * MIB) as client,
        OffloadedCache(client, model, block_size=BLOCK, timeout_s=120) as cache,
    ):
        past = rounded(computed, model.config)
        assert kv_bytes(past) >= 8 * 22 * MIB
        cache.adopt(past)
        ours = logits("kvtierd", cache)
    allowed = largest_by_step(eager, sdpa)
    assert 0 < largest_by_step(ours, sdpa) <= 1.2 * allowed
    assert rms(ours - sdpa) <= 1.2 * rms(eager - sdpa)


def largest_by_step(some: torch.Tensor, others: torch.Tensor) -> float:
    """Of logits [steps, vocabulary]."""
    return float((some - others).abs().amax(-1).mean())


def rms(differences: torch.Tensor) -> float:
    return float(differences.square().mean().sqrt())


def rounded(cache: DynamicCache, config: Any) -> DynamicCache:
    """A plain cache in bf16."""
    made = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        made.update(layer.keys.bfloat16(), layer.values.bfloat16(), index)
    return made
