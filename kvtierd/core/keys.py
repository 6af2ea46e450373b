"""Block keys: 32 bytes that stand for a whole prefix (protocol/SPEC.md §3).

`key_i = BLAKE3(namespace_digest ‖ key_{i-1} ‖ length of extra as u32 LE ‖ extra ‖ tokens of block i as u32 LE)`,
with 32 zero bytes for the key before the first. The chain makes a key depend on every token before it, as in
Merkle's hash chains; BLAKE3 is a cryptographic hash, so that nobody can make a block that answers to another
prompt's key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import blake3
import numpy as np
import numpy.typing as npt

from kvtierd.core.namespace import DIGEST_BYTES

KEY_BYTES = 32
ROOT_KEY = bytes(KEY_BYTES)

Keys = npt.NDArray[np.uint8]
"""Block keys of shape [n, 32], uint8, contiguous."""


def block_keys(
    namespace_digest: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    block_size: int,
    *,
    extras: Mapping[int, bytes] | None = None,
    parent: bytes = ROOT_KEY,
) -> Keys:
    """Hash the whole blocks of a token sequence; a tail shorter than a block has no key.

    `extras[i]` is whatever else shapes the KV of block i (image hashes, prompt embeddings, a request's salt).
    `parent` continues a chain. Returns [n, 32] uint8. Raises ValueError for a token outside 0..2³²-1, a digest
    or parent of the wrong length, or an extra for a block that is not there.
    """
    _check_length("namespace_digest", namespace_digest, DIGEST_BYTES)
    _check_length("parent", parent, KEY_BYTES)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    ids = _token_ids(tokens)
    count = len(ids) // block_size
    extras = extras or {}
    if stray := [i for i in extras if not 0 <= i < count]:
        raise ValueError(f"extras names block {stray[0]}, but there are {count} whole blocks")
    keys = np.empty((count, KEY_BYTES), np.uint8)
    data = memoryview(ids.view(np.uint8).data)
    step = block_size * 4
    for i in range(count):
        extra = extras.get(i, b"")
        head = b"".join((namespace_digest, parent, len(extra).to_bytes(4, "little"), extra))
        parent = blake3.blake3(head).update(data[i * step : (i + 1) * step]).digest()
        keys[i] = np.frombuffer(parent, np.uint8)
    return keys


def foreign_key(namespace_digest: bytes, engine_hash: bytes) -> bytes:
    """Turn an engine's own block hash into a key; it never enters raw, so namespaces cannot collide."""
    _check_length("namespace_digest", namespace_digest, DIGEST_BYTES)
    return blake3.blake3(namespace_digest + engine_hash).digest()


def as_keys(data: bytes | memoryview | Keys) -> Keys:
    """View raw bytes as [n, 32] keys without a copy; ValueError when the length is no multiple of 32."""
    if isinstance(data, np.ndarray) and data.dtype != np.uint8:
        raise ValueError(f"keys are {data.dtype}; uint8 is wanted")
    flat = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1)
    if flat.size % KEY_BYTES:
        raise ValueError(f"keys have {flat.size} bytes; a key has {KEY_BYTES}")
    return flat.reshape(-1, KEY_BYTES)


def _token_ids(tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    try:
        ids = np.asarray(tokens)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"tokens are no flat sequence: {error}") from error
    if ids.ndim != 1:
        raise ValueError(f"tokens have shape {ids.shape}; a flat sequence is wanted")
    if ids.size == 0:
        return np.empty(0, np.uint32)
    if not np.issubdtype(ids.dtype, np.integer):
        _check_wide(tokens)
        raise ValueError(f"tokens are {ids.dtype}; integers are wanted")
    if ids.min() < 0 or ids.max() > 0xFFFFFFFF:
        bad = ids[(ids < 0) | (ids > 0xFFFFFFFF)][0]
        raise ValueError(f"token id {bad} is outside 0..2**32-1")
    return np.ascontiguousarray(ids, dtype="<u4")


def _check_wide(tokens: Sequence[int] | npt.NDArray[np.integer]) -> None:
    # NumPy makes floats or objects of Python integers that no 64-bit type holds: name the one that is too large.
    for token in tokens:
        if isinstance(token, int) and not 0 <= token <= 0xFFFFFFFF:
            raise ValueError(f"token id {token} is outside 0..2**32-1")


def _check_length(name: str, value: bytes, size: int) -> None:
    if len(value) != size:
        raise ValueError(f"{name} has {len(value)} bytes; {size} are wanted")
