"""Attention as the formula says, in float64, block by block: what every kernel is checked against.

The same definitions as the kernels have: a key that a query does not see takes no part at all, whatever it holds; no
key seen, or all scores -Inf, gives 0 and a log-sum-exp of -Inf; NaN and +Inf propagate as arithmetic has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
KvBlock = tuple[Any, Any, int]
"""K [tokens, kv_heads, k_dim], V [tokens, kv_heads, v_dim], and the position of the first token."""


def reference_attention(
    q: Any,
    blocks: Iterable[KvBlock],
    *,
    scale: float,
    v_dim: int,
    position: int | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Any = None,
) -> tuple[Floats, Floats]:
    """Output [queries, heads, v_dim] and log-sum-exp [queries, heads] of q [queries, heads, k_dim], in float64.

    Query i stands at `position` + i and sees the keys at positions up to its own, the last `window` of them where
    window is not 0; position None sees everything. Scores are soft_cap * tanh(score / soft_cap) where soft_cap is not
    0. sinks [heads] are scores that take part in the sum and have no value.
    """
    q = np.asarray(q, np.float64)
    queries, heads, _ = q.shape
    top = np.full((queries, heads), -np.inf)
    total = np.zeros((queries, heads))
    output = np.zeros((queries, heads, v_dim))
    with np.errstate(all="ignore"):
        for k, v, first in blocks:
            for query in range(queries):
                begin, end = _seen(None if position is None else position + query, window, first, len(k))
                if end > begin:
                    state = (top[query], total[query], output[query])
                    _add(q[query], np.asarray(k[begin:end]), np.asarray(v[begin:end]), scale, soft_cap, state)
        if sinks is not None:
            _shrink(np.maximum(top, sinks), top, total, output)
            total += np.where(np.isneginf(top), 0.0, np.exp(np.asarray(sinks, np.float64) - _finite(top)))
        lse = top + np.log(total)
        output = np.where(total[..., None] == 0, 0.0, output / total[..., None])
    return output, np.where(total == 0, -np.inf, lse)


def _seen(position: int | None, window: int, first: int, count: int) -> tuple[int, int]:
    if position is None:
        return 0, count
    begin = max(0, position - window + 1 - first) if window else 0
    return min(begin, count), min(max(position + 1 - first, 0), count)


def _add(q: Floats, k: Floats, v: Floats, scale: float, soft_cap: float, state: tuple[Floats, Floats, Floats]) -> None:
    """Add some tokens to one query's carried maximum [heads], total [heads] and output [heads, v_dim]."""
    top, total, output = state
    group = len(q) // k.shape[1]
    k, v = (np.repeat(np.asarray(part, np.float64), group, axis=1) for part in (k, v))
    scores = np.einsum("hd,thd->th", q, k) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    _shrink(np.fmax(top, np.fmax.reduce(scores, axis=0, initial=-np.inf)), top, total, output)
    weights = np.exp(scores - _finite(top))
    total += weights.sum(axis=0)
    output += np.einsum("th,thd->hd", weights, v)


def _shrink(new: Floats, top: Floats, total: Floats, output: Floats) -> None:
    factor = np.where(np.isneginf(top), 0.0, np.exp(top - _finite(new)))
    # What was summed without a maximum is 0, or NaN of a NaN score: that stays.
    total *= np.where(np.isnan(total), 1.0, factor)
    output *= np.where(np.isnan(output), 1.0, factor[..., None])
    top[...] = new


def _finite(top: Floats) -> Floats:
    return np.where(np.isneginf(top), 0.0, top)


def relative_error(value: Any, reference: Any) -> float:
    """The largest, over queries and heads, of ‖value - reference‖₂ / ‖reference‖₂; arrays [queries, heads, dim]."""
    difference = np.linalg.norm(np.asarray(value, np.float64) - reference, axis=-1)
    size = np.linalg.norm(reference, axis=-1)
    return float(np.max(np.where(size > 0, difference / np.where(size > 0, size, 1.0), difference), initial=0.0))


def default_scale(k_dim: int) -> float:
    """1 / sqrt(k_dim)."""
    return 1.0 / math.sqrt(k_dim)
