"""What attention over a stream must be, in float64, from the generator: no byte of it comes from the daemon.

The softmax is carried over pieces of the context as a maximum, a sum and weighted values (Milakov and Gimelshein
2018), so memory is bounded whatever the context. Queries of several steps share one pass over the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvtierd.core.stored_form import rotation
from kvtierd.stress import generator
from kvtierd.stress.content import BlockId, Content

Floats = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

TELL_BLOCKS = 16
"""Between two words of progress."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One decode step of one layer: q [heads, k_dim], the blocks it goes over, how many tokens it sees, and which of
    the blocks were computed from their FP8 form ([blocks] bool)."""

    q: Any
    length: int
    lossy: Mask


class Oracle:
    """Attention over `blocks` of a content, as an infinitely patient reader would compute it."""

    def __init__(self, content: Content, heads: int, threads: int) -> None:
        shape = content.geometry
        if heads % shape.kv_heads:
            raise ValueError(f"{heads} query heads are no multiple of {shape.kv_heads} KV heads")
        self._content, self._heads, self._threads = content, heads, threads
        self._scale = 1 / np.sqrt(shape.k_dim)

    def attend(
        self,
        layer: int,
        blocks: Sequence[BlockId],
        asked: Sequence[Asked],
        tell: Callable[[int], None] = lambda _blocks: None,
    ) -> tuple[Floats, Floats]:
        """Output [steps, heads, v_dim] and log-sum-exp [steps, heads]; `tell` hears how many blocks are done.

        Steps whose blocks were lossy in other places are computed apart, since their keys differ.
        """
        same = all(np.array_equal(step.lossy, asked[0].lossy) for step in asked)
        if not same:
            parts = [self.attend(layer, blocks, [step], tell) for step in asked]
            return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        q = self._scaled(asked)
        edges = np.linspace(0, len(blocks), self._threads + 1).astype(int).tolist()
        done = [0] * self._threads

        def part(thread: int) -> _State:
            state = _State(self._content, q.shape[1])
            for at in range(edges[thread], edges[thread + 1]):
                self._add(state, q, layer, blocks[at], asked, at)
                done[thread] += 1
                if done[thread] % TELL_BLOCKS == 0:
                    tell(sum(done))
            return state

        with ThreadPoolExecutor(self._threads) as pool:
            first, *others = pool.map(part, range(self._threads))
        for other in others:
            first.merge(other.top, other.total, other.values)
        return first.result(len(asked), self._heads)

    def _scaled(self, asked: Sequence[Asked]) -> Floats:
        """Queries times the scale, by KV head: float64 [kv heads, steps x heads of a group, k_dim]."""
        kv_heads = self._content.geometry.kv_heads
        q = np.stack(
            [np.asarray(step.q, np.float64).reshape(kv_heads, self._heads // kv_heads, -1) for step in asked], 1
        )
        return np.ascontiguousarray(q.reshape(kv_heads, -1, q.shape[-1]) * self._scale)

    def _add(self, state: _State, q: Floats, layer: int, name: BlockId, asked: Sequence[Asked], at: int) -> None:
        size = self._content.geometry.block_size
        if asked[0].lossy[at]:
            k, v = self._content.encoded(name, layer)
            q = turned(q, rotation(self._content.geometry))
        else:
            k, v = self._content.layer(name, layer, lossy=False)
        seen = np.clip([step.length - at * size for step in asked], 0, size)
        generator.attend(
            q, k, v, np.repeat(seen, q.shape[1] // len(asked)).astype(np.int64),
            state.top, state.total, state.values, *state.scratch,
        )  # fmt: skip


def turned(q: Floats, n: int) -> Floats:
    """Queries [..., k_dim] times Hadamard's matrix over `n` channels, k_dim / n apart (see `generator.turn`)."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rows = q.reshape(*q.shape[:-1], n, -1)
    return np.ascontiguousarray(np.einsum("ij,...jd->...id", matrix / np.sqrt(n), rows).reshape(q.shape))


class _State:
    """Carried over blocks, for all rows: steps and heads of a group."""

    def __init__(self, content: Content, rows: int) -> None:
        shape = content.geometry
        self.top = np.full((shape.kv_heads, rows), -np.inf)
        self.total = np.zeros((shape.kv_heads, rows))
        self.values = np.zeros((shape.kv_heads, rows, shape.v_dim))
        size = shape.block_size
        self.scratch = np.empty((shape.k_dim, size)), np.empty((size, shape.v_dim)), np.empty(size)

    def merge(self, top: Floats, total: Floats, values: Floats) -> None:
        """Take in what another thread has carried."""
        new = np.maximum(self.top, top)
        seen = np.where(np.isneginf(new), 0.0, new)
        ours, theirs = np.exp(self.top - seen), np.exp(top - seen)
        self.total = self.total * ours + total * theirs
        self.values = self.values * ours[..., None] + values * theirs[..., None]
        self.top = new

    def result(self, steps: int, heads: int) -> tuple[Floats, Floats]:
        """Output and log-sum-exp, by step."""
        kv_heads, v_dim = len(self.top), self.values.shape[-1]

        def by_step(rows: Any, *more: int) -> Floats:
            split = rows.reshape(kv_heads, steps, heads // kv_heads, *more)
            return np.ascontiguousarray(np.swapaxes(split, 0, 1).reshape(steps, heads, *more))

        return by_step(self.values / self.total[..., None], v_dim), by_step(self.top + np.log(self.total))


def queries(content: Content, blocks: Sequence[BlockId], layer: int, step: int, heads: int) -> tuple[Any, list[int]]:
    """Queries of a step, float32 [heads, k_dim] of bf16 values, and the blocks (places in `blocks`) that they aim at.

    Every other head looks for one token somewhere in the context, whose value then is most of its output: wrong bytes
    of that block show. The others weigh all tokens alike, so that a missing part shows anywhere.
    """
    shape = content.geometry
    rng = np.random.default_rng(generator.mix(content.seed, 0x9E4E5, layer, step))
    q = rng.standard_normal((heads, shape.k_dim)).astype(np.float32)
    aims = []
    _, bias, *_ = content.channels(layer)
    for head in range(0, heads, 2):
        place, token = int(rng.integers(len(blocks))), int(rng.integers(shape.block_size))
        kv_head = head * shape.kv_heads // heads
        k, _ = content.layer(blocks[place], layer, lossy=False)
        needle = (k[token, kv_head].astype(np.uint32) << 16).view(np.float32) - bias[kv_head]
        # exp of the needle's score over those of all others is some units at a million tokens, see below.
        sharp = np.sqrt(shape.k_dim) * (np.log(len(blocks) * shape.block_size) + 3) / float(needle @ needle)
        q[head] = needle * min(sharp, 4.0)
        aims.append(place)
    return ((q.view(np.uint32) >> 16) << 16).view(np.float32), aims
