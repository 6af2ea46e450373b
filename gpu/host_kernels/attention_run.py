"""Attention of a run of query rows over one tile of tokens on the CPU: scores, weights, weighted sum of values.

K and V are gone through in the order they lie in memory: a few tokens, then all heads of them, then the next few. What
is loaded of a KV head is used for all its query rows while it is in a register or the first-level cache.

Elements that the register tiles cannot take as they are (a head dim that is no multiple of a vector, scales out of the
range in which e4m3 can stay 2^120 too small, e4m3's NaN) are decoded to fp32 rows first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from kvtierd.gpu.host_kernels.attention_memory import ask_at_once, decode_rows, get_fp32
from kvtierd.gpu.host_kernels.attention_tiles import ROWS, add_values, any_nan, cap_scores, largest, score_rows, weigh
from kvtierd.gpu.host_kernels.attention_vectors import E4M3, FP32, LANES, TOKENS
from kvtierd.index.jit import Word, helper, subroutine

TILE = 64
"""Tokens between two looks at the running maximum: their scores stay in the first-level cache."""
VALUES_AT_ONCE = 32
"""Tokens whose values are summed before the sums go back to memory."""
SPARE_ROWS = max(TOKENS, VALUES_AT_ONCE)
"""Decoded rows at once."""

RAW_QUERY = 2.0**64
"""e4m3 stays 2^120 too small in registers: the query is scaled by this, so that products are no denormals, ..."""
RAW_SCORE = 2.0**56
"""... and the score by this. Likewise for weights, and for the sums while a block of e4m3 adds to them."""
RAW_SUMS = 2.0**-56
_RAW = 2.0**-120
_SCAN_BYTES = 128
"""What one step of `any_nan` looks at."""
_NOWHERE = np.uint64(0)
SCALE_LIMIT = 2.0**60
"""Scales up to this, and from its inverse on, leave room for the factors above."""


class Shape(NamedTuple):
    """What a call is about, all int64; strides and starts in elements of the block's dtype.

    `group` query heads to a KV head, `queries` of them in a row at positions from `position`; a key is seen from
    `window` positions on (0: from any). K is at k_token * t + k_head * h, V at v_start + v_token * t + v_head * h;
    `v_scale` is the index of the first V scale of a block (0 where V is part of K).
    """

    heads: Word
    group: Word
    queries: Word
    position: Word
    window: Word
    k_dim: Word
    v_dim: Word
    k_token: Word
    k_head: Word
    v_token: Word
    v_head: Word
    v_start: Word
    v_scale: Word


_named: Any = types.NamedUniTuple
SHAPE = _named(types.int64, len(Shape._fields), Shape)
"""Numba's type of a Shape."""


class Part(NamedTuple):
    """A tile of a block's layer part: where token 0 of K and V lies, how wide elements are, where scales are (0: none).

    `k_ahead` and `v_ahead` are where the memory lies that is needed after this tile's K, and after its V (0: unknown).
    `raw` is whether e4m3 may stay 2^120 too small; `direct` whether the register tiles read the elements as they are.
    """

    k: Word
    v: Word
    k_ahead: Word
    v_ahead: Word
    scales: Word
    code: Word
    width: Word
    raw: Word
    direct: Word


@helper
def padded(dim: Word) -> Word:
    """The dim in whole vectors."""
    return (dim + LANES - 1) // LANES * LANES


@helper
def at(address: Word, offset: Word) -> Word:
    """The address `offset` bytes on."""
    return address + np.uint64(offset)


@helper
def scale_of(part: Word, index: Word) -> Word:
    """A scale of the block by its index; 1 where it has none."""
    if part.scales == 0:
        return np.float32(1.0)
    return get_fp32(at(part.scales, 4 * index))


@helper
def decoding_factor(part: Word, scale: Word) -> Word:
    """What decoded elements are multiplied by: in a raw block they are as small as those that are read directly."""
    if part.raw:
        return np.float32(_RAW)
    return scale


@helper
def _next(ahead: Word, part: Word, token: Word, count: Word, head: Word, dim: Word, strides: Word) -> Word:
    """Where as much as `count` tokens of a head take lies of what comes after this tile; 0 where that is unknown.

    If all heads share the tokens' memory without gaps, in its order; with layout hnd the same tokens and head.
    """
    token_stride, head_stride = strides
    if ahead == 0:
        return ahead
    begin = token * token_stride + (head * count * dim if head_stride == dim else head * head_stride)
    return at(ahead, begin * part.width)


@helper
def _readable(
    part: Word, place: Word, stride: Word, count: Word, dim: Word, scale: Word, spare: Word, clean: Word
) -> Word:
    """Rows that the register tiles take: address, stride and code of these as they are, or decoded to fp32.

    `clean`: it is known that e4m3 holds no NaN.
    """
    decode = not part.direct
    if part.raw and not decode and not clean:
        decode = any_nan(place, stride, count, dim)
    if decode:
        pad = 4 * padded(dim)
        decode_rows(part.code, part.width, place, stride, count, dim, decoding_factor(part, scale), spare, pad)
        return spare, pad, np.int64(FP32)
    return place, stride, np.int64(part.code)


@helper
def _asked(ahead: Word, part: Word, code: Word, place: Word, count: Word, dim: Word) -> Word:
    """What a register tile is to ask for; its own memory, which costs nothing, where there is nothing else.

    A tile of decoded rows would ask for as much as these take. For it, all is asked for here.
    """
    if ahead == 0:
        return place
    if code != part.code:
        ask_at_once(ahead, count * dim * part.width)
        return place
    return ahead


@helper
def _any_nan_of_tokens(place: Word, stride: Word, count: Word, shape: Word) -> Word:
    """Whether the K of any head of `count` tokens holds e4m3's NaN; heads have no gaps between them."""
    row_bytes = shape.heads * shape.k_dim
    if stride == row_bytes and row_bytes % _SCAN_BYTES == 0:
        return any_nan(place, _SCAN_BYTES, count * (row_bytes // _SCAN_BYTES), _SCAN_BYTES)
    return any_nan(place, stride, count, row_bytes)


@subroutine
def score_tokens(
    shape: Word, part: Word, first: Word, last: Word, row0: Word, rows: Word, q: Word, spare: Word, scores: Word
) -> Word:
    """Scores of tokens first..last for rows row0..row0 + rows of every head, into scores [head, row, TILE]."""
    k_pad = padded(shape.k_dim)
    all_rows = shape.queries * shape.group
    token = first
    while token < last:
        count = min(TOKENS, last - token)
        clean = False
        if part.raw and part.direct and shape.k_head == shape.k_dim:
            # All heads of the tokens at once: a look at each costs as much again for what it begins and ends with.
            clean = not _any_nan_of_tokens(at(part.k, token * shape.k_token), shape.k_token, count, shape)
        for head in range(shape.heads):
            scale = scale_of(part, head)
            factor = scale * np.float32(RAW_SCORE) if part.raw else np.float32(1.0)
            k = at(part.k, (token * shape.k_token + head * shape.k_head) * part.width)
            k, stride, code = _readable(part, k, shape.k_token * part.width, count, shape.k_dim, scale, spare, clean)
            strides = (shape.k_token, shape.k_head)
            ahead = _next(part.k_ahead, part, token, count, head, shape.k_dim, strides) if row0 == 0 else _NOWHERE
            ahead = _asked(ahead, part, code, k, count, shape.k_dim)
            for row in range(0, rows, ROWS):
                score_rows(
                    code,
                    min(ROWS, rows - row),
                    count,
                    k,
                    stride,
                    at(q, (head * all_rows + row0 + row) * k_pad * 4),
                    4 * k_pad,
                    k_pad // LANES,
                    factor,
                    at(scores, ((head * rows + row) * TILE + token - first) * 4),
                    4 * TILE,
                    ahead if row == 0 else k,
                )
        token += count


@subroutine
def weigh_scores(
    shape: Word,
    part: Word,
    count: Word,
    row0: Word,
    rows: Word,
    cap: Word,
    scores: Word,
    tops: Word,
    totals: Word,
    sums: Word,
) -> Word:
    """Turn scores into weights against the running maximum, and scale what is summed so far to a new one."""
    all_rows, v_pad = shape.queries * shape.group, padded(shape.v_dim)
    steps = (count + LANES - 1) // LANES
    for head in range(shape.heads):
        factor = scale_of(part, shape.v_scale + head) * np.float32(RAW_QUERY) if part.raw else np.float32(1.0)
        for row in range(rows):
            index = head * rows + row
            place = at(scores.ctypes.data, index * TILE * 4)
            if cap > 0:
                cap_scores(place, steps, cap)
            for i in range(count, steps * LANES):
                scores[index * TILE + i] = -np.inf
            state = head * all_rows + row0 + row
            top, old = largest(place, steps), tops[state]
            if top > old:
                tops[state] = top
                shrink = np.float32(2.0) ** (old - top) if old > -np.inf else np.float32(0.0)
                totals[state] *= shrink
                for i in range(v_pad):
                    sums[state, i] *= shrink
            top = tops[state]
            totals[state] += weigh(place, steps, top if top > -np.inf else np.float32(0.0), factor)


@subroutine
def add_weighted(
    shape: Word, part: Word, first: Word, last: Word, row0: Word, rows: Word, scores: Word, sums: Word, spare: Word
) -> Word:
    """Add the values of tokens first..last, weighted, to the sums [head, row, v_pad]."""
    all_rows, v_pad = shape.queries * shape.group, padded(shape.v_dim)
    clean = False
    for token in range(first, last, VALUES_AT_ONCE):
        count = min(VALUES_AT_ONCE, last - token)
        for head in range(shape.heads):
            v = at(part.v, (token * shape.v_token + head * shape.v_head) * part.width)
            scale = scale_of(part, shape.v_scale + head)
            v, stride, code = _readable(part, v, shape.v_token * part.width, count, shape.v_dim, scale, spare, clean)
            strides = (shape.v_token, shape.v_head)
            ahead = _next(part.v_ahead, part, token, count, head, shape.v_dim, strides) if row0 == 0 else _NOWHERE
            ahead = _asked(ahead, part, code, v, count, shape.v_dim)
            for row in range(0, rows, ROWS):
                add_values(
                    code,
                    min(ROWS, rows - row),
                    v,
                    stride,
                    v_pad // LANES,
                    at(scores, ((head * rows + row) * TILE + token - first) * 4),
                    4 * TILE,
                    count,
                    at(sums, (head * all_rows + row0 + row) * v_pad * 4),
                    4 * v_pad,
                    ahead if row == 0 else v,
                )


@helper
def usable_scale(scale: Word) -> Word:
    """Whether a scale leaves room for the factors of raw e4m3; 0 does, NaN and Inf do not."""
    size = abs(scale)
    return size == 0 or (size <= np.float32(SCALE_LIMIT) and size >= np.float32(1.0 / SCALE_LIMIT))


@subroutine
def may_stay_raw(code: Word, scales: Word, shape: Word) -> Word:
    """Whether all scales of an e4m3 block are usable."""
    if code != E4M3:
        return False
    if scales == 0:
        return True
    for head in range(shape.heads):
        if not usable_scale(get_fp32(at(scales, 4 * head))):
            return False
        if not usable_scale(get_fp32(at(scales, 4 * (shape.v_scale + head)))):
            return False
    return True
