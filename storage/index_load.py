"""What there is of journal and checkpoints: the newest whole state, or else the kills that can be saved."""

from __future__ import annotations

import asyncio
import dataclasses

from kvtierd.storage.facts import Facts
from kvtierd.storage.index_frames import Contents, decode_file
from kvtierd.storage.layout import INDEX_FILES, index_name, index_number
from kvtierd.storage.metadata import NEW_SUFFIX, MetadataFiles


@dataclasses.dataclass(slots=True)
class Loaded:
    """The index as found. `usable` says that from the whole checkpoint `base` on no journal is missing; else only the
    kills in `facts` count, which hold wherever they were read. `frames` are the valid frames of each journal from
    `base` on. `sizes` has every file of the index."""

    facts: Facts
    usable: bool = False
    base: int = 0
    last_number: int = 0
    frames: dict[int, int] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


async def load_index(files: MetadataFiles, uuid: bytes, *, below: int = 1 << 62) -> Loaded:
    """Read the newest whole checkpoint and all journals from its number on, of those files whose number is `below`.

    Raises OSError where the folder cannot be listed; a file that cannot be read counts as damaged.
    """
    names = await files.names()
    numbers = {
        kind: sorted(n for n in (index_number(kind, name) for name in names) if n is not None and n < below)
        for kind in INDEX_FILES
    }
    found = Loaded(Facts(), last_number=max((*numbers["checkpoint"], *numbers["journal"]), default=0))
    found.sizes = {index_name(kind, number): 0 for kind in INDEX_FILES for number in numbers[kind]}
    for number in reversed(numbers["checkpoint"]):
        if await _load_from(number, numbers["journal"], files, uuid, found):
            return found
    if found.last_number:
        found.notes.append("no checkpoint is whole with all its journals; segments are scanned")
        for number in numbers["journal"]:
            contents = await _load(index_name("journal", number), number, files, uuid, found)
            # A kill is true wherever it stands: a delete outlives the damage of everything around it.
            contents.blocks, contents.heads = contents.blocks[:0], contents.heads[:0]
            found.facts.add_file(contents)
    return found


async def remove_unfinished(files: MetadataFiles) -> None:
    """Remove what a checkpoint left that was not finished."""
    await files.remove([name for name in await files.names() if is_unfinished(name)])


def is_unfinished(name: str) -> bool:
    """Whether this is the name of a checkpoint that was not finished."""
    return name.endswith(NEW_SUFFIX) and index_number("checkpoint", name.removesuffix(NEW_SUFFIX)) is not None


async def _load_from(number: int, journals: list[int], files: MetadataFiles, uuid: bytes, found: Loaded) -> bool:
    """Try checkpoint `number` with the journals from it on."""
    name = index_name("checkpoint", number)
    contents = await _load(name, number, files, uuid, found)
    if not contents.ended:
        found.notes.append(f"{name} is damaged")
        return False
    wanted = [journal for journal in journals if journal >= number]
    if wanted != list(range(number, number + len(wanted))) or not wanted:
        found.notes.append(f"{name} lacks a journal")
        return False
    facts = Facts()
    facts.add_file(contents)
    frames: dict[int, int] = {}
    for journal in wanted:
        part = await _load(index_name("journal", journal), journal, files, uuid, found)
        earlier = journal - 1 - part.between
        if earlier >= number and frames[earlier] < part.before:
            # What follows may say that it covers what was in the frames that are lost.
            found.notes.append(f"{index_name('journal', earlier)} is damaged: {part.before} frames were there")
            return False
        facts.add_file(part)
        frames[journal] = part.frames
    found.frames = frames
    found.facts, found.usable, found.base = facts, True, number
    return True


async def _load(name: str, number: int, files: MetadataFiles, uuid: bytes, found: Loaded) -> Contents:
    try:
        data = await files.read(name)
    except OSError as error:
        found.notes.append(f"{name} cannot be read: {error.strerror or error}")
        data = b""
    found.sizes[name] = len(data)
    contents = await asyncio.to_thread(decode_file, data, uuid, number)
    if contents.valid_bytes < len(data):
        found.notes.append(f"{name}: what follows byte {contents.valid_bytes} is no whole frame")
    return contents
