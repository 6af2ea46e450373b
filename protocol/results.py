"""What the clients return: plain data, the same from the sync and the async client."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace

Masks = npt.NDArray[np.uint8]
"""One byte a block: a residency mask (TIER_GPU | TIER_HOST | TIER_NVME)."""

Codecs = npt.NDArray[np.uint8]
"""One byte a block, a Codec; none at all where every block is exact."""

NO_MASKS: Masks = np.empty(0, np.uint8)
NO_MASKS.flags.writeable = False


class NamespaceHandle:
    """A registered namespace. It stays valid over reconnects and with every client: each registers it by itself."""

    __slots__ = ("allow_loss", "digest", "geometry", "identity", "namespace", "ttl_s")

    def __init__(self, namespace: Namespace, *, allow_loss: bool, ttl_s: int = 0) -> None:
        self.namespace = namespace
        self.geometry: Geometry = namespace.geometry
        self.digest = namespace.digest()
        self.allow_loss = allow_loss
        self.ttl_s = ttl_s
        self.identity = (self.digest, allow_loss, ttl_s)
        """What a client keeps its number under, session by session."""

    def __repr__(self) -> str:
        return f"NamespaceHandle({self.namespace.model!r}, digest={self.digest[:4].hex()}…)"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The stored prefix: its length in blocks, and where each of its blocks lies ([count] uint8 masks).

    `codecs` ([count] uint8, kvtierd.core.stored_form.Codec) says what a read of each would get: 0 the exact block, 2
    one that has been through FP8, which happens only in namespaces registered with `allow_loss`. Empty: all exact.

    For a client that said how fast it computes, `load` is how many of them are worth fetching and `load_ns` what that
    should take; computing the rest again is faster. `load` is None where it did not say.
    """

    count: int
    tiers: Masks
    load: int | None = None
    load_ns: int = 0
    codecs: Codecs = dataclasses.field(default_factory=lambda: NO_MASKS)


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """How many blocks are stored now, were stored before, and were dropped (no room, or no daemon)."""

    stored: int
    existed: int
    dropped: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """The fetched prefix: `blocks` is [count, block_bytes] uint8, `sources` [count] uint8 masks, `codecs` as in Hit."""

    count: int
    blocks: Bytes
    sources: Masks
    codecs: Codecs = dataclasses.field(default_factory=lambda: NO_MASKS)


def join_codecs(parts: Sequence[tuple[int, Codecs]]) -> Codecs:
    """Codecs of following pieces, each with how many blocks it has."""
    if not any(codecs.size for _, codecs in parts):
        return NO_MASKS
    return np.concatenate([codecs if codecs.size else np.zeros(count, np.uint8) for count, codecs in parts])


NO_HIT = Hit(0, NO_MASKS)
