"""KV made from its place: a counter-based generator, so that nothing has to be kept to know what is right.

An element is a function of (seed, stream, layer, K or V, token, head, dim) alone. The place of its row (token, head)
goes through splitmix64's finaliser (Steele, Lea, Flood 2014), and each dim of it through a 32-bit mixer of two
multiplications; four bytes of that are added, which is an Irwin-Hall sum and close to normal. Channels have a scale
and a bias as real keys have: most are near 1 and 0, a few of K have a bias of many times the spread and always the
same sign, so that FP8 and softmax meet what they meet in a model. Values are finite bf16, cut off from float32.

One file: the cache of compiled code notices changes only of a function's own file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvtierd.index.jit import Word, compiled, helper

MEAN, SPREAD = 510, np.float32(1 / 147.8)
"""Of the sum of four bytes: its mean, and one over its standard deviation."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@helper
def _mix64(x: Word) -> Word:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@helper
def _element(low: Word, high: Word, dim: Word, scale: Word, bias: Word) -> Word:
    """The bf16 bits of one element of a row, as uint16."""
    h = np.uint32(low + np.uint32(np.uint32(dim) * np.uint32(0x9E3779B9)))
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) + high)
    h = np.uint32(h * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    byte = np.uint32(255)
    total = (h & byte) + ((h >> np.uint32(8)) & byte) + ((h >> np.uint32(16)) & byte) + (h >> np.uint32(24))
    value = np.float32(np.float32(np.int32(total) - np.int32(510)) * SPREAD)
    value = np.float32(np.float32(value * scale) + bias)
    return np.uint16(np.float32(value).view(np.uint32) >> np.uint32(16))


@helper
def _row(part: Word, token: Word, head: Word) -> Word:
    return _mix64(part + (np.uint64(token) * np.uint64(65536) + np.uint64(head)) * _GOLDEN)


@compiled("void(uint16[:,:,::1], uint64, int64, float32[:,::1], float32[:,::1])")
def fill(out: Any, part: int, first: int, scale: Any, bias: Any) -> None:
    """Write out [tokens, heads, dim] bf16 bits of a part (`part_key`), from token `first` on.

    scale and bias are float32 [heads, dim].
    """
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            row = _row(part, first + token, head)
            low, high = np.uint32(row), np.uint32(row >> np.uint64(32))
            for dim in range(out.shape[2]):
                out[token, head, dim] = _element(low, high, dim, scale[head, dim], bias[head, dim])


@compiled(
    types.int64(
        types.Array(types.uint16, 3, "C", readonly=True),  # leased slots are not writable
        types.uint64,
        types.int64,
        types.float32[:, ::1],
        types.float32[:, ::1],
    )
)
def count_wrong(got: Any, part: int, first: int, scale: Any, bias: Any) -> int:
    """How many elements of got [tokens, heads, dim] are not what `fill` would write; without writing anything."""
    wrong = np.int64(0)
    for token in range(got.shape[0]):
        for head in range(got.shape[1]):
            row = _row(part, first + token, head)
            low, high = np.uint32(row), np.uint32(row >> np.uint64(32))
            found = np.uint32(0)
            for dim in range(got.shape[2]):
                wanted = _element(low, high, dim, scale[head, dim], bias[head, dim])
                found += np.uint32(got[token, head, dim] != wanted)
            wrong += np.int64(found)
    return int(wrong)


@compiled("void(uint16[:,:,::1], int64)")
def turn(part: Any, n: int) -> None:
    """Rotate [tokens, heads, dim] bf16 bits in place by Hadamard's matrix over `n` channels at a distance of dim / n.

    As kvtierd.core.stored_form says, written anew like `quantise`; the same again turns back.
    """
    dims = part.shape[2]
    row = np.empty(dims, np.float32)
    factor = np.float32(1.0 / np.sqrt(np.float64(n)))
    for token in range(part.shape[0]):
        for head in range(part.shape[1]):
            for dim in range(dims):
                row[dim] = np.uint32(np.uint32(part[token, head, dim]) << np.uint32(16)).view(np.float32) * factor
            apart = dims // 2
            while apart >= dims // n and n > 1:
                for dim in range(dims):
                    if dim // apart % 2 == 0:
                        low, high = row[dim], row[dim + apart]
                        row[dim], row[dim + apart] = np.float32(low + high), np.float32(low - high)
                apart //= 2
            for dim in range(dims):
                bits = np.float32(row[dim]).view(np.uint32)
                odd = (bits >> np.uint32(16)) & np.uint32(1)
                part[token, head, dim] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled("void(uint16[:,:,::1])")
def quantise(part: Any) -> None:
    """What FP8 makes of [tokens, heads, dim] bf16 bits, in place: encoded as e4m3 with the scale of each head and
    decoded, as kvtierd.core.stored_form says; written anew here, so that it checks the codec and is not checked by it.
    """
    for head in range(part.shape[1]):
        top = np.uint16(0)
        for token in range(part.shape[0]):
            for dim in range(part.shape[2]):
                top = max(top, np.uint16(part[token, head, dim] & np.uint16(0x7FFF)))
        largest = np.uint32(np.uint32(top) << np.uint32(16)).view(np.float32)
        scale = np.float32(1.0)
        if largest > 0:
            while largest > np.float32(448.0) * scale:
                scale = np.float32(scale * np.float32(2.0))
            while largest <= np.float32(224.0) * scale and scale > np.float32(2.0**-100):
                scale = np.float32(scale * np.float32(0.5))
        least = np.float32(scale * np.float32(2.0**-6))
        step = np.float32(scale * np.float32(2.0**-9))
        for token in range(part.shape[0]):
            for dim in range(part.shape[2]):
                bits = np.uint32(np.uint32(part[token, head, dim]) << np.uint32(16))
                value = bits.view(np.float32)
                if abs(value) >= least:
                    # Normal codes keep three bits of mantissa, to nearest even.
                    odd = (bits >> np.uint32(20)) & np.uint32(1)
                    bits = np.uint32((bits + np.uint32(0x7FFFF) + odd) & np.uint32(0xFFF00000))
                else:
                    bits = np.float32(np.float32(np.rint(np.float32(value / step))) * step).view(np.uint32)
                part[token, head, dim] = np.uint16(bits >> np.uint32(16))


@helper
def _wide(word: Word) -> Word:
    return np.float64(np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32))


@helper
def _score(q: Word, keys: Word, scores: Word) -> None:
    # By dim and then by token: sums of one token at a time would be kept in order, and could not go by vectors.
    for token in range(scores.size):
        scores[token] = 0.0
    for dim in range(q.size):
        factor = q[dim]
        for token in range(scores.size):
            scores[token] += factor * keys[dim, token]


@helper
def _weigh(scores: Word, seen: Word, largest: Word, shrink: Word, held: Word, values: Word) -> Word:
    """Weigh values of the tokens seen; returns the sum of their weights."""
    for dim in range(values.size):
        values[dim] *= shrink
    added = 0.0
    for token in range(seen):
        weight = np.exp(scores[token] - largest)
        added += weight
        for dim in range(values.size):
            values[dim] += weight * held[token, dim]
    return added


@compiled(
    "void(float64[:,:,::1], uint16[:,:,::1], uint16[:,:,::1], int64[::1], float64[:,::1], float64[:,::1],"
    " float64[:,:,::1], float64[:,::1], float64[:,::1], float64[::1])"
)
def attend(
    q: Any, k: Any, v: Any, seen: Any, top: Any, total: Any, values: Any, keys: Any, held: Any, scores: Any
) -> None:
    """Add one block to attention in float64.

    q [kv heads, rows, k_dim] is scaled already; k and v are bf16 bits [tokens, kv heads, dim]; row r sees the first
    seen[r] tokens. Carried: maxima top and sums total [kv heads, rows], weighted values [kv heads, rows, v_dim].
    Scratch: keys [k_dim, tokens], held [tokens, v_dim], scores [tokens].
    """
    for head in range(q.shape[0]):
        for token in range(k.shape[0]):
            for dim in range(q.shape[2]):
                keys[dim, token] = _wide(k[token, head, dim])
            for dim in range(held.shape[1]):
                held[token, dim] = _wide(v[token, head, dim])
        for row in range(q.shape[1]):
            if seen[row] > 0:
                _score(q[head, row], keys, scores)
                largest = top[head, row]
                for token in range(seen[row]):
                    largest = max(largest, scores[token])
                shrink = np.exp(top[head, row] - largest)
                top[head, row] = largest
                added = _weigh(scores, seen[row], largest, shrink, held, values[head, row])
                total[head, row] = total[head, row] * shrink + added


def mix(*words: int) -> int:
    """One 64-bit hash of several words, each below 2^64: keys of parts, choices of a run."""
    state = 0
    for word in words:
        state = _mix_python((state + word + int(_GOLDEN)) & _MASK)
    return state


_MASK = (1 << 64) - 1


def _mix_python(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def part_key(seed: int, stream: int, layer: int, kv: int) -> int:
    """What `fill` hashes rows with: of K (kv 0) or V (1) of a layer of a stream of tokens."""
    return mix(seed, stream, layer, kv)
