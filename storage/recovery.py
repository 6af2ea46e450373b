"""From what the segments hold to which blocks live (FORMAT.md §6): newest wins, tombstones kill, nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.core.namespace import Namespace
from kvtierd.storage.interface import Extent, Recovered
from kvtierd.storage.layout import KILL_DTYPE, RECORD_DTYPE
from kvtierd.storage.scan import Scan

Rows = npt.NDArray[np.void]


def live_blocks(scans: Sequence[Scan]) -> tuple[Rows, Recovered]:
    """Merge scans into the live blocks: RECORD_DTYPE rows, and the same as the interface gives them to the caller."""
    namespaces: dict[bytes, Namespace] = {}
    for scan in scans:
        namespaces.update(scan.namespaces)
    blocks = np.concatenate([np.empty(0, RECORD_DTYPE), *(scan.blocks for scan in scans)])
    kills = np.concatenate([np.empty(0, KILL_DTYPE), *(scan.kills for scan in scans)])
    newest = blocks[_newest_alive(blocks, kills)]
    known = _known(newest, namespaces)
    rows = newest[known]
    rows = rows[np.lexsort((rows["offset"], rows["segment"]))]
    check_disjoint(rows)
    recovered = _as_recovered(rows, namespaces)
    _count_losses(recovered, scans, int(known.size - np.count_nonzero(known)))
    return rows, recovered


def _newest_alive(blocks: Rows, kills: Rows) -> npt.NDArray[np.intp]:
    """Indices of the blocks that are the newest of their key and killed by no tombstone.

    Blocks and kills are sorted together by namespace, key and sequence, a kill behind the block of its own number;
    then a block lives just when it is the last of its group.
    """
    total = len(blocks) + len(kills)
    if total == 0:
        return np.empty(0, np.intp)
    identity = np.empty((8, total), np.uint64)
    identity[:4, : len(blocks)], identity[4:, : len(blocks)] = blocks["namespace"].T, blocks["key"].T
    identity[:4, len(blocks) :], identity[4:, len(blocks) :] = kills["namespace"].T, kills["key"].T
    sequence = np.concatenate([blocks["sequence"], kills["sequence"]])
    is_kill = np.arange(total) >= len(blocks)
    order = np.lexsort((is_kill, sequence, *identity))
    ordered = identity[:, order]
    last = np.ones(total, bool)
    last[:-1] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    winners: npt.NDArray[np.intp] = order[last]
    return np.sort(winners[winners < len(blocks)])


def _known(rows: Rows, namespaces: dict[bytes, Namespace]) -> npt.NDArray[np.bool_]:
    """Which blocks have a namespace whose geometry is theirs."""
    known = np.zeros(len(rows), bool)
    for digest, namespace in namespaces.items():
        shape = namespace.geometry
        same = (rows["namespace"] == np.frombuffer(digest, "<u8")).all(axis=1)
        same &= rows["count"] == shape.layers
        same &= (rows["layer_bytes"] == shape.layer_bytes) & (rows["layer_stride"] == shape.layer_stride)
        known |= same
    return known


def check_disjoint(rows: Rows) -> None:
    """Prove that no two live extents overlap; rows are sorted by segment and offset. An overlap can only be a bug."""
    end = rows["offset"] + rows["header_bytes"] + rows["payload_bytes"]
    same = rows["segment"][1:] == rows["segment"][:-1]
    overlap = same & (rows["offset"][1:] < end[:-1])
    assert not overlap.any(), f"live extents overlap at {rows[1:][overlap][0]}"


def _as_recovered(rows: Rows, namespaces: dict[bytes, Namespace]) -> Recovered:
    lengths = rows["header_bytes"] + rows["payload_bytes"]
    places = zip(rows["segment"].tolist(), rows["offset"].tolist(), lengths.tolist(), strict=True)
    return Recovered(
        namespaces=namespaces,
        namespace=[digest.tobytes() for digest in rows["namespace"]],
        keys=np.ascontiguousarray(rows["key"]).view(np.uint8).reshape(len(rows), 32),
        extents=[Extent(*place) for place in places],
        block_sums=rows["block_sum"].astype(np.uint64),
    )


def _count_losses(recovered: Recovered, scans: Sequence[Scan], unknown: int) -> None:
    for scan in scans:
        if scan.dropped:
            recovered.notes.append(f"segment {scan.life.segment}: {scan.dropped} torn or damaged records dropped")
        if scan.unreadable:
            recovered.notes.append(f"segment {scan.life.segment}: {scan.unreadable} pages could not be read")
    if unknown:
        recovered.notes.append(f"{unknown} blocks dropped whose namespace is not known or has another geometry")
    recovered.dropped = sum(scan.dropped for scan in scans) + unknown
