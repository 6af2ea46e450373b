"""The naive baseline: KV of a request in one contiguous allocation, copied whole whenever it moves or grows; no blocks.

Two ways that everybody writes first: an allocation for the longest length that a request may have, and one that grows
by reallocation, a step at a time. Memory is charged as a device charges it: what is allocated is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtierd.core.geometry import Geometry

Array = np.ndarray[Any, Any]
GROWTH_TOKENS = 64
"""A growing allocation is that much longer after each reallocation."""


def token_bytes(shape: Geometry) -> int:
    """K and V of one token over all layers."""
    return shape.block_bytes // shape.block_size


class ContiguousKv:
    """KV of one request: `memory` is [layers, capacity, bytes of K and V of a token and layer] uint8.

    `growth` 0 is static: room for `longest` tokens at once, and ValueError beyond. Otherwise the room begins with one
    step of `growth` tokens, and is copied whole into a new allocation each time that it is full.
    """

    def __init__(self, shape: Geometry, longest: int, growth: int = 0) -> None:
        self._shape, self._longest, self._growth = shape, longest, growth
        self.tokens = 0
        self.copied_bytes = 0
        """By reallocations."""
        self.memory = self._allocated(growth or longest)

    def _allocated(self, tokens: int) -> Array:
        return np.empty((self._shape.layers, tokens, self._shape.layer_bytes // self._shape.block_size), np.uint8)

    @property
    def taken_bytes(self) -> int:
        """What the allocation takes, used or not."""
        return int(self.memory.nbytes)

    def append(self, kv: Array) -> None:
        """Add tokens, [layers, n, bytes] uint8. Raises ValueError where they are more than the longest request."""
        count = kv.shape[1]
        if self.tokens + count > self._longest:
            raise ValueError(f"{self.tokens + count} tokens; room is for {self._longest}")
        if self.tokens + count > self.memory.shape[1]:
            self._grow(self.tokens + count)
        self.memory[:, self.tokens : self.tokens + count] = kv
        self.tokens += count

    def _grow(self, tokens: int) -> None:
        wider = self._allocated(-(-tokens // self._growth) * self._growth)
        wider[:, : self.tokens] = self.memory[:, : self.tokens]
        self.copied_bytes += self.tokens * token_bytes(self._shape)
        self.memory = wider

    def saved(self) -> Array:
        """A copy of the whole context, as it is saved: [layers, tokens, bytes]."""
        return self.memory[:, : self.tokens].copy()

    def load(self, saved: Array) -> None:
        """Take over a whole context that was saved."""
        self.tokens = 0
        self.append(saved)


def use_of(requests: list[ContiguousKv], shape: Geometry) -> float:
    """Share of the memory taken that holds KV of tokens."""
    held = sum(request.tokens for request in requests) * token_bytes(shape)
    return held / sum(request.taken_bytes for request in requests)
