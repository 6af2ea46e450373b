"""Blocks of streams of tokens: their keys, their bytes, and whether bytes are theirs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys, block_keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec, rotation
from kvtierd.stress import generator

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint16]]

VOCABULARY = 128_256
OUTLIERS = 4
"""Channels of a head of K that have a bias; published measurements of real keys find a few of 128."""
OUTLIER_BIAS = 8.0
"""In standard deviations of an ordinary channel."""
_CHANNELS, _TOKENS = 0xC4A7, 0x70CE
"""What tells these hashes from those of elements."""

PRESETS: dict[str, tuple[Geometry, int]] = {
    "llama-3.1-8b": (Geometry(block_size=128, layers=32, kv_heads=8, k_dim=128, v_dim=128), 32),
    "smollm2": (Geometry(block_size=128, layers=30, kv_heads=3, k_dim=64, v_dim=64), 9),
}
"""Geometry with all of the model's layers, and its query heads: meta-llama/Llama-3.1-8B and HuggingFaceTB/SmolLM2-135M
as their configurations say."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockId:
    """Which block: the `index`-th of a stream."""

    stream: int
    index: int


class Content:
    """All that a run may store, for a seed and a geometry (dtype bf16, layout nhd)."""

    def __init__(self, seed: int, geometry: Geometry, *, lossy: bool = False) -> None:
        if geometry.dtype != "bf16" or geometry.layout != "nhd" or not geometry.v_dim:
            raise ValueError(f"{geometry} has not the form that is generated: bf16, nhd, K and V")
        self.seed, self.geometry = seed, geometry
        self.namespace = Namespace(model="kvtierd-stress", revision=f"seed-{seed}", geometry=geometry,
                                   quantisation="fp8-allowed" if lossy else "")  # fmt: skip
        self.digest = self.namespace.digest()

    def channels(self, layer: int) -> tuple[Any, Any, Any, Any]:
        """Scale and bias of K's channels of a layer, then of V's, float32 [heads, dim]."""
        return self._channels[layer]

    @functools.cached_property
    def _channels(self) -> list[tuple[Any, Any, Any, Any]]:
        return [self._channels_of(layer) for layer in range(self.geometry.layers)]

    def _channels_of(self, layer: int) -> tuple[Any, Any, Any, Any]:
        """From hashes and exact arithmetic: neither a library's exp nor its random numbers may differ elsewhere."""
        shape = self.geometry
        k_hash = _hashes(shape.kv_heads * shape.k_dim, self.seed, _CHANNELS, layer, 0)
        v_hash = _hashes(shape.kv_heads * shape.v_dim, self.seed, _CHANNELS, layer, 1)
        k_scale = _scales(k_hash, 0.75).reshape(shape.kv_heads, shape.k_dim)
        v_scale = _scales(v_hash, 0.375).reshape(shape.kv_heads, shape.v_dim)
        k_bias, v_bias = np.zeros_like(k_scale), np.zeros_like(v_scale)
        for head, of_head in enumerate(k_hash.reshape(shape.kv_heads, shape.k_dim)):
            dims = np.argsort(of_head)[:OUTLIERS]
            k_bias[head, dims] = np.where(of_head[dims] & np.uint64(1), OUTLIER_BIAS, -OUTLIER_BIAS)
        return k_scale, k_bias, v_scale, v_bias

    def tokens(self, stream: int, begin: int, count: int) -> Any:
        """Token ids of a stream, uint32 [count]."""
        hashed = _hashes(count, self.seed, _TOKENS, stream, first=begin)
        return (hashed % np.uint64(VOCABULARY)).astype(np.uint32)

    def keys(self, *runs: tuple[int, int]) -> Keys:
        """Keys of a prompt that is `blocks` of a stream, then `blocks` of the next: runs of (stream, blocks).

        A later run goes on at the place where the one before ends.
        """
        size, tokens, at = self.geometry.block_size, [], 0
        for stream, blocks in runs:
            tokens.append(self.tokens(stream, at * size, blocks * size))
            at += blocks
        return block_keys(self.digest, np.concatenate(tokens) if tokens else [], size)

    @staticmethod
    def ids(*runs: tuple[int, int]) -> list[BlockId]:
        """What the blocks of such a prompt hold."""
        found: list[BlockId] = []
        for stream, blocks in runs:
            found += [BlockId(stream, len(found) + i) for i in range(blocks)]
        return found

    def parts(self, block: Bytes, layer: int) -> tuple[Words, Words]:
        """K and V of a layer in a block in slot form, as bf16 bits [tokens, heads, dim]."""
        shape = self.geometry
        begin = layer * shape.layer_stride
        k = block[begin : begin + shape.k_bytes].view(np.uint16)
        v = block[begin + shape.k_bytes : begin + shape.layer_bytes].view(np.uint16)
        return (
            k.reshape(shape.block_size, shape.kv_heads, shape.k_dim),
            v.reshape(shape.block_size, shape.kv_heads, shape.v_dim),
        )

    def fill_layer(self, name: BlockId, layer: int, k: Words, v: Words) -> None:
        """Write K and V of a layer of a block, [tokens, heads, dim] each."""
        k_scale, k_bias, v_scale, v_bias = self._channels[layer]
        first = name.index * self.geometry.block_size
        generator.fill(k, generator.part_key(self.seed, name.stream, layer, 0), first, k_scale, k_bias)
        generator.fill(v, generator.part_key(self.seed, name.stream, layer, 1), first, v_scale, v_bias)

    def fill(self, name: BlockId, block: Bytes) -> None:
        """Write a block in slot form; padding is left alone."""
        for layer in range(self.geometry.layers):
            self.fill_layer(name, layer, *self.parts(block, layer))

    def wrong_elements(self, name: BlockId, block: Bytes, codec: int = Codec.RAW) -> dict[int, int]:
        """By layer: how many elements of a block in slot form are not what they must be; nothing where all are.

        With codec FP8 they must be what that form makes of the generated ones, to the bit.
        """
        wrong = {}
        for layer in range(self.geometry.layers):
            k, v = self.parts(block, layer)
            count = self._wrong_lossy(name, layer, k, v) if codec else self._wrong_exact(name, layer, k, v)
            if count:
                wrong[layer] = count
        return wrong

    def _wrong_exact(self, name: BlockId, layer: int, k: Words, v: Words) -> int:
        k_scale, k_bias, v_scale, v_bias = self._channels[layer]
        first = name.index * self.geometry.block_size
        count = generator.count_wrong
        return count(k, generator.part_key(self.seed, name.stream, layer, 0), first, k_scale, k_bias) + count(
            v, generator.part_key(self.seed, name.stream, layer, 1), first, v_scale, v_bias
        )

    def _wrong_lossy(self, name: BlockId, layer: int, k: Words, v: Words) -> int:
        wanted_k, wanted_v = self.layer(name, layer, lossy=True)
        return int(np.count_nonzero(k != wanted_k)) + int(np.count_nonzero(v != wanted_v))

    def layer(self, name: BlockId, layer: int, *, lossy: bool) -> tuple[Words, Words]:
        """K and V of a layer of a block, in memory of their own; `lossy`: as FP8 gives them back."""
        shape = self.geometry
        k = np.empty((shape.block_size, shape.kv_heads, shape.k_dim), np.uint16)
        v = np.empty((shape.block_size, shape.kv_heads, shape.v_dim), np.uint16)
        self.fill_layer(name, layer, k, v)
        if lossy:
            self._through_fp8(k, v)
            generator.turn(k, rotation(shape))
        return k, v

    def encoded(self, name: BlockId, layer: int) -> tuple[Words, Words]:
        """K and V of a layer as FP8 holds them: K is rotated, and a product with it wants q rotated."""
        k, v = self.layer(name, layer, lossy=False)
        self._through_fp8(k, v)
        return k, v

    def _through_fp8(self, k: Words, v: Words) -> None:
        generator.turn(k, rotation(self.geometry))
        generator.quantise(k)
        generator.quantise(v)


def _hashes(count: int, *words: int, first: int = 0) -> Any:
    """uint64 [count]: hashes of the places from `first` on, of a sequence that the words name."""
    hashed = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashed += np.uint64(generator.mix(*words))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashed = (hashed ^ (hashed >> np.uint64(shift))) * np.uint64(factor)
    return hashed ^ (hashed >> np.uint64(31))


def _scales(hashed: Any, least: float) -> Any:
    """From `least` to a half more, float32."""
    return (least + (hashed >> np.uint64(58)).astype(np.float32) / np.float32(128)).astype(np.float32)
