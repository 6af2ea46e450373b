"""What a `FakeService` keeps of blocks and of what clients hold."""

from __future__ import annotations

import dataclasses

from kvtierd.core.checksum import Sums
from kvtierd.core.geometry import Geometry
from kvtierd.protocol.service import Session


@dataclasses.dataclass(slots=True)
class FakeNamespace:
    """A namespace that a session has registered."""

    digest: bytes
    geometry: Geometry


@dataclasses.dataclass(slots=True)
class FakeBlock:
    """A stored block; `dead` ones go with the last lease that holds them."""

    slot: int
    sums: Sums
    holds: int = 0
    dead: bool = False


@dataclasses.dataclass(slots=True)
class FakeReservation:
    """Slots lent for writing: key and slot by position in the request."""

    session: Session
    space: FakeNamespace
    slots: dict[int, tuple[bytes, int]]


@dataclasses.dataclass(slots=True)
class FakeLease:
    """Blocks lent for reading."""

    session: Session
    blocks: list[FakeBlock]
