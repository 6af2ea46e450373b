"""SipHash-1-3 of a block key and its namespace number, for buckets and tags.

Block keys look random, but a client may send any 32 bytes, and could look for many that share a bucket if it knew the
hash. SipHash is a pseudorandom function of a secret 128-bit key: without it, equal buckets cannot be found faster than
by chance, whatever was observed before. A multiply-and-shift hash would be a little cheaper but has no such promise
against somebody who adapts to the times he measures; here the rounds of several keys run in vector lanes.
Source: J.-P. Aumasson and D. J. Bernstein, "SipHash: a fast short-input PRF", 2012; one and three rounds as in
CPython's and Rust's own hash tables. The message is the 34 bytes key ‖ namespace as u16 LE.
"""

from __future__ import annotations

import numpy as np

from kvtierd.index.jit import Word, helper

U64 = np.uint64
_C0, _C1 = U64(0x736F6D6570736575), U64(0x646F72616E646F6D)
_C2, _C3 = U64(0x6C7967656E657261), U64(0x7465646279746573)
_LENGTH = U64(34 << 56)
_FINAL = U64(0xFF)
_R13, _R16, _R17, _R21, _R32 = U64(13), U64(16), U64(17), U64(21), U64(32)
_R51, _R48, _R47, _R43 = U64(51), U64(48), U64(47), U64(43)


@helper
def _round(v0: Word, v1: Word, v2: Word, v3: Word) -> tuple[Word, Word, Word, Word]:
    v0 += v1
    v1 = ((v1 << _R13) | (v1 >> _R51)) ^ v0
    v0 = (v0 << _R32) | (v0 >> _R32)
    v2 += v3
    v3 = ((v3 << _R16) | (v3 >> _R48)) ^ v2
    v0 += v3
    v3 = ((v3 << _R21) | (v3 >> _R43)) ^ v0
    v2 += v1
    v1 = ((v1 << _R17) | (v1 >> _R47)) ^ v2
    v2 = (v2 << _R32) | (v2 >> _R32)
    return v0, v1, v2, v3


@helper
def siphash(k0: Word, k1: Word, m0: Word, m1: Word, m2: Word, m3: Word, namespace: Word) -> Word:
    """Hash four little-endian words of a key and the namespace number (uint64, below 2**16)."""
    last = _LENGTH | namespace
    v0, v1, v2, v3 = _round(k0 ^ _C0, k1 ^ _C1, k0 ^ _C2, k1 ^ _C3 ^ m0)
    v0, v1, v2, v3 = _round(v0 ^ m0, v1, v2, v3 ^ m1)
    v0, v1, v2, v3 = _round(v0 ^ m1, v1, v2, v3 ^ m2)
    v0, v1, v2, v3 = _round(v0 ^ m2, v1, v2, v3 ^ m3)
    v0, v1, v2, v3 = _round(v0 ^ m3, v1, v2, v3 ^ last)
    v0, v2 = v0 ^ last, v2 ^ _FINAL
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3
