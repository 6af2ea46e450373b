"""`kvtierctl bench accuracy`: the attention kernels of the CPU against a float64 oracle.

The figure is the largest ‖error‖₂ / ‖reference‖₂ of any head's fp32 output over a matrix of shapes. For bf16 blocks the
oracle has the same bf16 numbers, so that only the kernel's arithmetic shows. For FP8 blocks there are two figures: the
kernel against an oracle that has the decoded numbers, and what compression costs: against an oracle that has the bf16
numbers which were encoded. Keys are drawn as real ones look: a few channels of each head are many times larger than the
others, in all tokens (KIVI, Liu et al. 2024, shows such for several models).

Then what FP8 costs a real model (`perplexity`), which wants torch, transformers and the model; where these are missing
the bench ends there and says what to install.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.connectors.model_files import INSTALL, ModelUnavailableError
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import CODED, Blocks, Query, checked_query, from_fp32, to_fp32
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.codec import BlockCodec
from kvtierd.gpu.reference.attention import reference_attention, relative_error

Array = np.ndarray[Any, Any]

DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
GROUPS = (1, 3, 4, 8)
QUERIES = (1, 5)
LATENT_DIM, LATENT_V_DIM, LATENT_HEADS = 576, 512, 16
BLOCK_TOKENS, KV_HEADS = 128, 2
OUTLIERS, OUTLIER_SIZE = 4, 10.0
"""Channels of a head's keys that are so many times larger than the others."""
GOAL = "<= 0.00001"
_NEEDED = ("torch", "transformers")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A shape of the matrix: geometry, query heads, queries, and what of the options it asks for."""

    geometry: Geometry
    heads: int
    queries: int
    options: dict[str, Any]


def rows(options: Options) -> Iterator[Row]:
    """Measure every shape, then a model; fewer tokens with `--quick`. Raises BenchError where the model is missing."""
    yield from rows_of(1_000 if options.quick else 4_000)
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise BenchError(f"perplexity needs {' and '.join(missing)} and a small model: {INSTALL}")
    perplexity = importlib.import_module("kvtierd.bench.perplexity")  # wants torch: only now
    try:
        yield from perplexity.rows(_to_stderr, quick=options.quick)
    except ModelUnavailableError as error:
        raise BenchError(f"perplexity needs a small model: {error}") from error


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"accuracy: {line}\n")


def rows_of(tokens: int) -> Iterator[Row]:
    """The rows over sequences of so many tokens, which end inside a block."""
    device = HostAttention()
    worst: dict[str, float] = {}
    count = 0
    for case in matrix():
        count += 1
        for name, error in measure(case, tokens + 5, device).items():
            worst[name] = max(worst.get(name, 0.0), error)
    what = f"worst head of {count} shapes, {tokens + 5:,} tokens"
    yield make_row("accuracy", f"bf16 blocks against float64, {what}", worst["bf16"], "", goal=GOAL)
    yield make_row("accuracy", f"FP8 blocks against float64 of the decoded, {what}", worst["fp8"], "", goal=GOAL)
    yield make_row("accuracy", f"FP8 blocks against float64 of the bf16 original, {what}", worst["loss"], "")


def matrix() -> Iterator[Case]:
    """Every combination, and the forms that go beyond."""
    for (k_dim, v_dim), group, queries in itertools.product(DIMS, GROUPS, QUERIES):
        yield Case(_geometry(k_dim, v_dim), KV_HEADS * group, queries, {})
    for changes in ({"window": 300}, {"soft_cap": 30.0}, {"sinks": np.linspace(-2.0, 8.0, 8)}):
        yield Case(_geometry(128, 128), KV_HEADS * 4, 2, changes)
    latent = Geometry(block_size=BLOCK_TOKENS, layers=1, kv_heads=1, k_dim=LATENT_DIM, v_dim=0)
    yield Case(latent, LATENT_HEADS, 1, {"v_dim": LATENT_V_DIM})


def _geometry(k_dim: int, v_dim: int) -> Geometry:
    return Geometry(block_size=BLOCK_TOKENS, layers=1, kv_heads=KV_HEADS, k_dim=k_dim, v_dim=v_dim)


def measure(case: Case, tokens: int, device: HostAttention) -> dict[str, float]:
    """Errors of one shape: `bf16`, `fp8` (the kernel's), `loss` (the kernel's and the codec's)."""
    shape, codec = case.geometry, BlockCodec(case.geometry)
    rng = np.random.default_rng(shape.k_dim * 1000 + case.heads * 10 + case.queries)
    count = -(-tokens // BLOCK_TOKENS)
    exact = np.zeros((count, shape.slot_bytes), np.uint8)
    small = np.zeros((count, codec.layout.slot_bytes), np.uint8)
    # Decoded to float32: keys that were turned back are no numbers of bf16, and the kernel never rounds them to it.
    back_codec = BlockCodec(msgspec.structs.replace(shape, dtype="fp32"))
    decoded = np.zeros((count, msgspec.structs.replace(shape, dtype="fp32").slot_bytes), np.uint8)
    channels = _channels(rng, shape)
    for block, code, back in zip(exact, small, decoded, strict=True):
        block[: shape.layer_bytes] = from_fp32(_draw(rng, shape, channels), "bf16").view(np.uint8)
        codec.encode(block, code)
        back_codec.decode(code, back)
    q = rng.standard_normal((case.queries, case.heads, shape.k_dim), np.float32)
    query = checked_query(q, shape, layer=0, length=tokens, available=tokens, **case.options)
    first = np.arange(count, dtype=np.int64) * BLOCK_TOKENS
    lengths = np.minimum(BLOCK_TOKENS, tokens - first)
    exact_blocks = Blocks.make(_addresses(exact), tokens=lengths, positions=first)
    small_blocks = Blocks.make(
        _addresses(small),
        tokens=lengths,
        positions=first,
        dtypes=CODED,
        scales=_addresses(small) + codec.layout.scales_offset,
    )
    original, lossy = _oracle(query, exact, lengths), _oracle(query, decoded, lengths, np.float32)
    from_exact, from_small = (_run(device, query, blocks) for blocks in (exact_blocks, small_blocks))
    return {
        "bf16": relative_error(from_exact, original),
        "fp8": relative_error(from_small, lossy),
        "loss": relative_error(from_small, original),
    }


def _run(device: HostAttention, query: Query, blocks: Blocks) -> Array:
    partial = device.begin(query)
    for begin, end in device.pieces(query, blocks):
        device.compute(partial, blocks, begin, end)
    return partial.result()[0]


def _oracle(query: Query, memory: Array, lengths: Array, dtype: Any = np.uint16) -> Array:
    blocks = [
        (*_parts(block.view(dtype), query, int(length)), index * BLOCK_TOKENS)
        for index, (block, length) in enumerate(zip(memory, lengths, strict=True))
    ]
    return reference_attention(
        query.q, blocks, scale=query.scale, v_dim=query.values_dim, position=query.position,
        window=query.window, soft_cap=query.soft_cap, sinks=query.sinks,
    )[0]  # fmt: skip


def _parts(block: Array, query: Query, tokens: int) -> tuple[Array, Array]:
    shape = query.geometry
    numbers = to_fp32(block[: shape.layer_bytes // 2])
    k = numbers[: shape.k_bytes // 2].reshape(-1, shape.kv_heads, shape.k_dim)[:tokens]
    if not shape.v_dim:
        return k, k[:, :, : query.v_dim]
    return k, numbers[shape.k_bytes // 2 :].reshape(-1, shape.kv_heads, shape.v_dim)[:tokens]


def _channels(rng: np.random.Generator, shape: Geometry) -> Array:
    """What each channel of each head's keys is multiplied by: [kv_heads, k_dim]."""
    sizes = np.ones((shape.kv_heads, shape.k_dim), np.float32)
    for head in sizes:
        head[rng.choice(shape.k_dim, OUTLIERS, replace=False)] = OUTLIER_SIZE
    return sizes


def _draw(rng: np.random.Generator, shape: Geometry, channels: Array) -> Array:
    k = rng.standard_normal((shape.block_size, shape.kv_heads, shape.k_dim), np.float32) * channels
    v = rng.standard_normal((shape.block_size, shape.kv_heads, shape.v_dim), np.float32)
    return np.concatenate([k.reshape(-1), v.reshape(-1)])


def _addresses(memory: Array) -> Array:
    return (memory.ctypes.data + np.arange(len(memory)) * memory.strides[0]).astype(np.uint64)
