"""Counting blocks by state and by namespace: a pass over the block table, in a thread and piece by piece.

It reads columns that the loop changes meanwhile: a count may be off by what moved during the pass, which a gauge may.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtierd.index.block_table import BlockTable
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME, Tier
from kvtierd.tiers.blocks import VISIBLE, WRITING

PIECE_ROWS = 1 << 18
_TIERS: dict[Tier, int] = {"gpu": TIER_GPU, "host": TIER_HOST, "nvme": TIER_NVME}
FLAGS = 256

Counts = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Census:
    """`by_flags[f]`: rows whose flags are f. `by_namespace[n]`: visible blocks of the namespace with that number, and
    `by_tier[tier][n]` those of them with a copy in a tier."""

    by_flags: Counts
    by_namespace: Counts
    by_tier: Mapping[Tier, Counts]

    def states(self) -> dict[tuple[str, str], int]:
        """Blocks by (tier, state); a block with copies in two tiers counts in both."""
        flags = np.arange(FLAGS)
        visible, durable = flags & VISIBLE != 0, flags & TIER_NVME != 0
        volatile = flags & (TIER_GPU | TIER_HOST) != 0
        where = {
            ("gpu", "clean"): (flags & TIER_GPU != 0) & durable & visible,
            ("gpu", "dirty"): (flags & TIER_GPU != 0) & ~durable & visible,
            ("host", "clean"): (flags & TIER_HOST != 0) & durable & visible,
            ("host", "dirty"): (flags & TIER_HOST != 0) & ~durable & visible,
            ("host", "writing"): flags & WRITING != 0,
            ("nvme", "cached"): durable & volatile & visible,
            ("nvme", "only"): durable & ~volatile & visible,
        }
        return {key: int(self.by_flags[mask].sum()) for key, mask in where.items()}


def count(table: BlockTable, namespaces: int) -> Census:
    """Count the rows in use. Runs in a worker thread."""
    by_flags, by_namespace = np.zeros(FLAGS, np.int64), np.zeros(namespaces, np.int64)
    by_tier: dict[Tier, Counts] = {tier: np.zeros(namespaces, np.int64) for tier in _TIERS}
    for begin in range(0, table.used_rows, PIECE_ROWS):
        piece = slice(begin, min(begin + PIECE_ROWS, table.used_rows))
        flags = table.flags[piece].copy()
        by_flags += np.bincount(flags, minlength=FLAGS)
        visible = flags & VISIBLE != 0
        numbers, flags = table.namespace[piece][visible], flags[visible]
        by_namespace += np.bincount(numbers, minlength=namespaces)[:namespaces]
        for tier, bit in _TIERS.items():
            by_tier[tier] += np.bincount(numbers[flags & bit != 0], minlength=namespaces)[:namespaces]
    return Census(by_flags, by_namespace, by_tier)
