"""Block keys of one vLLM request, from its token ids and from whatever else shapes its KV; grown as tokens come.

vLLM's own block hashes are not used: depending on its settings they hash a pickle or are seeded at random for each
process, and they contain neither weights nor layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvtierd.core.keys import KEY_BYTES, Keys, block_keys


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """An image, a video or the like: vLLM's hash of it, and the tokens `begin`..`end`-1 that stand for it."""

    identifier: str
    begin: int
    end: int


def features_of(request: Any) -> tuple[Feature, ...]:
    """The multimodal inputs of a vLLM request, in order."""
    features = []
    for item in request.mm_features or ():
        begin = int(item.mm_position.offset)
        features.append(Feature(str(item.identifier), begin, begin + int(item.mm_position.length)))
    return tuple(features)


class RequestKeys:
    """Keys of a request's whole blocks, one array for each of several namespaces (ranks)."""

    def __init__(
        self,
        digests: Sequence[bytes],
        block_size: int,
        *,
        salt: str | None = None,
        features: Iterable[Feature] = (),
    ) -> None:
        self._digests = tuple(digests)
        self._block_size = block_size
        self._salt = salt
        self._features = tuple(features)
        self._keys: list[list[Keys]] = [[] for _ in digests]
        self.count = 0
        """Blocks that have keys."""

    def grow(self, tokens: Sequence[int], blocks: int) -> None:
        """Have keys of the first `blocks` blocks. `tokens` are the request's, from the first."""
        if blocks <= self.count:
            return
        begin = self.count * self._block_size
        new = np.asarray(tokens[begin : blocks * self._block_size])
        extras = self._extras(self.count, blocks)
        parents = self.parents(self.count)
        for pieces, digest, parent in zip(self._keys, self._digests, parents, strict=True):
            before = {"parent": parent} if parent else {}
            pieces.append(block_keys(digest, new, self._block_size, extras=extras, **before))
        self.count += len(self._keys[0][-1])

    def keys(self, begin: int, end: int) -> tuple[Keys, ...]:
        """Keys of blocks begin..end-1, an array for each namespace."""
        for pieces in self._keys:
            if len(pieces) != 1:
                pieces[:] = [np.concatenate(pieces) if pieces else np.empty((0, KEY_BYTES), np.uint8)]
        return tuple(pieces[0][begin:end] for pieces in self._keys)

    def parents(self, block: int) -> tuple[bytes, ...]:
        """The key before a block in each namespace; empty before the first."""
        if not block:
            return (b"",) * len(self._digests)
        return tuple(keys.tobytes() for keys in self.keys(block - 1, block))

    def _extras(self, begin: int, end: int) -> dict[int, bytes]:
        """What beside tokens shapes blocks begin..end-1, by their position behind `begin`."""
        extras = {}
        for block in range(begin, end) if self._features or not begin else ():
            if extra := self._extra(block):
                extras[block - begin] = extra
        return extras

    def _extra(self, block: int) -> bytes:
        """Each part behind its kind and length: the salt in the first block, and inputs that lie in this block with
        their position, since the tokens that stand for them do not tell where one ends and the next begins."""
        start = block * self._block_size
        parts = []
        if self._salt and not block:
            parts.append(b"s" + _sized(self._salt.encode()))
        for feature in self._features:
            if feature.begin < start + self._block_size and feature.end > start:
                offset = (feature.begin - start).to_bytes(8, "little", signed=True)
                parts.append(b"m" + _sized(feature.identifier.encode()) + offset)
        return b"".join(parts)


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data
