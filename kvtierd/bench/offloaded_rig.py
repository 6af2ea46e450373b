"""The model that `kvtierctl bench offloaded` measures, its past in the daemon, and naive offload. Wants torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import kvtierd.connectors.demo_rig  # noqa: F401 - sets what torch reads when it is imported for the first time
from kvtierd.bench.options import thread_count
from kvtierd.bench.rows import BenchError
from kvtierd.bench.workload import TIMEOUT_S
from kvtierd.connectors.cache_tensors import LayerBuffers
from kvtierd.connectors.kv_layout import SlotView
from kvtierd.connectors.model_files import model_folder
from kvtierd.connectors.model_identity import empty_cache
from kvtierd.connectors.transformers import OffloadedCache, register_offloaded_attention
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import Blocks, checked_query
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.protocol.client import Client

SHORT = 64
"""Tokens of the plain cache over which the model's own step is measured."""

NAIVE_BYTES = 2 << 20
"""Leased at a time by naive offload, and asked for while the batch before is copied: a quarter of a small host tier."""


class Parts(NamedTuple):
    """Of the past: how many blocks there are, how many of them were read from nvme in a step, and their shape."""

    blocks: int
    in_nvme: int
    shape: Geometry


class Model:
    """SmolLM2-135M in bf16 and a past of normal deviates: what a step takes does not depend on what was said."""

    def __init__(self, tokens: int, block_size: int) -> None:
        register_offloaded_attention()
        torch.set_num_threads(thread_count())
        folder = model_folder()
        self.tokens = tokens
        self.block_size = block_size
        self.net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()
        self.past = self._random(tokens)
        self.kv_bytes = sum(part.nbytes for layer in self.past.layers for part in (layer.keys, layer.values))
        self._short = self._random(SHORT)

    def _random(self, tokens: int) -> Any:
        config = self.net.config
        shape = (1, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
        generator = torch.Generator().manual_seed(1)
        cache = empty_cache(self.net)
        for layer in range(config.num_hidden_layers):
            k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(2))
            cache.update(k, v, layer)
        return cache

    def forward(self, cache: Any, kind: str) -> torch.Tensor:
        """One token over a cache, which is then as it was; logits in float32."""
        self.net.set_attn_implementation(kind)
        with torch.no_grad():
            output = self.net(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True).logits[0, -1]
        cache.crop(-1)
        return output.float()

    def step(self) -> None:
        """The model's own time: next to no past."""
        self.forward(self._short, "sdpa")


@contextlib.contextmanager
def offloaded(model: Model, client: Client, *, allow_loss: bool) -> Iterator[Past]:
    """The model's past in the daemon, for the length of the block."""
    model.net.set_attn_implementation("kvtierd")
    with OffloadedCache(client, model.net, block_size=model.block_size, allow_loss=allow_loss, timeout_s=60) as cache:
        cache.adopt(model.past)
        yield Past(model, client, cache)


class Past:
    """A past in the daemon, stepped over in three ways."""

    def __init__(self, model: Model, client: Client, cache: OffloadedCache) -> None:
        assert cache.blocks is not None
        self._model, self._client, self._cache = model, client, cache
        self._shape = cache.blocks.geometry
        numbers = cache.blocks_of(0)
        self._keys = cache.blocks.keys(numbers)
        self._device = HostAttention(thread_count())
        self._memory = np.random.default_rng(2).integers(
            0, 0x3F80, (len(numbers), self._shape.layer_bytes // 2), np.uint16
        )

    def step(self) -> None:
        """One token over the offloaded past."""
        self._model.forward(self._cache, "kvtierd")

    def count_parts(self) -> Parts:
        """What a step takes from where."""
        before = self._client.stats()["attend_nvme_bytes"]
        self.step()
        read = self._client.stats()["attend_nvme_bytes"] - before
        in_nvme = read // (self._shape.layers * self._shape.layer_stride)
        if not in_nvme:
            raise BenchError("nothing of the past lies in nvme")
        return Parts(len(self._keys), in_nvme, self._shape)

    def naive(self) -> None:
        """One token over a plain cache whose every byte is copied from the tiers first; of exact blocks only."""
        shape, keys = self._shape, self._keys
        buffers, at = LayerBuffers(shape, len(keys) * shape.block_size), 0
        give_up_s = time.monotonic() + TIMEOUT_S
        while at < len(keys):  # what was refused for want of room is asked for again
            at += self._copied(at, buffers)
            if time.monotonic() > give_up_s:
                raise BenchError(f"the daemon gave back {at} of {len(keys)} blocks of the past in {TIMEOUT_S} s")
        cache = empty_cache(self._model.net)
        buffers.fill_cache(cache, at * shape.block_size, ["cpu"] * shape.layers)
        self._model.forward(cache, "sdpa")

    def _copied(self, first: int, buffers: LayerBuffers) -> int:
        """How many blocks from the first on could be copied now."""
        assert self._cache.blocks is not None
        shape, at = self._shape, first
        batch = max(1, NAIVE_BYTES // shape.slot_bytes)
        for lease in self._client.leases(self._cache.blocks.handle, self._keys[first:], batch=batch):
            for view, sums in zip(lease.views, lease.sums, strict=True):
                if not SlotView(view, shape).read(buffers.arrays, at * shape.block_size, sums):
                    raise BenchError(f"block {at} of the past does not match its checksums")
                at += 1
        return at - first

    def compute(self) -> None:
        """The kernel alone over one layer of all blocks, in contiguous memory."""
        shape, blocks = self._shape, len(self._memory)
        parts = Blocks.make(
            int(self._memory.ctypes.data) + np.arange(blocks, dtype=np.uint64) * np.uint64(shape.layer_bytes),
            tokens=shape.block_size,
            positions=np.arange(blocks) * shape.block_size,
        )
        tokens = blocks * shape.block_size
        q = np.ones((1, self._model.net.config.num_attention_heads, shape.k_dim), np.float32)
        query = checked_query(q, shape, layer=0, length=tokens, available=tokens, causal=False)
        partial = self._device.begin(query)
        for begin, end in self._device.pieces(query, parts):
            self._device.compute(partial, parts, begin, end)
        partial.result()
