"""An Attend request as numbers that may be used: what of it is wrong is said here, before anything is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.gpu.attend import QUERY_DTYPES, Array, Query, checked_query
from kvtierd.protocol.messages import QUERY_BYTES, Attend
from kvtierd.tiers.sequences import OpenedSequence

QUERIES_MAX_BYTES = 64 * MIB
"""Of q as fp32, over all layers of a request: what is carried for a request is a few times that."""

BLOCK_WORK = 1 << 25
"""Elements of KV of a block times the passes of 4 query rows over them that a piece of work may have: some 4 ms of one
thread. Queries beyond that go over the blocks in another piece."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Blocks `begin` to `end` - 1 of a sequence are seen by a query; of the tokens those before `length` count."""

    begin: int
    end: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class LayerQuery:
    """What is asked of one layer: query vectors, cut into those that go over a block in one piece of work."""

    layer: int
    parts: list[Query]
    span: Span


def check_shape(request: Attend, sequence: OpenedSequence, frames: Sequence[memoryview]) -> None:
    """Refuse what the header alone shows to be wrong, or frames that do not match it. Raises RequestError."""
    layers = request.layers
    if not layers:
        raise _bad("attend names no layer")
    if len(set(layers)) < len(layers):
        raise _bad(f"a layer is named twice in {layers[:8]}; name each once")
    if request.queries < 1 or request.heads < 1:
        raise _bad(f"q has {request.queries} queries and {request.heads} heads; at least 1 of each is wanted")
    if len(request.lengths) not in {0, 1, len(layers)}:
        raise _bad(f"{len(request.lengths)} lengths for {len(layers)} layers; give one for all, or one for each")
    vectors = request.queries * request.heads
    width = max(sequence.entry.geometry.k_dim, sequence.entry.geometry.v_dim, request.v_dim)
    if vectors * width * 4 * len(layers) > QUERIES_MAX_BYTES:
        raise RequestError(
            ErrorCode.TOO_LARGE,
            f"{request.queries} queries of {request.heads} heads for {len(layers)} layers are over the limit of "
            f"{QUERIES_MAX_BYTES} bytes of fp32; split the request",
        )
    wanted = vectors * sequence.entry.geometry.k_dim * QUERY_BYTES[request.dtype]
    for number, frame in enumerate(frames):
        size = wanted if number < len(layers) else request.heads * 4
        if frame.nbytes != size:
            what = f"[{request.queries}, {request.heads}, {sequence.entry.geometry.k_dim}] {request.dtype}"
            what = what if number < len(layers) else f"sinks [{request.heads}] fp32"
            raise _bad(f"frame {number + 1} has {frame.nbytes} bytes; {what} are {size}")


def queries_of(request: Attend, geometry: Geometry, tokens: int, frames: Sequence[memoryview]) -> list[LayerQuery]:
    """What is asked of each layer. Runs in a worker: it looks at every number. Raises RequestError."""
    found = []
    for place, layer in enumerate(request.layers):
        q = np.frombuffer(frames[place], QUERY_DTYPES[request.dtype])
        q = q.reshape(request.queries, request.heads, geometry.k_dim)
        sinks = np.frombuffer(frames[len(request.layers) + place], np.float32) if request.sinks else None
        length = request.lengths[min(place, len(request.lengths) - 1)] if request.lengths else tokens
        try:
            query = _checked(request, q, sinks, geometry, layer, length, tokens)
        except ValueError as error:
            raise _bad(f"layer {layer}: {error}") from None
        found.append(LayerQuery(layer, _cut(query, geometry), _span(query, geometry, length)))
    return found


def _checked(
    request: Attend, q: Array, sinks: Array | None, geometry: Geometry, layer: int, length: int, tokens: int
) -> Query:
    return checked_query(
        q,
        geometry,
        layer=layer,
        length=length,
        available=tokens,
        scale=request.scale,
        causal=request.causal,
        position=None if request.position == -1 else request.position,
        window=request.window,
        soft_cap=request.soft_cap,
        sinks=sinks,
        v_dim=request.v_dim,
    )


def _span(query: Query, geometry: Geometry, length: int) -> Span:
    """Blocks that some query may see."""
    first = max(0, query.position - query.window + 1) if query.window else 0
    end = min(length, query.position + query.q.shape[0])
    if first >= end:
        return Span(0, 0, length)
    return Span(first // geometry.block_size, -(-end // geometry.block_size), length)


def _cut(query: Query, geometry: Geometry) -> list[Query]:
    """Queries that together take no longer for one block than a piece of work may."""
    elements = geometry.block_size * geometry.kv_heads * (geometry.k_dim + query.values_dim)
    rows = max(1, BLOCK_WORK // elements) * 4
    each = max(1, rows // query.group)
    if each >= query.q.shape[0]:
        return [query]
    return [
        dataclasses.replace(query, q=query.q[at : at + each], position=query.position + at)
        for at in range(0, query.q.shape[0], each)
    ]


def _bad(message: str) -> RequestError:
    return RequestError(ErrorCode.BAD_ARGUMENT, message)
