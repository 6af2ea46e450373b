"""Attention over blocks in any tier, as whoever owns the tiers sees it: no kernel and no tier is named here.

A `Query` says what is asked, `Blocks` where the KV lies: one row a block, columns rather than objects, because a
million tokens have thousands of them in every layer. An `AttentionDevice` computes any blocks that it can reach, in any
order and in pieces; what it carries between them (`Partial`) is merged in any order too:

    device = HostAttention(threads=2)
    partial = device.begin(query)
    for begin, end in device.pieces(query, blocks):     # each about 5 ms
        if cancelled:
            return
        device.compute(partial, blocks, begin, end)     # without the GIL: in a worker thread
    output, lse = partial.result()

Blocks of several tiers, or several staging buffers of one, are several calls of `compute` with `blocks.take(...)`.
Partials of different devices, or of the daemon and a client's own hot tail, are joined by `merge`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from kvtierd.core.geometry import DTYPE_BYTES, LAYOUTS, Geometry

Array = np.ndarray[Any, Any]

DTYPE_CODES = {"bf16": 0, "fp16": 1, "fp32": 2, "fp8_e4m3": 3}
"""KV dtypes that can be computed on, and their codes in `Blocks.dtypes`."""
CODED = 4
"""In `Blocks.dtypes`: FP8 as the codec makes it of an exact dtype (kvtierd.core.stored_form), keys rotated."""
QUERY_DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
"""dtypes of q and of the result; NumPy has no bf16, its bits travel as uint16."""

ANYWHERE = 1 << 62
"""Position of a query that sees every key."""
MAX_DIM = 1024
"""Largest head dim; a latent of 576 fits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """One layer's parts of some blocks, in any order.

    addresses: uint64 [n], of the first byte of the layer's part. scales: uint64 [n], of its float32 scales in the order
    K heads, V heads (`EncodedLayout.scales_offset`), 0 where there are none. dtypes: uint8 [n], of `DTYPE_CODES`, or
    `CODED`. tokens: int32 [n], how many count. positions: int64 [n], of the first token. tiers: uint8 [n], whatever the
    caller means by it. The memory must stay as it is until what was asked of it is computed. Raises ValueError for
    columns of unequal length or other dtypes.
    """

    addresses: Array
    scales: Array
    dtypes: Array
    tokens: Array
    positions: Array
    tiers: Array

    def __post_init__(self) -> None:
        wanted = zip(
            ("addresses", "scales", "dtypes", "tokens", "positions", "tiers"), ("u8", "u8", "u1", "i4", "i8", "u1"),
            strict=True,
        )  # fmt: skip
        for name, dtype in wanted:
            column = getattr(self, name)
            if column.dtype != np.dtype(dtype) or column.shape != (self.addresses.size,):
                what = f"{column.dtype} {column.shape}"
                raise ValueError(f"{name} is {what}; {np.dtype(dtype)} ({self.addresses.size},) is wanted")

    @classmethod
    def make(
        cls, addresses: Any, *, tokens: Any, positions: Any, dtypes: Any = 0, scales: Any = 0, tiers: Any = 0
    ) -> Blocks:
        """From anything array-like; a single value stands for all blocks."""
        first = np.array(addresses, np.uint64)

        def column(values: Any, dtype: Any) -> Array:
            return np.array(np.broadcast_to(np.asarray(values, dtype), first.shape))

        return cls(
            addresses=first,
            scales=column(scales, np.uint64),
            dtypes=column(dtypes, np.uint8),
            tokens=column(tokens, np.int32),
            positions=column(positions, np.int64),
            tiers=column(tiers, np.uint8),
        )

    def __len__(self) -> int:
        return self.addresses.size

    def take(self, which: Any) -> Blocks:
        """Some of the blocks: a slice, a mask or indices."""
        columns = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Blocks(*(np.array(column[which]) for column in columns))

    @property
    def token_count(self) -> int:
        """Tokens of all blocks."""
        return int(self.tokens.sum(dtype=np.int64))


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """What is asked of one layer. `q` is [queries, heads, k_dim] of a dtype of `QUERY_DTYPES`, C-contiguous.

    Query i stands at `position` + i and sees the keys at positions up to its own: `window` of them where it is not 0.
    `scale` multiplies scores; `soft_cap` c, where not 0, makes them c * tanh(score / c); `sinks` float32 [heads] are
    scores that take part in the sum and have no value (once: not again where partials are merged). `v_dim` is that of a
    latent form, whose values are the first v_dim elements of K; elsewhere it is the geometry's.
    Build it with `checked_query`, which refuses what cannot be computed.
    """

    q: Array
    geometry: Geometry
    scale: float
    position: int = ANYWHERE
    window: int = 0
    soft_cap: float = 0.0
    sinks: Array | None = None
    v_dim: int = 0

    @property
    def values_dim(self) -> int:
        """Elements of a value of one head."""
        return self.geometry.v_dim or self.v_dim

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return int(self.q.shape[1]) // self.geometry.kv_heads

    @property
    def rows(self) -> int:
        """Query vectors of one KV head."""
        return int(self.q.shape[0]) * self.group


class Partial(Protocol):
    """What is carried of an answer that is not whole yet."""

    def result(self, dtype: str = "fp32") -> tuple[Array, Array]:
        """Output [queries, heads, v_dim] of that dtype and the natural log-sum-exp, float32 [queries, heads]."""
        ...


class AttentionDevice(Protocol):
    """Computes attention over the blocks that it can reach."""

    def adopt(self, memory: Array) -> None:
        """Blocks will lie in this host memory again and again: make it fast to reach. It stays until the end."""
        ...

    def to_prepare(self, geometry: Geometry, *, lossy: bool) -> list[Callable[[], None]]:
        """What must be called before queries over such blocks, in FP8 too where `lossy`, are computed without compiling
        anything: each call may take seconds and raise DeviceError. Empty where all is ready."""
        ...

    def stop_preparing(self) -> None:
        """Have calls of `to_prepare` that are under way end soon, and those that come later raise DeviceError."""
        ...

    def begin(self, query: Query) -> Partial:
        """Carry nothing yet."""
        ...

    def pieces(self, query: Query, blocks: Blocks) -> Iterator[tuple[int, int]]:
        """Ranges of blocks, in order, that take about as long as a piece of work may (5 ms)."""
        ...

    def work_of_one(self, query: Query, blocks: Blocks) -> int:
        """Work of all these blocks, in units of the device, where a single processor does it; 0 where several would."""
        ...

    def compute(self, partial: Any, blocks: Blocks, begin: int, end: int) -> bool:
        """Add blocks begin..end to what is carried; holds the caller's thread and not the GIL. False where it was
        stopped, and the partial is void. Raises DeviceError (kvtierd.gpu.device), and the partial is void."""
        ...


def checked_query(
    q: Array,
    geometry: Geometry,
    *,
    layer: int,
    length: int,
    available: int,
    scale: float | None = None,
    causal: bool = True,
    position: int | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
    v_dim: int = 0,
) -> Query:
    """Make a query over the first `length` of `available` tokens, or raise ValueError naming what is wrong.

    scale defaults to 1 / sqrt(k_dim). Where causal, the first query stands at `position`, by default so that the last
    one is the last token; where not, all queries see all keys.
    """
    _check_kv(geometry, layer, length, available, v_dim)
    _check_q(q, geometry)
    _check_options(causal=causal, position=position, window=window, scale=scale, soft_cap=soft_cap)
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, np.float32)
        if sinks.shape != (q.shape[1],) or np.isnan(sinks).any():
            raise ValueError(f"sinks have shape {sinks.shape} or hold NaN; one number a query head ({q.shape[1]})")
    start = length - q.shape[0] if position is None else position
    if causal and start < 0:
        raise ValueError(f"q has {q.shape[0]} queries and length is {length}; give the position of the first one")
    return Query(
        q=np.ascontiguousarray(q),
        geometry=geometry,
        scale=1.0 / math.sqrt(geometry.k_dim) if scale is None else scale,
        position=start if causal else ANYWHERE,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        v_dim=v_dim,
    )


def _check_kv(geometry: Geometry, layer: int, length: int, available: int, v_dim: int) -> None:
    if geometry.layout not in LAYOUTS:
        raise ValueError(f"layout {geometry.layout!r} is stored and not computed on; use {' or '.join(LAYOUTS)}")
    if geometry.dtype not in DTYPE_CODES:
        raise ValueError(f"dtype {geometry.dtype!r} is stored and not computed on; use {', '.join(DTYPE_CODES)}")
    if not 0 <= layer < geometry.layers:
        raise ValueError(f"layer {layer} is not in 0..{geometry.layers - 1}")
    if length <= 0:
        raise ValueError(f"length is {length}; at least one token is needed")
    if length > available:
        raise ValueError(f"length is {length}, and the blocks hold {available} tokens")
    if max(geometry.k_dim, geometry.v_dim) > MAX_DIM:
        raise ValueError(f"head dims {geometry.k_dim} and {geometry.v_dim} are over the limit of {MAX_DIM}")
    if geometry.v_dim and v_dim not in {0, geometry.v_dim}:
        raise ValueError(f"v_dim is {v_dim}, and the blocks have values of {geometry.v_dim}; leave it out")
    if not geometry.v_dim and not 0 < v_dim <= geometry.k_dim:
        raise ValueError(f"v_dim is {v_dim}; a latent of {geometry.k_dim} elements needs 1..{geometry.k_dim}")


def _check_q(q: Array, geometry: Geometry) -> None:
    if q.ndim != 3 or q.shape[0] < 1 or q.shape[1] < 1 or q.shape[2] != geometry.k_dim:
        raise ValueError(f"q has shape {q.shape}; [queries, heads, {geometry.k_dim}] is wanted")
    if q.shape[1] % geometry.kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of the {geometry.kv_heads} KV heads")
    if q.dtype not in QUERY_DTYPES.values():
        raise ValueError(f"q is {q.dtype}; float32, float16, or bf16 as uint16 are wanted")
    if (bad := np.argwhere(np.isnan(to_fp32(q)))).size:
        raise ValueError(f"q holds NaN, first at {bad[0].tolist()}; nothing can be computed from it")


def _check_options(*, causal: bool, position: int | None, window: int, scale: float | None, soft_cap: float) -> None:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; a finite number is wanted")
    if not (math.isfinite(soft_cap) and soft_cap >= 0):
        raise ValueError(f"soft_cap is {soft_cap}; 0 (none) or more is wanted")
    if not 0 <= window < ANYWHERE:
        raise ValueError(f"window is {window}; it must be in 0..{ANYWHERE - 1}, 0 for none")
    if not causal and (window or position is not None):
        raise ValueError("a window or a position has no meaning where every query sees every key; set causal")
    if position is not None and not 0 <= position < ANYWHERE:
        raise ValueError(f"position is {position}; it must be in 0..{ANYWHERE - 1}")


def code_of(geometry: Geometry) -> int:
    """The code of a namespace's own dtype; ValueError for one that cannot be computed on."""
    if geometry.dtype not in DTYPE_CODES:
        raise ValueError(f"dtype {geometry.dtype!r} ({DTYPE_BYTES[geometry.dtype]} bytes) is not computed on")
    return DTYPE_CODES[geometry.dtype]


def to_fp32(values: Array) -> Array:
    """q as float32; bits of bf16 (uint16) are widened."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def rotated(vectors: Array, n: int) -> Array:
    """float32 vectors [..., dim] turned as the codec turns keys over `n` channels (kvtierd.core.stored_form); the same
    again turns them back, but for rounding."""
    rows = vectors.reshape(-1, n, vectors.shape[-1] // n) * np.float32(1 / math.sqrt(n))
    half = n // 2
    while half:
        pairs = rows.reshape(rows.shape[0], n // (2 * half), 2, half, -1)
        rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(rows.shape)
        half //= 2
    return rows.reshape(vectors.shape)


def from_fp32(values: Array, dtype: str) -> Array:
    """float32 as one of `QUERY_DTYPES`, rounded to nearest even; NaN stays NaN."""
    if dtype not in QUERY_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(QUERY_DTYPES)}")
    if dtype != "bf16":
        with np.errstate(over="ignore"):
            return values.astype(QUERY_DTYPES[dtype])
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def merge(results: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Join results over disjoint keys: outputs [queries, heads, v_dim] and log-sum-exps [queries, heads], float32.

    Each output weighs exp(lse); one without keys (lse -Inf) weighs nothing. Raises ValueError for an empty sequence.
    """
    if not results:
        raise ValueError("nothing to merge; at least one result is needed")
    lses = np.stack([lse for _, lse in results]).astype(np.float64)
    top = lses.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(lses - np.where(np.isneginf(top), 0.0, top))
        total = weights.sum(axis=0)
        shares = weights / np.where(total == 0, 1.0, total)
        output = sum(share[..., None] * part for share, (part, _) in zip(shares, results, strict=True))
        lse = np.where(total == 0, -np.inf, top + np.log(total))
    return np.asarray(output, np.float32), lse.astype(np.float32)
