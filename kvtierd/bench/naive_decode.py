"""Part of `kvtierctl bench naive`: a decode that appends a token a step, and how long its slowest steps take.

Three ways to keep the KV: one contiguous allocation at the longest length, one that grows by reallocation, and blocks
of the daemon with a tail beside it. Each step appends the same token and attends over all of them, layer by layer, with
the same kernel; the three take turns step by step. Allocations are laid out in groups of 64 tokens, K then V, so that
the kernel runs over them on all threads as it does over blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from kvtierd.bench.attend import HEADS, SHAPE
from kvtierd.bench.naive_kv import GROWTH_TOKENS
from kvtierd.bench.options import Options, thread_count
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import TIMEOUT_S, expect, namespace, random_keys
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import Blocks, checked_query, merge
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.protocol.client import Client

Array = np.ndarray[Any, Any]

GROUP = Geometry(block_size=GROWTH_TOKENS, layers=SHAPE.layers, kv_heads=SHAPE.kv_heads, k_dim=SHAPE.k_dim,
                 v_dim=SHAPE.v_dim)  # fmt: skip
ROW = SHAPE.kv_heads * SHAPE.k_dim * 2
"""Bytes of K, and of V, of a token and layer."""
COMPARED_EVERY = 64
ERROR_MAX = 1e-5


class Decoder(Protocol):
    """A way to keep KV: append a token's, [layers, 2, ROW] uint8, then attend for each layer."""

    def step(self, token: Array, q: Array) -> list[Array]:
        """Outputs of each layer for q [layers, 1, heads, dim]."""
        ...


class Contiguous:
    """One allocation for all tokens, [layers, groups, bytes]: static, or grown by a group at a time."""

    def __init__(self, tokens: Array, longest: int, *, grows: bool) -> None:
        count, self._grows = tokens.shape[1], grows
        groups = -(-(count if grows else longest) // GROWTH_TOKENS)
        self.memory: Array = np.zeros((SHAPE.layers, groups, GROUP.layer_bytes), np.uint8)
        self.tokens = 0
        self._device = HostAttention(thread_count())
        for number in range(count):
            self._append(tokens[:, number])

    def _append(self, token: Array) -> None:
        group, place = divmod(self.tokens, GROWTH_TOKENS)
        if group == self.memory.shape[1]:
            wider = np.empty((SHAPE.layers, group + 1, GROUP.layer_bytes), np.uint8)
            wider[:, :group] = self.memory
            self.memory = wider
        write(self.memory[:, group], token, place, GROUP)
        self.tokens += 1

    def step(self, token: Array, q: Array) -> list[Array]:
        """Append, reallocating where it is full, and attend over the allocation."""
        self._append(token)
        return [attended(self._device, self.memory[layer], self.tokens, q[layer], GROUP)[0] for layer in range(len(q))]


class InBlocks:
    """Whole blocks in the daemon, in a sequence; the rest in a tail of one block here."""

    def __init__(self, client: Client, tokens: Array, longest: int) -> None:
        self._client, self._handle = client, client.register(namespace(SHAPE))
        self._keys = random_keys(longest // SHAPE.block_size + 1, seed=6)
        self._tail: Array = np.zeros((SHAPE.layers, SHAPE.layer_bytes), np.uint8)
        self._device = HostAttention(thread_count())
        self._blocks = self._count = 0
        whole = tokens.shape[1] // SHAPE.block_size * SHAPE.block_size
        for number in range(whole):
            self._write(tokens[:, number])
            if self._count == SHAPE.block_size:
                self._store()
        self.sequence = client.open_sequence(self._handle, self._keys[: self._blocks], timeout_s=TIMEOUT_S)
        for number in range(whole, tokens.shape[1]):
            self._write(tokens[:, number])

    def _write(self, token: Array) -> None:
        write(self._tail, token, self._count, SHAPE)
        self._count += 1

    def _store(self) -> Array:
        key = self._keys[self._blocks : self._blocks + 1]
        expect("stored", self._client.store(self._handle, key, self._tail.reshape(1, -1)).stored, 1)
        self._blocks += 1
        self._count = 0
        return key

    def step(self, token: Array, q: Array) -> list[Array]:
        """Append, storing the tail where it is full, and join what the daemon attends to with the tail."""
        if self._count == SHAPE.block_size:
            self.sequence.extend(self._store())
        self._write(token)
        outputs = []
        for layer in range(len(q)):
            far = self.sequence.attend(layer, q[layer])
            near = attended(self._device, self._tail[layer : layer + 1], self._count, q[layer], SHAPE)
            outputs.append(merge([(far.output, far.lse), near])[0])
        return outputs


def write(groups: Array, token: Array, place: int, shape: Geometry) -> None:
    """Put a token's K and V, [layers, 2, ROW], at a place of [layers, layer_bytes]: K of all tokens, then V."""
    groups[:, place * ROW : (place + 1) * ROW] = token[:, 0]
    groups[:, shape.k_bytes + place * ROW : shape.k_bytes + (place + 1) * ROW] = token[:, 1]


def attended(device: HostAttention, groups: Array, tokens: int, q: Array, shape: Geometry) -> tuple[Array, Array]:
    """Attention over the first tokens of contiguous groups, [n, layer_bytes]: output and log-sum-exp."""
    count = -(-tokens // shape.block_size)
    numbers = np.arange(count)
    query = checked_query(q, shape, layer=0, length=tokens, available=count * shape.block_size)
    blocks = Blocks.make(
        int(groups.ctypes.data) + numbers.astype(np.uint64) * np.uint64(shape.layer_bytes),
        tokens=np.minimum(shape.block_size, tokens - numbers * shape.block_size),
        positions=numbers * shape.block_size,
    )
    partial = device.begin(query)
    device.compute(partial, blocks)
    return partial.result()


def decode_rows(client: Client, options: Options) -> Iterator[Row]:
    """The 99th percentile of a step, and the median, of each way."""
    begin, steps = (4096, 192) if options.quick else (8192, 768)
    longest = begin + steps + SHAPE.block_size
    rng = np.random.default_rng(7)
    kv = (rng.standard_normal((SHAPE.layers, longest, 2, ROW // 2), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    kv8 = kv.view(np.uint8)
    ours = InBlocks(client, kv8[:, :begin], longest)
    with ours.sequence:
        ways: dict[str, Decoder] = {
            "blocks": ours,
            "grown": Contiguous(kv8[:, :begin], longest, grows=True),
            "static": Contiguous(kv8[:, :begin], longest, grows=False),
        }
        seconds = _taken(ways, kv8[:, begin : begin + steps], rng)
    for share, name in ((99, "99th percentile"), (50, "median")):
        figures = {way: float(np.percentile(took, share)) * 1e3 for way, took in seconds.items()}
        metric = f"decode step from {begin // 1024}k tokens on, {name}"
        for other in ("grown", "static"):
            yield make_row(
                "naive",
                f"{metric}, contiguous KV {'grown by reallocation' if other == 'grown' else 'at the longest length'}",
                figures[other],
                "ms",
                reference=figures["blocks"],
                reference_name="blocks in the daemon, and a tail",
                goal=">= 3" if (other, share) == ("grown", 99) else "",
            )


def _taken(ways: dict[str, Decoder], tokens: Array, rng: np.random.Generator) -> dict[str, list[float]]:
    """Seconds of each step of each way, in turns; what they answer must agree."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(tokens.shape[1]):
        q = rng.standard_normal((SHAPE.layers, 1, HEADS, SHAPE.k_dim), np.float32)
        answers = {}
        for name, way in ways.items():
            begin = time.perf_counter()
            answers[name] = way.step(tokens[:, number], q)
            seconds[name].append(time.perf_counter() - begin)
        if number % COMPARED_EVERY == 0:
            _compare(answers, number)
    return seconds


def _compare(answers: dict[str, list[Array]], number: int) -> None:
    for name, outputs in answers.items():
        for mine, truth in zip(outputs, answers["static"], strict=True):
            if (error := relative_error(mine, truth.astype(np.float64))) > ERROR_MAX:
                raise BenchError(f"step {number}: {name} differs by {error}")
