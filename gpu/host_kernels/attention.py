"""Exact attention over blocks wherever they lie in host memory (DESIGN §10), on all CPUs Numba may use.

A call is given *parts*: for each block of a sequence the address of one layer's part, the dtype, how many tokens of it
count and the position of the first. Parts are cut into chunks; a chunk's result is its own maximum, sum of weights and
weighted sum of values, so that the result does not depend on the number of threads, nor on which of them did what.
Chunks merge by log-sum-exp. Scores are in units of log2 inside.

What is seen: a query at position p sees the keys at positions p - window + 1 .. p that are given. Keys that it does not
see are never read for it. No key seen, or all scores -Inf: the result is 0 and the log-sum-exp -Inf. A NaN in a key or
a value that is seen makes NaN of what it is part of, as the formula does; so does a score of +Inf. Denormals count.

The plan (one maximum and sum a chunk, merged later) is that of Flash-Decoding (Dao et al., 2023), over the online
softmax of Milakov and Gimelshein (2018).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import prange, types

from kvtierd.gpu.host_kernels.attention_counter import take
from kvtierd.gpu.host_kernels.attention_run import (
    RAW_SUMS,
    SHAPE,
    TILE,
    Part,
    add_weighted,
    at,
    may_stay_raw,
    score_tokens,
    weigh_scores,
)
from kvtierd.gpu.host_kernels.attention_vectors import CODED, E4M3, FP32, LANES
from kvtierd.index.jit import Word, cache_state, helper, subroutine

GROUP_ROWS = 16
"""Query rows of a KV head whose scores are held at once; more go over the tile again, which the cache still has."""

_F1, _F2, _F3 = types.float32[::1], types.float32[:, ::1], types.float32[:, :, ::1]
_I4, _I8, _U1, _U8 = types.int32[::1], types.int64[::1], types.uint8[::1], types.uint64[::1]
_tuple: Any = types.Tuple
_PARTS = _tuple((_U8, _U8, _U1, _I8, _I4))


def _parallel(signature: Any) -> Callable[[Any], Any]:
    """Compile for this signature now, or load from the cache: `prange` runs on Numba's threads, without the GIL."""
    cached = cache_state().directory is not None
    decorate: Callable[[Any], Any] = numba.njit(
        [signature], parallel=True, nogil=True, cache=cached, error_model="numpy"
    )
    return decorate


@helper
def _seen(shape: Word, query: Word, first: Word, count: Word) -> Word:
    """Which of `count` tokens from position `first` on a query sees: from where, to where."""
    position = shape.position + query
    begin = position - shape.window + 1 - first if shape.window > 0 else 0
    return min(max(begin, 0), count), min(max(position + 1 - first, 0), count)


@subroutine
def _run_tile(
    shape: Word,
    part: Word,
    first: Word,
    count: Word,
    cap: Word,
    q: Word,
    scores: Word,
    spare: Word,
    tops: Word,
    totals: Word,
    sums: Word,
) -> Word:
    """A tile of at most TILE tokens: queries in a row that see the same of it go together."""
    query = 0
    while query < shape.queries:
        begin, end = _seen(shape, query, first, count)
        after = query + 1
        while after < shape.queries and _seen(shape, after, first, count) == (begin, end):
            after += 1
        if end > begin:
            for row in range(query * shape.group, after * shape.group, GROUP_ROWS):
                rows = min(GROUP_ROWS, after * shape.group - row)
                score_tokens(shape, part, begin, end, row, rows, q, spare, scores.ctypes.data)
                weigh_scores(shape, part, end - begin, row, rows, cap, scores, tops, totals, sums)
                add_weighted(shape, part, begin, end, row, rows, scores.ctypes.data, sums.ctypes.data, spare)
        query = after


@helper
def _width(code: Word) -> Word:
    return 4 if code == FP32 else 1 if code == E4M3 else 2


@helper
def _scale_sums(sums: Word, factor: Word) -> Word:
    for row in range(sums.shape[0]):
        for i in range(sums.shape[1]):
            sums[row, i] *= np.float32(factor)


@helper
def _tile_places(shape: Word, address: Word, token: Word, width: Word) -> Word:
    """Where the token's K and V of head 0 lie."""
    return at(address, token * shape.k_token * width), at(address, (shape.v_start + token * shape.v_token) * width)


@subroutine
def _run_chunk(
    shape: Word,
    cap: Word,
    q: Word,
    raw_query: Word,
    parts: Word,
    begin: Word,
    end: Word,
    scores: Word,
    spare: Word,
    tops: Word,
    totals: Word,
    sums: Word,
) -> Word:
    """Attention over parts begin..end. Sums are 2^56 too small while e4m3 adds to them."""
    addresses, scales, codes, firsts, tokens = parts
    tops[:], totals[:], sums[:] = -np.inf, 0.0, 0.0
    small = False
    whole = shape.k_dim % LANES == 0 and shape.v_dim % LANES == 0
    for i in range(begin, end):
        coded = codes[i] == CODED
        code = np.int64(E4M3 if coded else codes[i])
        width = _width(code)
        raw = raw_query and may_stay_raw(code, scales[i], shape)
        if raw != small:
            _scale_sums(sums, RAW_SUMS if raw else 1.0 / RAW_SUMS)
            small = raw
        queries = q[min(q.shape[0] - 2, 2 * coded) + raw].ctypes.data
        for token in range(0, tokens[i], TILE):
            k, v = _tile_places(shape, addresses[i], token, width)
            # While K is scored its values come in, and while these are summed the next tile's K does.
            if token + TILE < tokens[i]:
                after, _ = _tile_places(shape, addresses[i], token + TILE, width)
            else:
                after = addresses[i + 1] if i + 1 < end else np.uint64(0)
            k_ahead, v_ahead = (after, np.uint64(0)) if shape.v_start == 0 else (v, after)
            part = Part(k, v, k_ahead, v_ahead, scales[i], code, width, raw, whole and (raw or code != E4M3))
            count = min(TILE, tokens[i] - token)
            _run_tile(shape, part, firsts[i] + token, count, cap, queries, scores, spare, tops, totals, sums)
    if small:
        _scale_sums(sums, 1.0 / RAW_SUMS)


@_parallel(types.void(SHAPE, types.float32, _F2, types.boolean, _PARTS, _I8, _F2, _F2, _F3, _F2, _F2, _I8, _U1, _U1))
def attend_chunks(
    shape: Word,
    cap: Word,
    q: Word,
    raw_query: Word,
    parts: Word,
    bounds: Word,
    tops: Word,
    totals: Word,
    sums: Word,
    scores: Word,
    spare: Word,
    counter: Word,
    done: Word,
    cancel: Word,
) -> Word:
    """Attention of each chunk of parts by itself.

    shape: `Shape`. cap: 0, or the soft cap times log2(e). q: float32 [forms, heads * queries * group * padded k_dim],
    scaled by softmax scale and log2(e) (over the cap where there is one): as they are, times RAW_QUERY (used if
    raw_query), and where the codec rotates keys the same two rotated. parts: (addresses uint64, addresses of float32
    scales uint64 or 0, codes uint8, positions of the first token int64, tokens int32), each [n]. Chunk c is parts
    bounds[c]..bounds[c + 1]; int64 [chunks + 1].
    Filled in: tops and totals [chunks, heads * rows], sums [chunks, heads * rows, padded v_dim], done uint8 [chunks].
    Scratch, one row a thread: scores [threads, heads * GROUP_ROWS * TILE], spare [threads, SPARE_ROWS * padded dim].
    counter: int64 [1], 0 at first. cancel: uint8 [1]; once it is not 0 no further chunk is begun.
    """
    chunks = bounds.size - 1
    for thread in prange(scores.shape[0]):
        while cancel[0] == 0:
            chunk = take(counter.ctypes.data)
            if chunk >= chunks:
                break
            _run_chunk(
                shape,
                cap,
                q,
                raw_query,
                parts,
                bounds[chunk],
                bounds[chunk + 1],
                scores[thread],
                spare[thread].ctypes.data,
                tops[chunk],
                totals[chunk],
                sums[chunk],
            )
            done[chunk] = 1


@_parallel(types.void(_F2, _F2, _F3, _F1, _F1, _F2))
def merge_chunks(tops: Word, totals: Word, sums: Word, top: Word, total: Word, summed: Word) -> Word:
    """Merge chunks into a carried maximum and total [rows] and sums [rows, padded v_dim].

    One after the other, so that the result does not depend on how many come at once.
    """
    for row in prange(top.size):
        for chunk in range(tops.shape[0]):
            highest = max(top[row], tops[chunk, row])
            ours = np.float32(1.0) if highest == top[row] else np.float32(2.0) ** (top[row] - highest)
            theirs = np.float32(1.0) if highest == tops[chunk, row] else np.float32(2.0) ** (tops[chunk, row] - highest)
            top[row] = highest
            total[row] = total[row] * ours + totals[chunk, row] * theirs
            for i in range(summed.shape[1]):
                summed[row, i] = summed[row, i] * ours + sums[chunk, row, i] * theirs
