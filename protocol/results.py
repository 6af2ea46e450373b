"""What the clients return: plain data, the same from the sync and the async client."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace

Masks = npt.NDArray[np.uint8]
"""One byte a block: a residency mask (TIER_GPU | TIER_HOST | TIER_NVME)."""

NO_MASKS: Masks = np.empty(0, np.uint8)
NO_MASKS.flags.writeable = False


class NamespaceHandle:
    """A registered namespace. It stays valid over reconnects and with every client: each registers it by itself."""

    __slots__ = ("allow_loss", "digest", "geometry", "identity", "namespace")

    def __init__(self, namespace: Namespace, *, allow_loss: bool) -> None:
        self.namespace = namespace
        self.geometry: Geometry = namespace.geometry
        self.digest = namespace.digest()
        self.allow_loss = allow_loss
        self.identity = (self.digest, allow_loss)
        """What a client keeps its number under, session by session."""

    def __repr__(self) -> str:
        return f"NamespaceHandle({self.namespace.model!r}, digest={self.digest[:4].hex()}…)"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The stored prefix: its length in blocks, and where each of its blocks lies ([count] uint8 masks).

    For a client that said how fast it computes, `load` is how many of them are worth fetching and `load_ns` what that
    should take; computing the rest again is faster. `load` is None where it did not say.
    """

    count: int
    tiers: Masks
    load: int | None = None
    load_ns: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """How many blocks are stored now, were stored before, and were dropped (no room, or no daemon)."""

    stored: int
    existed: int
    dropped: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """The fetched prefix: `blocks` is [count, block_bytes] uint8, `sources` [count] uint8 masks."""

    count: int
    blocks: Bytes
    sources: Masks


NO_HIT = Hit(0, NO_MASKS)
