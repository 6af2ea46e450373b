"""From what is known to which blocks live (FORMAT.md §7): newest wins, kills kill, nothing overlaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.facts import Facts, alive
from kvtierd.storage.index_frames import Rows
from kvtierd.storage.interface import Extents, Recovered
from kvtierd.storage.record import Life


@dataclasses.dataclass(slots=True)
class Live:
    """The live blocks in the order of their places: ENTRY_DTYPE rows, the length of each record, and how many were
    left out because nobody knows their namespace, or because their file ends before."""

    rows: Rows
    lengths: npt.NDArray[np.int64]
    unknown: int
    cut_off: int = 0


def live_blocks(facts: Facts, lives: Mapping[int, Life], sizes: Mapping[int, int]) -> Live:
    """Which blocks live, by segment and offset; `sizes` is the size of each segment's file now.

    Raises ValueError when two of them overlap or one leaves its segment: then the facts are wrong, whatever their
    checksums say.
    """
    generations = {number: life.generation for number, life in lives.items()}
    rows = facts.blocks[alive(facts.blocks, facts.kills, generations)]
    place = rows["segment"].astype(np.uint64) << np.uint64(32) | rows["page"]
    if (place[1:] < place[:-1]).any():
        rows = rows[np.argsort(place)]
    lengths = facts.spaces.shapes()[rows["space"], rows["codec"], 3] if len(rows) else np.empty(0, np.int64)
    known = lengths > 0
    unknown = int(known.size - np.count_nonzero(known))
    if unknown:
        rows, lengths = rows[known], lengths[known]
    check_places(rows, lengths, lives)
    whole = np.ones(len(rows), bool)
    for number, life in lives.items():
        if (size := sizes[number]) < life.size_bytes:
            whole &= (rows["segment"] != number) | (rows["page"].astype(np.int64) * PAGE_BYTES + lengths <= size)
    return Live(rows[whole], lengths[whole], unknown, int(whole.size - np.count_nonzero(whole)))


def check_places(rows: Rows, lengths: npt.NDArray[np.int64], lives: Mapping[int, Life]) -> None:
    """Prove that live extents are disjoint and within their segments; rows are in the order of their places."""
    if not len(rows):
        return
    begin = rows["page"].astype(np.int64) * PAGE_BYTES
    end = begin + lengths
    same = rows["segment"][1:] == rows["segment"][:-1]
    if (overlap := np.flatnonzero(same & (begin[1:] < end[:-1]))).size:
        at = int(overlap[0])
        raise ValueError(
            f"live extents overlap in segment {rows['segment'][at]}: {begin[at]}..{end[at]} and {begin[at + 1]}.."
        )
    ids, first = np.unique(rows["segment"], return_index=True)
    last = np.append(first[1:], len(rows)) - 1
    for number, low, high in zip(ids.tolist(), begin[first].tolist(), end[last].tolist(), strict=True):
        if low < PAGE_BYTES or high > lives[number].end_bytes:
            raise ValueError(f"live extents {low}..{high} leave the records of segment {number}")


def as_recovered(live: Live, facts: Facts) -> Recovered:
    """The live blocks as the interface gives them to the caller."""
    rows = live.rows
    return Recovered(
        namespaces=dict(facts.spaces.known),
        digests=list(facts.spaces.digests),
        space=rows["space"].astype(np.int32),
        keys=np.ascontiguousarray(rows["key"]).view(np.uint8).reshape(len(rows), 32),
        extents=Extents(rows["segment"].copy(), rows["page"].copy(), live.lengths),
        block_sums=rows["block_sum"].copy(),
        codecs=rows["codec"].copy(),
    )
