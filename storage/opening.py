"""Opening a store: superblock, segment headers, index or scans, and the ring that goes on from there."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
from collections import Counter
from pathlib import Path

from kvtierd.config.schema import Nvme
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import format_bytes
from kvtierd.storage import superblock
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.headers import FoundHeader, read_headers, write_headers
from kvtierd.storage.index_load import Loaded, load_index, remove_unfinished
from kvtierd.storage.index_log import IndexLog
from kvtierd.storage.interface import Recovered
from kvtierd.storage.io import StorageIo
from kvtierd.storage.layout import FORMAT_VERSION, segment_id, segment_name
from kvtierd.storage.metadata import MetadataFiles
from kvtierd.storage.pool import IoPool
from kvtierd.storage.reopening import Reopening
from kvtierd.storage.ring import Ring
from kvtierd.storage.segment import Segment
from kvtierd.storage.space import METADATA_BYTES, SEGMENT_OVERHEAD_BYTES, Plan, plan
from kvtierd.storage.superblock import Superblock

SPARE_FILES = 4096
"""Descriptors wanted beside the segments, for clients, chunks and everything else of the process."""
LEAST_SPARE_FILES = 512
"""With fewer than these the store refuses to take so many."""


@dataclasses.dataclass(slots=True)
class Found:
    """A segment file as it was at start."""

    segment: Segment
    header: FoundHeader


@dataclasses.dataclass(slots=True)
class Opened:
    """An open store's parts; `unjournaled` is what scans found, which the next flush puts into the journal."""

    ring: Ring
    index: IndexLog
    recovered: Recovered
    reopening: Reopening


async def open_store(
    settings: Nvme, directory: Path, io: StorageIo, files: MetadataFiles, pool: IoPool, counters: Counter[str]
) -> Opened:
    """Recover everything. The directory is locked and probed. Raises StartupError, OSError."""
    numbers = sorted(n for n in map(segment_id, io.names(directory)) if n is not None)
    block, notes = await _superblock(directory, has_segments=bool(numbers))
    loading = asyncio.create_task(load_index(files, block.uuid))
    segments: list[Segment] = []
    try:
        if numbers:
            _allow_files(len(numbers))
        for number in numbers:
            # One by one, so that those opened so far are closed when the next cannot be.
            path = directory / segment_name(number)
            file = io.open(path)
            segments.append(Segment(number, path, file, file.size_bytes()))
        headers = await asyncio.gather(*(_header(segment, block.uuid, pool) for segment in segments))
        found = [Found(segment, header) for segment, header in zip(segments, headers, strict=True)]
        limits = _plan(settings, directory, io, segments)
        ring = Ring(directory, io, pool, limits, block.uuid)
        opened = await _recover(ring, found, await loading, files, pool, block, counters)
        opened.recovered.notes[:0] = notes
    except BaseException:
        loading.cancel()
        await asyncio.wait([loading])
        for segment in segments:
            segment.file.close()
        raise
    return opened


async def _superblock(directory: Path, *, has_segments: bool) -> tuple[Superblock, list[str]]:
    """Load or make the superblock and count this opening; one of an older format becomes one of ours."""
    found = await superblock.load(directory)
    if found is None and has_segments:
        raise StartupError(
            ExitCode.IO,
            f"{directory} has segments but no valid superblock; nothing was changed: move them away to start empty",
        )
    found = found or await superblock.create(directory)
    opened = dataclasses.replace(found, epoch=found.epoch + 1, version=FORMAT_VERSION)
    await superblock.update(directory, opened)
    if found.version == FORMAT_VERSION:
        return opened, []
    return opened, [f"the store had format {found.version} and has format {FORMAT_VERSION} now; nothing was lost"]


def _header(segment: Segment, uuid: bytes, pool: IoPool) -> asyncio.Future[FoundHeader]:
    """Read a segment's header; where only one copy is good the other is written again if the disk takes it."""

    def read(scratch: Scratch) -> FoundHeader:
        found = read_headers(segment.file, segment.number, uuid, scratch)
        if found.life is None or found.life.free or not found.problem or found.life.size_bytes != segment.size_bytes:
            return found
        try:
            write_headers(segment.file, found.life, uuid, scratch)
        except OSError as error:
            return FoundHeader(found.life, f"{found.problem}; it cannot be mended: {error.strerror or error}")
        return FoundHeader(found.life, f"{found.problem}; it was mended")

    return pool.submit(read)


def _plan(settings: Nvme, directory: Path, io: StorageIo, segments: list[Segment]) -> Plan:
    space = io.space(directory)
    sizes = sum(segment.file.allocated_bytes() for segment in segments)
    own = sizes + METADATA_BYTES + len(segments) * SEGMENT_OVERHEAD_BYTES if segments else 0
    limits = plan(settings.capacity, settings.segment_bytes, space.free_bytes, space.total_bytes, own)
    needed = limits.segment_bytes + limits.reserve_bytes
    if not segments and space.free_bytes < needed:
        raise StartupError(
            ExitCode.IO,
            f"the disk of {directory} is full: {format_bytes(space.free_bytes)} free, "
            f"{format_bytes(needed)} needed for one segment and the reserve",
        )
    _allow_files(limits.segments + len(segments))
    return limits


def _allow_files(count: int) -> None:
    """Every segment stays open: raise the soft limit of open files if it is too low, or say that it cannot be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    if hard != infinite and hard < count + LEAST_SPARE_FILES:
        raise StartupError(
            ExitCode.CONFIG,
            f"nvme.capacity in segments of nvme.segment_bytes is {count} open files, and {hard} are allowed in all; "
            "raise LimitNOFILE or nvme.segment_bytes",
        )
    wanted = count + SPARE_FILES if hard == infinite else min(count + SPARE_FILES, hard)
    if soft != infinite and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _recover(
    ring: Ring,
    found: list[Found],
    loaded: Loaded,
    files: MetadataFiles,
    pool: IoPool,
    block: Superblock,
    counters: Counter[str],
) -> Opened:
    for item in sorted(found, key=lambda item: item.header.life.generation if item.header.life else 0):
        life = item.header.life
        item.segment.life = life if life is not None and not life.free else None
        ring.add(item.segment)
    removed = await ring.shrink()
    index = IndexLog(files, block.uuid, loaded, counters)
    reopening = Reopening(ring, pool, loaded)
    recovered = await reopening.recover(block.epoch)
    await remove_unfinished(files)
    await index.begin()
    await index.append(reopening.facts_at_once())
    if removed:
        recovered.notes.insert(0, f"the capacity is lower than before: {removed} segments were removed, oldest first")
    for item in reversed(found):
        lost = "; it is reused" if item.header.lost else ""
        if item.header.problem:
            recovered.notes.insert(0, f"segment {item.segment.number}: {item.header.problem}{lost}")
    recovered.dropped += sum(item.header.lost for item in found)
    return Opened(ring, index, recovered, reopening)
