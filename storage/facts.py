"""What is known of a store, from whatever source, and which blocks live by it (FORMAT.md §7).

A fact stays true wherever it was read: this block lies here, whatever had this key up to that number is dead. So facts
of journal, checkpoint and scans are put together in any order, and the same merge serves a start and a new checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.index_frames import ENTRY_DTYPE, KILL_ENTRY_DTYPE, Contents, Rows
from kvtierd.storage.layout import block_shape, codecs_of
from kvtierd.storage.record import Kill
from kvtierd.storage.scan import Scan

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]

_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What an index knows of a life of a segment: all records before `head`, and no more come if it is `sealed`."""

    generation: int
    head: int
    sealed: bool


_NO_HEAD = Head(0, 0, sealed=False)


class Spaces:
    """Namespaces by number, as they were met; a namespace is None while only its digest is known."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.known: dict[bytes, Namespace] = {}
        self._numbers: dict[bytes, int] = {}

    def number(self, digest: bytes, namespace: Namespace | None = None) -> int:
        """The number of a digest, new or old."""
        if namespace is not None:
            self.known[digest] = namespace
        number = self._numbers.setdefault(digest, len(self.digests))
        if number == len(self.digests):
            self.digests.append(digest)
        return number

    def shapes(self) -> npt.NDArray[np.int64]:
        """[spaces, largest codec + 1, 4] int64: layers, layer_bytes, layer_stride, length of a record; 0 where not
        known, or where blocks have no such form."""
        table = np.zeros((len(self.digests), max(Codec) + 1, 4), np.int64)
        for number, digest in enumerate(self.digests):
            if (namespace := self.known.get(digest)) is None:
                continue
            for codec in codecs_of(namespace.geometry):
                shape = block_shape(namespace.geometry, codec)
                table[number, codec] = shape.layers, shape.layer_bytes, shape.layer_stride, shape.length
        return table

    def words(self) -> npt.NDArray[np.uint64]:
        """The first 64 bits of each digest."""
        return np.frombuffer(b"".join(digest[:8] for digest in self.digests), "<u8")


class Facts:
    """Blocks, kills and heads of several sources, their namespaces numbered alike."""

    def __init__(self) -> None:
        self.spaces = Spaces()
        self.heads: dict[int, Head] = {}
        self.lifetime_bytes = 0
        self.mismatched: list[Kill] = []
        """Blocks of scans that were left out, as kills: their geometry is not their namespace's, or that is not known.
        They must not come back when the namespace is known again."""
        self._blocks: list[Rows] = [np.empty(0, ENTRY_DTYPE)]
        self._kills: list[Rows] = [np.empty(0, KILL_ENTRY_DTYPE)]

    def __bool__(self) -> bool:
        return bool(self.heads) or any(map(len, self._blocks)) or any(map(len, self._kills))

    @property
    def blocks(self) -> Rows:
        """All blocks, ENTRY_DTYPE."""
        return _joined(self._blocks)

    @property
    def kills(self) -> Rows:
        """All kills, KILL_ENTRY_DTYPE."""
        return _joined(self._kills)

    def add_file(self, found: Contents) -> None:
        """Take in a journal or checkpoint; the order matters for heads alone, where the later one counts."""
        numbers = {number: self.spaces.number(*space) for number, space in found.spaces.items()}
        table = np.full(max(numbers, default=-1) + 1, -1, np.int64)
        for number, mine in numbers.items():
            table[number] = mine
        self._blocks.append(_renumbered(found.blocks, table))
        self._kills.append(_renumbered(found.kills, table))
        self.lifetime_bytes = max(self.lifetime_bytes, found.lifetime_bytes)
        for row in found.heads:
            head = Head(int(row["generation"]), int(row["head"]), bool(row["sealed"]))
            old = self.heads.get(int(row["segment"]), _NO_HEAD)
            if (head.generation, head.head) >= (old.generation, old.head):
                self.heads[int(row["segment"])] = head

    def add_blocks(self, blocks: Rows) -> None:
        """Take in blocks whose `space` is our number."""
        self._blocks.append(blocks)

    def add_kills(self, kills: Rows) -> None:
        """Take in kills whose `space` is our number."""
        self._kills.append(kills)

    def add_kills_of(self, other: Facts) -> None:
        """Take in the kills of facts that number namespaces otherwise."""
        if len(other.kills):
            kills = other.kills.copy()
            numbers = np.array([self.spaces.number(digest) for digest in other.spaces.digests], np.uint32)
            kills["space"] = numbers[kills["space"]]
            self._kills.append(kills)

    def kill_rows(self, blocks: Rows) -> None:
        """Strike out blocks whose `space` is our number."""
        kills = np.zeros(len(blocks), KILL_ENTRY_DTYPE)
        kills["key"], kills["sequence"], kills["space"] = blocks["key"], blocks["origin"], blocks["space"]
        self._kills.append(kills)

    def add_scans(self, scans: list[Scan]) -> tuple[Rows, Rows]:
        """Take in what scans found; returns it as entries: blocks and kills."""
        for scan in scans:
            for digest, namespace in scan.namespaces.items():
                self.spaces.number(digest, namespace)
        found = [scan.blocks for scan in scans if len(scan.blocks)]
        blocks, kills = np.empty(0, ENTRY_DTYPE), np.empty(0, KILL_ENTRY_DTYPE)
        if found:
            blocks = self._entries(np.concatenate(found))
            self._blocks.append(blocks)
        if struck := [scan.kills for scan in scans if len(scan.kills)]:
            kills = self._kill_entries(np.concatenate(struck))
            self._kills.append(kills)
        return blocks, kills

    def _entries(self, rows: Rows) -> Rows:
        """Record headers as entries, those whose geometry is their namespace's."""
        spaces = self._numbers_of(rows["namespace"])
        wanted = self.spaces.shapes()[spaces, rows["codec"]]
        same = (rows["count"] == wanted[:, 0]) & (rows["layer_bytes"] == wanted[:, 1])
        same &= (rows["layer_stride"] == wanted[:, 2]) & (wanted[:, 3] > 0)
        for row in rows[~same]:
            self.mismatched.append(
                (row["namespace"].tobytes(), row["key"].tobytes(), int(row["origin"] or row["sequence"]))
            )
        kept = rows[same]
        entries = np.zeros(len(kept), ENTRY_DTYPE)
        for name in ("key", "sequence", "block_sum", "segment", "codec"):
            entries[name] = kept[name]
        entries["origin"] = np.where(kept["origin"] > 0, kept["origin"], kept["sequence"])
        entries["page"] = kept["offset"] // PAGE_BYTES
        entries["space"] = spaces[same]
        return entries

    def _kill_entries(self, rows: Rows) -> Rows:
        entries = np.zeros(len(rows), KILL_ENTRY_DTYPE)
        entries["key"], entries["sequence"] = rows["key"], rows["sequence"]
        entries["space"] = self._numbers_of(rows["namespace"])
        return entries

    def _numbers_of(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Numbers of digests given as [n, 4] words: one pass, however many namespaces there are."""
        words = np.ascontiguousarray(digests)
        unique, inverse = np.unique(words.view("V32").reshape(-1), return_inverse=True)
        numbers = np.array([self.spaces.number(digest.tobytes()) for digest in unique], np.int64)
        return numbers[inverse.reshape(-1)]


def alive(blocks: Rows, kills: Rows, generations: Mapping[int, int], *, copies: bool = False) -> Numbers:
    """Indices of the blocks that live: in a life that is, the newest of their key by origin, killed by nothing.

    `generations` is the present life of each segment by id. A sequence number says which life a record is of: it is
    above its life's generation and below the next one's. Of two copies of one origin the earlier one lives: the later
    may be torn, and the earlier is recycled only when the later is on stable storage. With `copies` both are given.
    """
    here = np.flatnonzero(_of_this_life(blocks, generations))
    if here.size == 0:
        return here
    return here[_newest(blocks[here], kills, copies=copies)]


def _of_this_life(blocks: Rows, generations: Mapping[int, int]) -> Mask:
    ids = np.array(sorted(generations), np.uint32)
    if ids.size == 0:
        return np.zeros(len(blocks), bool)
    begun = np.array([generations[number] for number in ids.tolist()], np.uint64)
    place = np.minimum(np.searchsorted(ids, blocks["segment"]), ids.size - 1)
    mask: Mask = (ids[place] == blocks["segment"]) & (blocks["sequence"] > begun[place])
    return mask


def _newest(blocks: Rows, kills: Rows, *, copies: bool) -> Numbers:
    """Indices of blocks that are the newest of their key and struck out by no kill.

    Blocks and kills are sorted together by identity and origin, a kill behind the blocks of its own number, and of two
    copies the earlier one last; then a block lives just when it is the last of its group. Identities are sorted by 64
    mixed bits; should two of them be equal in these, they are sorted in full.
    """
    total = len(blocks) + len(kills)
    words = np.empty((5, total), np.uint64)
    for part, rows in ((slice(0, len(blocks)), blocks), (slice(len(blocks), total), kills)):
        words[:4, part], words[4, part] = rows["key"].T, rows["space"]
    origin = np.concatenate([blocks["origin"], kills["sequence"]])
    earlier = ~np.concatenate([blocks["sequence"], np.zeros(len(kills), np.uint64)])
    is_kill = np.arange(total) >= len(blocks)
    mixed = words[0].copy()
    for word in words[1:]:
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX + word
    order = np.lexsort((earlier, is_kill, origin, mixed))
    ordered = words[:, order]
    last = np.append((ordered[:, 1:] != ordered[:, :-1]).any(axis=0), True)
    if not np.array_equal(~last[:-1], mixed[order][1:] == mixed[order][:-1]):
        order = np.lexsort((earlier, is_kill, origin, *words))
        ordered = words[:, order]
        last = np.append((ordered[:, 1:] != ordered[:, :-1]).any(axis=0), True)
    winners: Numbers = order[last]
    if copies:
        group = np.cumsum(last) - last
        same = (origin[order] == origin[winners][group]) & ~is_kill[winners][group]
        winners = order[same]
    return np.sort(winners[winners < len(blocks)])


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) > 1:
        parts[:] = [np.concatenate(parts)]
    return parts[0]


def _renumbered(rows: Rows, table: npt.NDArray[np.int64]) -> Rows:
    """Rows with our numbers of namespaces; those that name none are left out."""
    if not len(rows):
        return rows
    own = np.full(len(rows), -1, np.int64)
    inside = rows["space"] < len(table)
    own[inside] = table[rows["space"][inside]]
    kept = rows[own >= 0].copy()
    kept["space"] = own[own >= 0]
    return kept
