"""Objects of other caches as blocks: bytes without a meaning for us, of one size a namespace."""

from __future__ import annotations

import math

from kvtierd.core.geometry import MAX_BLOCK_BYTES, Geometry

_K_DIM_MAX = 65536
_TOKENS_MAX = 65536
_HEADS_MAX = 4096


def opaque_geometry(nbytes: int, layout: str) -> Geometry:
    """A geometry whose blocks have `nbytes` bytes, in one part with one checksum. `layout` is `opaque:NAME`.

    Raises ValueError for a size that no geometry has: none, over the limit, or with a large prime factor. Sizes of KV
    are products of small numbers.
    """
    if not 0 < nbytes <= MAX_BLOCK_BYTES:
        raise ValueError(f"an object of {nbytes} bytes cannot be stored: 1 to {MAX_BLOCK_BYTES} are possible")
    k_dim = _largest_divisor(nbytes, _K_DIM_MAX)
    tokens = _largest_divisor(nbytes // k_dim, _TOKENS_MAX)
    heads = nbytes // k_dim // tokens
    if heads > _HEADS_MAX:
        raise ValueError(f"an object of {nbytes} bytes cannot be stored: no dimensions within their limits give that")
    return Geometry(block_size=tokens, layers=1, kv_heads=heads, k_dim=k_dim, v_dim=0, dtype="uint8", layout=layout)


def _largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return max(d for low in small for d in (low, value // low) if d <= limit)
