"""Journal and checkpoints of the index as they go on (FORMAT.md §6).

Checkpoint N is the merge of the checkpoint before it and all journals up to N. So it is made from files alone, in a
thread, while the journal goes on in file N; and what was before it is the second chance of a damaged checkpoint.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from kvtierd.core.units import KIB, PAGE_BYTES
from kvtierd.storage.facts import Facts, alive
from kvtierd.storage.index_frames import BETWEEN_MAX, HEAD_DTYPE, FrameKind, FrameWriter, Rows
from kvtierd.storage.index_load import Loaded, load_index
from kvtierd.storage.layout import INDEX_FILES, index_name, index_number
from kvtierd.storage.metadata import MetadataFiles
from kvtierd.storage.stats import written_bytes

JOURNAL_BYTES_MIN = 6 * KIB
"""Journals are worth a checkpoint when they are larger than this and than the last checkpoint: so the bytes of all
checkpoints stay below twice those of all journals."""


class IndexLog:
    """The journal that is written now, and the making of checkpoints. Call `begin` first; one checkpoint at a time."""

    def __init__(self, files: MetadataFiles, uuid: bytes, loaded: Loaded, counters: Counter[str]) -> None:
        self._files = files
        self._uuid = uuid
        self._counters = counters
        self._base = loaded.base
        self._last = loaded.last_number
        self._writer: FrameWriter | None = None
        self._safe = max(((number, count) for number, count in loaded.frames.items() if count), default=(self._last, 0))
        """The last journal that has frames on stable storage, and how many."""
        self._before = 0, 0
        """What the present journal says of that: frames, and how many journals lie between."""
        self._sizes = dict(loaded.sizes)
        self._turn = asyncio.Lock()
        self._lifetime_bytes = loaded.facts.lifetime_bytes

    @property
    def size_bytes(self) -> int:
        """What journals and checkpoints take on disk."""
        return sum(self._sizes.values())

    @property
    def bound_bytes(self) -> int:
        """What they may take until there is another checkpoint: two checkpoints, one being made, and the journals that
        belong to the two."""
        return 5 * max(JOURNAL_BYTES_MIN, self._sizes.get(index_name("checkpoint", self._base), 0))

    @property
    def lifetime_bytes(self) -> int:
        """What the store had written in all its life when it was opened."""
        return self._lifetime_bytes

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the journals have outgrown the last checkpoint."""
        return self._journal_bytes > max(JOURNAL_BYTES_MIN, self._sizes.get(index_name("checkpoint", self._base), 0))

    @property
    def wants_last_checkpoint(self) -> bool:
        """Whether the next start would be faster by a checkpoint now."""
        return self._journal_bytes > max(PAGE_BYTES, self._sizes.get(index_name("checkpoint", self._base), 0) // 16)

    @property
    def _journal_bytes(self) -> int:
        return sum(size for name, size in self._sizes.items() if (index_number("journal", name) or 0) >= self._base)

    async def begin(self) -> None:
        """Where there is no usable index, make an empty one: it claims nothing, so segments are scanned until the
        journal covers them. Raises OSError."""
        if self._base:
            return
        await self._next_journal()
        writer = FrameWriter(self._uuid, self._last)
        await self._publish(self._last, [writer.end(0, self._lifetime_bytes)])

    async def replace_all(self, facts: Facts) -> None:
        """Make these facts the whole index, whatever it was before. Raises OSError."""
        await self._next_journal()
        self._base = 0
        await self._publish(
            self._last, _checkpoint_frames(facts, FrameWriter(self._uuid, self._last), self._lifetime_bytes)
        )

    async def append(self, facts: Facts) -> None:
        """Put facts on stable storage. After an OSError the journal goes on in another file: what the failed one holds
        of them is not known, and to give a fact twice changes nothing."""
        async with self._turn:
            try:
                await self._append(facts)
            except OSError:
                self._writer = None
                raise

    async def _append(self, facts: Facts) -> None:
        if self._writer is None:
            await self._next_journal()
        assert self._writer is not None
        name = index_name("journal", self._last)
        if facts:
            frames = [self._writer.begin(*self._before)] if not self._writer.frames else []
            frames += encode_facts(facts, self._writer)
            frames.append(self._writer.end(0, self._lifetime_bytes + written_bytes(self._counters)))
            data = b"".join(frames)
            await self._files.append(name, data)
            self._sizes[name] = self._sizes.get(name, 0) + len(data)
            self._counters["journal_bytes"] += len(data)
            await self._files.sync(name)
            self._safe = self._last, self._writer.frames

    async def _next_journal(self) -> None:
        number = self._last + 1
        await self._files.create(index_name("journal", number))
        between = self._last - self._safe[0]
        self._before = (self._safe[1], between) if between <= BETWEEN_MAX else (0, 0)
        self._last = number
        self._writer = FrameWriter(self._uuid, number)
        self._sizes[index_name("journal", number)] = 0

    async def checkpoint(self, generations: Mapping[int, int], is_covered: Callable[[], bool]) -> None:
        """Merge all that is in the index now into a checkpoint. Raises OSError.

        `generations` is the present life of each segment by id; `is_covered` says whether every record that a kill may
        be about lies before the heads in the index. If not, kills are kept: a scan after a crash may meet their
        victims.
        """
        async with self._turn:
            keep_kills = not is_covered()
            self._writer = None
            await self._next_journal()
            number, (journal, count) = self._last, self._safe
        loaded = await load_index(self._files, self._uuid, below=number)
        if not loaded.usable or (journal >= loaded.base and loaded.frames.get(journal, 0) < count):
            raise OSError(0, "; ".join(loaded.notes) or "the journal lacks what was written to it")
        lifetime = self._lifetime_bytes + written_bytes(self._counters)
        writer = FrameWriter(self._uuid, number)
        merged = await asyncio.to_thread(_merged, loaded.facts, generations, keep_kills=keep_kills)
        parts = await asyncio.to_thread(_checkpoint_frames, merged, writer, lifetime)
        await self._publish(number, parts)

    async def _publish(self, number: int, parts: list[bytes]) -> None:
        """Make it the checkpoint that counts; what comes before the one it replaces has no use any more."""
        name = index_name("checkpoint", number)
        await self._files.replace(name, parts)
        self._sizes[name] = sum(map(len, parts))
        self._counters["checkpoint_bytes"] += self._sizes[name]
        self._counters["checkpoints"] += 1
        previous, self._base = self._base or number, number
        old = sorted(name for name in self._sizes if _number_of(name) < previous)
        for name in old:
            del self._sizes[name]
        await self._files.remove(old)


def encode_facts(facts: Facts, writer: FrameWriter) -> list[bytes]:
    """Facts as frames: namespaces before what names them."""
    used = np.union1d(facts.blocks["space"], facts.kills["space"]).tolist()
    digests = [facts.spaces.digests[number] for number in used]
    frames = list(writer.namespaces([(digest, facts.spaces.known.get(digest)) for digest in digests]))
    table = np.zeros(len(facts.spaces.digests), np.uint32)
    table[used] = [writer.spaces[digest] for digest in digests]
    for kind, rows in ((FrameKind.KILLS, facts.kills), (FrameKind.BLOCKS, facts.blocks)):
        if len(rows):
            numbered = rows.copy()
            numbered["space"] = table[rows["space"]]
            frames += writer.rows(kind, numbered)
    frames += writer.rows(FrameKind.HEADS, head_rows(facts))
    return frames


def head_rows(facts: Facts) -> Rows:
    """Heads as rows of a frame."""
    rows = np.zeros(len(facts.heads), HEAD_DTYPE)
    for row, (number, head) in zip(rows, facts.heads.items(), strict=True):
        row["segment"], row["generation"], row["head"], row["sealed"] = number, head.generation, head.head, head.sealed
    return rows


def _merged(facts: Facts, generations: Mapping[int, int], *, keep_kills: bool) -> Facts:
    """What lives of these facts, in the order of its place; a block that was written again, in both places."""
    merged = Facts()
    merged.spaces = facts.spaces
    blocks = facts.blocks[alive(facts.blocks, facts.kills, generations, copies=True)]
    merged.add_blocks(blocks[np.lexsort((blocks["page"], blocks["segment"]))])
    merged.heads = {number: head for number, head in facts.heads.items() if generations.get(number) == head.generation}
    if keep_kills:
        merged.add_kills(facts.kills)
    return merged


def _checkpoint_frames(merged: Facts, writer: FrameWriter, lifetime_bytes: int) -> list[bytes]:
    """Facts as a whole file."""
    return [*encode_facts(merged, writer), writer.end(len(merged.blocks), lifetime_bytes)]


def _number_of(name: str) -> int:
    return next((number for kind in INDEX_FILES if (number := index_number(kind, name)) is not None), 0)
