"""What FP8 costs a real model: perplexity of a real text with all blocks in FP8 and in bf16, and equal top choices.

The model runs in bf16, window by window. Then again as it runs over the daemon when every block is compressed the
moment that it is whole: whatever comes after a block of 128 tokens sees its K and V as they come back from the codec,
and the block that is just computed sees its own as the engine has them, because no daemon has it yet. For comparison
the first window runs once more with the codec in front of every query, the block just computed included: what FP8 would
cost an engine that keeps its own KV so. Wants torch, transformers and the model (the extra `demo`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in kvtierd.connectors.demo_rig

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
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
        self.blocks = 0

    def __call__(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """The same tensors as they come back; bf16."""
        _, heads, tokens, k_dim = keys.shape
        if tokens % BLOCK_TOKENS or keys.dtype != torch.bfloat16:
            raise ValueError(f"{tokens} tokens of {keys.dtype}; whole blocks of {BLOCK_TOKENS} in bf16 are wanted")
        count = tokens // BLOCK_TOKENS
        # Groups are those of a layer: blocks of one layer are coded as layers of one block are.
        shape = Geometry(
            block_size=BLOCK_TOKENS, layers=count, kv_heads=heads, k_dim=k_dim, v_dim=values.shape[3], layout="hnd"
        )
        codec = BlockCodec(shape)
        block, encoded = np.zeros(shape.slot_bytes, np.uint8), np.zeros(codec.layout.slot_bytes, np.uint8)
        rows = block.reshape(count, shape.layer_stride)
        places = rows[:, : shape.k_bytes], rows[:, shape.k_bytes : shape.layer_bytes]
        for tensor, place in zip((keys, values), places, strict=True):
            place[:] = _by_block(tensor).view(torch.uint8).numpy().reshape(count, -1)
        codec.encode(block, encoded)
        codec.decode(encoded, block)
        self.blocks += count
        k, v = (_from_blocks(place, tensor) for tensor, place in zip((keys, values), places, strict=True))
        return k, v


def _by_block(tensor: Any) -> Any:
    """[1, heads, tokens, dim] as [blocks, heads, BLOCK_TOKENS, dim]."""
    _, heads, _, dim = tensor.shape
    return tensor[0].reshape(heads, -1, BLOCK_TOKENS, dim).transpose(0, 1).contiguous()


def _from_blocks(place: Any, like: Any) -> Any:
    """What `_by_block` gave, from bytes [blocks, bytes of a block]."""
    _, heads, tokens, dim = like.shape
    blocks = torch.from_numpy(np.ascontiguousarray(place)).view(torch.bfloat16)
    return blocks.reshape(-1, heads, BLOCK_TOKENS, dim).transpose(0, 1).reshape(1, heads, tokens, dim)


class BlockAttention:
    """Attention block by block: each sees those before it as they come from `change` (None: as they are), and itself.

    Called as transformers calls an attention: query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim];
    the result is [1, tokens, heads, dim].
    """

    def __init__(self) -> None:
        self.change: Fp8 | None = None

    def __call__(self, _module: Any, query: Any, key: Any, value: Any, _mask: Any, **more: Any) -> tuple[Any, None]:
        """Output, and no weights."""
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"{query.shape[2]} queries for {key.shape[2]} keys; a window is computed in one go")
        stored = self.change(key, value) if self.change is not None else (key, value)
        output = torch.empty_like(query)
        for begin in range(0, query.shape[2], BLOCK_TOKENS):
            end = min(begin + BLOCK_TOKENS, query.shape[2])
            own = slice(begin, end)
            k, v = (
                torch.cat([old[:, :, :begin], new[:, :, own]], 2) for old, new in zip(stored, (key, value), strict=True)
            )
            seen = torch.ones(end - begin, end, dtype=torch.bool).tril(begin)
            output[:, :, own] = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, own], k, v, attn_mask=seen, scale=more.get("scaling"), enable_gqa=True
            )
        return output.transpose(1, 2).contiguous(), None


ATTENTION = BlockAttention()
AttentionInterface.register("kvtierd_blocks", ATTENTION)


def load(folder: Any) -> Any:
    """The model in bf16, which attends by `ATTENTION`."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True, attn_implementation="kvtierd_blocks"
    ).eval()


def score(model: Any, window: Any, change: Fp8 | None = None, *, own_too: bool = False) -> Score:
    """Predict each token of a window [1, tokens] from those before it.

    `change` is what K and V go through before later blocks see them; with `own_too` before any query does.
    """
    cache = DynamicCache(config=model.config)
    if change is not None and own_too:
        store = cache.update
        cache.update = lambda keys, values, *rest, **more: store(*change(keys, values), *rest, **more)
    ATTENTION.change = None if own_too else change
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
    # In a thread of its own: Numba's pool lets parallel regions of the thread that loads it nest, and a region within
    # each of torch's would then start and end threads for every product.
    with ThreadPoolExecutor(1, "perplexity") as thread:
        yield from thread.submit(lambda: list(_measure(progress, quick=quick))).result()


def _measure(progress: Progress, *, quick: bool) -> Iterator[Row]:
    windows, tokens = (QUICK_WINDOWS, QUICK_WINDOW_TOKENS) if quick else (WINDOWS, WINDOW_TOKENS)
    folder = model_folder(progress)
    transformers_logging.disable_progress_bar()
    model = load(folder)
    text = prompt_ids(folder, windows * tokens).reshape(windows, 1, tokens)
    what = f"{MODEL_NAME}, {windows} x {tokens:,} tokens" + (" (--quick: shorter than the goal's 4 x 8,192)" * quick)
    yield from _compare(model, text, progress, what)


def _compare(model: Any, text: Any, progress: Progress, what: str) -> Iterator[Row]:
    change = Fp8()
    plain: list[Score] = []
    lossy: list[Score] = []
    for index, window in enumerate(text, 1):
        progress(f"window {index} of {len(text)}: bf16, then FP8")
        plain.append(score(model, window))
        lossy.append(score(model, window, change))
    if not change.blocks:
        raise ValueError("no block went through the codec: this model does not attend by the function it was given")
    yield make_row("accuracy", f"perplexity, bf16, {what}", _perplexity(plain), "")
    yield make_row(
        "accuracy", f"perplexity with all blocks in FP8 minus bf16, {what}", _perplexity(lossy) - _perplexity(plain),
        "", goal="<= 0.03",
    )  # fmt: skip
    yield make_row("accuracy", f"tokens with the same top choice, {what}", _same(plain, lossy), "", goal=">= 0.97")
    progress("window 1: FP8 in the block that is computed too")
    worst = [score(model, text[0], change, own_too=True)]
    more = "the same with FP8 in the block that is computed too, first window"
    yield make_row("accuracy", f"perplexity: {more}", _perplexity(worst) - _perplexity(plain[:1]), "")
    yield make_row("accuracy", f"top choice: {more}", _same(plain[:1], worst), "")


def _perplexity(scores: list[Score]) -> float:
    return float(np.exp(sum(one.nats for one in scores) / sum(one.count for one in scores)))


def _same(plain: list[Score], lossy: list[Score]) -> float:
    equal = sum(int((one.choices == other.choices).sum()) for one, other in zip(plain, lossy, strict=True))
    return equal / sum(one.count for one in plain)
