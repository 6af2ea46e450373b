"""What FP8 costs a real model: perplexity of a real text with all blocks in FP8 and in bf16, and equal top choices.

The model runs in bf16, window by window, twice. The second time every K and V vector goes through the codec before any
query sees it, in blocks of 128 tokens, those of the block just computed among them: in the daemon hot blocks stay
exact, so this is the most that compression can cost. Wants torch, transformers and the model (the extra `demo`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in kvtierd.connectors.demo_rig

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from kvtierd.bench.rows import Row, make_row
from kvtierd.connectors.demo_rig import prompt_ids
from kvtierd.connectors.model_files import MODEL_NAME, model_folder
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.codec import BlockCodec

BLOCK_TOKENS = 128
WINDOWS, WINDOW_TOKENS = 4, 8192
QUICK_WINDOWS, QUICK_WINDOW_TOKENS = 1, 1024
_LOGITS_AT_ONCE = 512
"""Positions whose scores over the vocabulary are held at once."""

Progress = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class Score:
    """Sums over what was predicted: negative log-likelihoods in nats, and how many; `choices` are the top ones."""

    nats: float
    count: int
    choices: Any


class Fp8:
    """Takes K and V [1, kv_heads, tokens, dim] through the codec and back. ValueError for a part of a block."""

    def __init__(self) -> None:
        self._codecs: dict[Geometry, BlockCodec] = {}
        self.blocks = 0

    def __call__(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """The same tensors as they come back; bf16."""
        _, heads, tokens, k_dim = keys.shape
        if tokens % BLOCK_TOKENS or keys.dtype != torch.bfloat16:
            raise ValueError(f"{tokens} tokens of {keys.dtype}; whole blocks of {BLOCK_TOKENS} in bf16 are wanted")
        shape = Geometry(
            block_size=BLOCK_TOKENS, layers=1, kv_heads=heads, k_dim=k_dim, v_dim=values.shape[3], layout="hnd"
        )
        codec = self._codecs.setdefault(shape, BlockCodec(shape))
        block, encoded = np.zeros(shape.slot_bytes, np.uint8), np.zeros(codec.layout.slot_bytes, np.uint8)
        back = keys.clone(), values.clone()
        sizes = (shape.k_bytes, shape.v_bytes)
        for begin in range(0, tokens, BLOCK_TOKENS):
            parts = [tensor[0, :, begin : begin + BLOCK_TOKENS] for tensor in back]
            places = (block[: sizes[0]], block[sizes[0] : sum(sizes)])
            for part, place in zip(parts, places, strict=True):
                place[:] = part.contiguous().view(torch.uint8).numpy().reshape(-1)
            codec.encode(block, encoded)
            codec.decode(encoded, block)
            for part, place in zip(parts, places, strict=True):
                part.copy_(torch.from_numpy(place.copy()).view(torch.bfloat16).reshape(part.shape))
            self.blocks += 1
        return back


def score(model: Any, window: Any, change: Fp8 | None = None) -> Score:
    """Predict each token of a window [1, tokens] from those before it; `change` is what K and V go through."""
    cache = DynamicCache(config=model.config)
    if change is not None:
        store = cache.update
        cache.update = lambda keys, values, *rest, **more: store(*change(keys, values), *rest, **more)
    with torch.inference_mode():
        hidden = model.model(window, past_key_values=cache, use_cache=True).last_hidden_state[0, :-1]
        # Scores in float32: in bf16 many are equal, and which of them is the top choice says nothing.
        head = model.lm_head.weight.float().T
        wanted, nats, choices = window[0, 1:], 0.0, []
        for begin in range(0, hidden.shape[0], _LOGITS_AT_ONCE):
            logits = hidden[begin : begin + _LOGITS_AT_ONCE].float() @ head
            some = wanted[begin : begin + _LOGITS_AT_ONCE]
            nats += float(torch.nn.functional.cross_entropy(logits, some, reduction="sum"))
            choices.append(logits.argmax(-1))
    return Score(nats, int(wanted.numel()), torch.cat(choices))


def rows(progress: Progress, *, quick: bool) -> Iterator[Row]:
    """Measure; shorter and fewer windows with `quick`. Raises ModelUnavailableError where a package is missing."""
    windows, tokens = (QUICK_WINDOWS, QUICK_WINDOW_TOKENS) if quick else (WINDOWS, WINDOW_TOKENS)
    folder = model_folder(progress)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()
    text = prompt_ids(folder, windows * tokens).reshape(windows, 1, tokens)
    what = f"{MODEL_NAME}, {windows} x {tokens:,} tokens" + (" (--quick: shorter than the goal's 4 x 8,192)" * quick)
    yield from _compare(model, text, progress, what)


def _compare(model: Any, text: Any, progress: Progress, what: str) -> Iterator[Row]:
    change, exact, small, same = Fp8(), 0.0, 0.0, 0
    count = 0
    for index, window in enumerate(text, 1):
        progress(f"window {index} of {len(text)}: bf16, then FP8")
        plain, lossy = score(model, window), score(model, window, change)
        exact, small, count = exact + plain.nats, small + lossy.nats, count + plain.count
        same += int((plain.choices == lossy.choices).sum())
    if not change.blocks:
        raise ValueError("no block went through the codec: this model does not keep its KV in the cache it was given")
    before, after = float(np.exp(exact / count)), float(np.exp(small / count))
    yield make_row("accuracy", f"perplexity, bf16, {what}", before, "")
    yield make_row(
        "accuracy", f"perplexity with all blocks in FP8 minus bf16, {what}", after - before, "", goal="<= 0.03"
    )
    yield make_row("accuracy", f"tokens with the same top choice, {what}", same / count, "", goal=">= 0.97")
