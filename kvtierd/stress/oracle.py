"""What attention over a stream must be, in float64, from the generator: no byte of it comes from the daemon.

The softmax is carried over pieces of the context as a maximum, a sum and weighted values (Milakov and Gimelshein
2018), so memory is bounded whatever the context. Queries of several steps share one pass over the keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvtierd.stress import generator
from kvtierd.stress.content import BlockId, Content

Floats = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

PIECE_TOKENS = 4096
"""Tokens of one head that are computed at a time: K and V of them as float64 fit a core's share of the last cache."""


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
        state = _State(asked, self._heads, self._content.geometry.kv_heads, self._content.geometry.v_dim)
        size = self._content.geometry.block_size
        step = max(1, PIECE_TOKENS // size)
        pieces = [(at, list(blocks[at : at + step])) for at in range(0, len(blocks), step)]
        work = functools.partial(self._piece, layer, asked)
        with ThreadPoolExecutor(self._threads) as pool:
            for begin in range(0, len(pieces), self._threads):
                for partial in pool.map(work, pieces[begin : begin + self._threads]):
                    state.merge(*partial)
                tell(min(len(blocks), (begin + self._threads) * step))
        return state.result()

    def _piece(
        self, layer: int, asked: Sequence[Asked], piece: tuple[int, list[BlockId]]
    ) -> tuple[Floats, Floats, Floats]:
        """Maxima and sums [kv heads, rows], weighted values [kv heads, rows, v_dim] over some blocks."""
        at, names = piece
        shape = self._content.geometry
        size, first = shape.block_size, at * shape.block_size
        k = np.empty((shape.kv_heads, len(names) * size, shape.k_dim))
        v = np.empty((shape.kv_heads, len(names) * size, shape.v_dim))
        for i, name in enumerate(names):
            self._place(layer, name, bool(asked[0].lossy[at + i]), k, v, i * size)
        tokens = np.arange(first, first + len(names) * size)
        hidden = np.concatenate([tokens >= step.length for step in asked]).reshape(len(asked), -1)
        group = self._heads // shape.kv_heads
        q = np.stack([np.asarray(step.q, np.float64).reshape(shape.kv_heads, group, -1) for step in asked], axis=1)
        return _attend(q.reshape(shape.kv_heads, len(asked) * group, -1) * self._scale, k, v,
                       np.repeat(hidden, group, axis=0))  # fmt: skip

    def _place(self, layer: int, name: BlockId, lossy: bool, k: Floats, v: Floats, at: int) -> None:  # noqa: FBT001
        size = self._content.geometry.block_size
        for words, target in zip(self._content.layer(name, layer, lossy=lossy), (k, v), strict=True):
            wide = np.empty((target.shape[0], size, target.shape[2]))
            generator.widen(words, wide)
            target[:, at : at + size] = wide


def _attend(q: Floats, k: Floats, v: Floats, hidden: Mask) -> tuple[Floats, Floats, Floats]:
    scores = q @ k.transpose(0, 2, 1)
    scores[:, hidden] = -np.inf
    top = scores.max(axis=-1)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top)[..., None])
    return top, weights.sum(axis=-1), weights @ v


class _State:
    """Carried over pieces, for all rows: steps and heads."""

    def __init__(self, asked: Sequence[Asked], heads: int, kv_heads: int, v_dim: int) -> None:
        self._steps, self._heads = len(asked), heads
        rows = len(asked) * heads // kv_heads
        self._top = np.full((kv_heads, rows), -np.inf)
        self._total = np.zeros((kv_heads, rows))
        self._values = np.zeros((kv_heads, rows, v_dim))

    def merge(self, top: Floats, total: Floats, values: Floats) -> None:
        """Take in a piece."""
        new = np.maximum(self._top, top)
        seen = np.where(np.isneginf(new), 0.0, new)
        ours, theirs = np.exp(self._top - seen), np.exp(top - seen)
        self._total = self._total * ours + total * theirs
        self._values = self._values * ours[..., None] + values * theirs[..., None]
        self._top = new

    def result(self) -> tuple[Floats, Floats]:
        """Output and log-sum-exp, by step."""
        kv_heads, v_dim = len(self._top), self._values.shape[-1]

        def by_step(rows: Any, *more: int) -> Floats:
            split = rows.reshape(kv_heads, self._steps, self._heads // kv_heads, *more)
            return np.ascontiguousarray(np.swapaxes(split, 0, 1).reshape(self._steps, self._heads, *more))

        return by_step(self._values / self._total[..., None], v_dim), by_step(self._top + np.log(self._total))


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
