"""Opening a store: superblock, segment headers, scans, and the ring that goes on from there."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path

from kvtierd.config.schema import Nvme
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import PAGE_BYTES, format_bytes
from kvtierd.storage import superblock
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.interface import Recovered
from kvtierd.storage.io import SegmentFile, StorageIo, read_exact
from kvtierd.storage.layout import SEQUENCE_BITS, segment_id, segment_name
from kvtierd.storage.pool import IoPool
from kvtierd.storage.record import Life
from kvtierd.storage.recovery import Rows, live_blocks
from kvtierd.storage.ring import Ring, Sequences
from kvtierd.storage.scan import Scan, Scanner
from kvtierd.storage.segment import Rows as SegmentRows
from kvtierd.storage.segment import Segment, decode_header
from kvtierd.storage.space import Plan, plan
from kvtierd.storage.superblock import Superblock

SPARE_FILES = 4096
"""Descriptors wanted beside the segments, for clients, chunks and everything else of the process."""
LEAST_SPARE_FILES = 512
"""With fewer than these the store refuses to take so many."""


@dataclasses.dataclass(slots=True)
class _Found:
    """A segment file as it was at start; `life` is None when its header is not valid."""

    segment: Segment
    life: Life | None
    cause: str = ""


async def open_store(settings: Nvme, directory: Path, io: StorageIo, pool: IoPool) -> tuple[Ring, Recovered]:
    """Recover everything. The directory is locked and probed. Raises StartupError, OSError."""
    numbers = sorted(n for n in map(segment_id, io.names(directory)) if n is not None)
    block = await _superblock(directory, has_segments=bool(numbers))
    found: list[_Found] = []
    try:
        for number in numbers:
            # One by one, so that those opened so far are closed when the next cannot be.
            found.append(await _open_segment(directory / segment_name(number), number, block.uuid, io, pool))  # noqa: PERF401
        limits = _plan(settings, directory, io, found)
        ring = Ring(directory, io, pool, limits, block.uuid)
        recovered = await _recover(ring, found, pool, block.epoch)
    except BaseException:
        for item in found:
            item.segment.file.close()
        raise
    return ring, recovered


async def _superblock(directory: Path, *, has_segments: bool) -> Superblock:
    """Load or make the superblock and count this opening."""
    found = await superblock.load(directory)
    if found is None and has_segments:
        raise StartupError(
            ExitCode.IO,
            f"{directory} has segments but no valid superblock; nothing was changed: move them away to start empty",
        )
    found = found or await superblock.create(directory)
    opened = dataclasses.replace(found, epoch=found.epoch + 1)
    await superblock.update(directory, opened)
    return opened


async def _open_segment(path: Path, number: int, uuid: bytes, io: StorageIo, pool: IoPool) -> _Found:
    file = io.open(path)
    segment = Segment(number, path, file, file.size_bytes())
    try:
        life = await pool.submit(lambda scratch: _read_header(file, number, uuid, scratch), urgent=True)
    except OSError as error:
        return _Found(segment, None, f"its header cannot be read ({error.strerror or error})")
    return _Found(segment, life, "its header is not valid" if life is None else "")


def _read_header(file: SegmentFile, number: int, uuid: bytes, scratch: Scratch) -> Life | None:
    page = scratch.headers[:PAGE_BYTES]
    read_exact(file, [page], 0, scratch)
    return decode_header(page, number, uuid)


def _plan(settings: Nvme, directory: Path, io: StorageIo, found: list[_Found]) -> Plan:
    space = io.space(directory)
    own = sum(item.segment.file.allocated_bytes() for item in found)
    limits = plan(settings.capacity, settings.segment_bytes, space.free_bytes, space.total_bytes, own)
    needed = limits.segment_bytes + limits.reserve_bytes
    if not found and space.free_bytes < needed:
        raise StartupError(
            ExitCode.IO,
            f"the disk of {directory} is full: {format_bytes(space.free_bytes)} free, "
            f"{format_bytes(needed)} needed for one segment and the reserve",
        )
    _allow_files(limits.segments + len(found))
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


async def _recover(ring: Ring, found: list[_Found], pool: IoPool, epoch: int) -> Recovered:
    for item in sorted(found, key=lambda item: item.life.generation if item.life else 0):
        item.segment.life = item.life
        ring.add(item.segment)
    removed = await ring.shrink()
    alive = [segment for segment in ring if segment.life is not None]
    scans = await asyncio.gather(*(pool.submit(_scan_of(segment), urgent=True) for segment in alive))
    rows, recovered = live_blocks(scans)
    for segment, scan in zip(alive, scans, strict=True):
        _fill(segment, rows[rows["segment"] == segment.number], scan)
    last = max((max(scan.last_sequence, scan.life.generation) for scan in scans), default=0)
    ring.sequences = Sequences(max(epoch << SEQUENCE_BITS, last + 1))
    _resume(ring, scans)
    if removed:
        recovered.notes.insert(0, f"the capacity is lower than before: {removed} segments were removed, oldest first")
    invalid = [item for item in found if item.life is None]
    recovered.notes[:0] = [f"segment {item.segment.number}: {item.cause}; it is reused" for item in invalid]
    recovered.dropped += len(invalid)
    return recovered


def _scan_of(segment: Segment) -> Callable[[Scratch], Scan]:
    life = segment.life
    assert life is not None
    return lambda scratch: Scanner(segment.file, life, scratch).scan()


def _fill(segment: Segment, rows: Rows, scan: Scan) -> None:
    """Take the live blocks of a scan into the segment's columns."""
    prints = rows["namespace"][:, 0] ^ rows["key"][:, 0]
    lengths = rows["header_bytes"] + rows["payload_bytes"]
    segment.rows = SegmentRows.of(rows["offset"], lengths, rows["sequence"], prints)
    segment.live_count = len(rows)
    segment.live_bytes = int(lengths.sum())
    segment.namespaces = set(scan.namespaces)
    segment.head = segment.size_bytes


def _resume(ring: Ring, scans: list[Scan]) -> None:
    """Go on in the newest segment, if every page of it could be read: what could not may still hold a header."""
    newest = max(scans, key=lambda scan: scan.life.generation, default=None)
    if newest is not None and newest.unreadable == 0:
        ring.resume(newest.end)
