"""Moves into host that are under way: one job, and what each of its blocks waits for."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Sums
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.shapes import HeldPiece


@dataclasses.dataclass(slots=True, eq=False)
class Arrival:
    """A move into host under way: `slot` belongs to the row when `done` says True."""

    slot: int
    done: asyncio.Future[None]


@dataclasses.dataclass(slots=True, eq=False)
class Move:
    """One job into host: rows of one namespace and their destinations; `good` says which arrived whole.

    `sources` are the gpu slots it copies from, held since the job was planned; empty where it reads from nvme.
    """

    entry: NamespaceEntry
    cls: SlotClass
    rows: Rows
    slots: Slots
    sources: Slots
    sums: Sums
    good: npt.NDArray[np.bool_]
    done: asyncio.Future[None]
    scattered: list[HeldPiece] = dataclasses.field(default_factory=list)
    """What it gathers from extents of other sizes, held likewise."""
    lossy: npt.NDArray[np.bool_] = dataclasses.field(default_factory=lambda: np.zeros(0, np.bool_))
    """Which of the blocks have been through FP8 where it takes them from, [n]."""
    errors: dict[int, npt.NDArray[np.float32]] = dataclasses.field(default_factory=dict)
    """What encoding had lost of those that are decoded, by their place in the move."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Slots in host for the leading ones of some rows, one hold each, and the moves that have yet to fill them."""

    entry: NamespaceEntry
    cls: SlotClass
    rows: Rows
    slots: Slots
    waits: set[asyncio.Future[None]]
