"""The offline check of a store: every inconsistency with its place, the proof that extents are disjoint, and repair.

What the index says is held against what a scan of all segments finds. Repair changes headers, the superblock and the
index, and wipes headers that are none; no valid record is ever touched. What is damaged is left out of the new index,
so that it is not served.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections import Counter
from pathlib import Path

import numpy as np

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage import superblock
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.directory import DirectoryLock, what_failed
from kvtierd.storage.facts import Facts, Head
from kvtierd.storage.headers import FoundHeader, read_headers, write_headers
from kvtierd.storage.index_frames import FRAME_MAGIC
from kvtierd.storage.index_load import Loaded, is_unfinished, load_index
from kvtierd.storage.index_log import IndexLog
from kvtierd.storage.io import write_exact
from kvtierd.storage.io_posix import PosixIo
from kvtierd.storage.layout import FORMAT_VERSION, segment_id, segment_name
from kvtierd.storage.metadata import AioMetadata
from kvtierd.storage.payloads import damaged_payloads
from kvtierd.storage.record import Life
from kvtierd.storage.recovery import Live, live_blocks
from kvtierd.storage.scan import Scan, Scanner
from kvtierd.storage.segment import Segment
from kvtierd.storage.superblock import Superblock

LEFTOVERS = ("probe", "probe-gds", "trial", "trial.new", "trial-data", "superblock.new")
"""Names that the store gives files only while it makes or tries something; anything else is not ours."""


class Verdict(enum.IntEnum):
    """How a check ended: the exit code of the command, as of fsck(8)."""

    CLEAN = 0
    REPAIRED = 1
    BROKEN = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. A note is what a crash or a full disk may leave, and is no inconsistency."""

    place: str
    what: str
    is_note: bool = False
    is_repaired: bool = False


@dataclasses.dataclass(slots=True)
class Report:
    """All findings, and what is there."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    segments: int = 0
    live_blocks: int = 0
    live_bytes: int = 0
    verified_bytes: int = 0

    @property
    def verdict(self) -> Verdict:
        """Clean without problems, repaired if all of them are, else broken."""
        problems = [finding for finding in self.findings if not finding.is_note]
        if not problems:
            return Verdict.CLEAN
        return Verdict.REPAIRED if all(problem.is_repaired for problem in problems) else Verdict.BROKEN

    def note(self, place: str, what: str) -> None:
        """What may be so."""
        self.findings.append(Finding(place, what, is_note=True))

    def problem(self, place: str, what: str, *, is_repaired: bool = False) -> None:
        """What must not be so."""
        self.findings.append(Finding(place, what, is_repaired=is_repaired))


async def check_store(directory: Path, *, repair: bool = False, verify_data: bool = False) -> Report:
    """Check the store in a directory; nothing is changed without `repair`.

    Raises StartupError: 74 for a directory that is none or has no store, a newer format or an error of the disk, 75
    while a daemon uses it. The lock file is written in any case where there is a store.
    """
    if not directory.is_dir():
        raise StartupError(ExitCode.IO, f"{directory} is not a directory")
    await superblock.load(directory)
    checker = Checker(directory, repair=repair)
    lock = DirectoryLock(directory)
    if is_no_store(directory):
        # Said before the lock is taken, whose file would stay in a folder that is none of ours.
        raise StartupError(
            ExitCode.IO,
            f"there is no store in {directory}: it has neither a superblock nor a segment",
        )
    lock.acquire()
    try:
        await checker.check(verify_data=verify_data)
    except OSError as error:
        raise StartupError(ExitCode.IO, f"cannot check {directory}: {what_failed(error)}") from error
    finally:
        checker.close()
        lock.release()
    return checker.report


def is_no_store(directory: Path) -> bool:
    """Whether there is neither a superblock nor a segment."""
    names = [path.name for path in directory.iterdir()]
    return superblock.NAME not in names and all(segment_id(name) is None for name in names)


class Checker:
    """One check of a directory that nobody else uses."""

    def __init__(self, directory: Path, *, repair: bool) -> None:
        self._directory = directory
        self._repair = repair
        self._io = PosixIo("buffered")
        self._files = AioMetadata(directory)
        self._scratch = Scratch()
        self._segments: dict[int, Segment] = {}
        self._lives: dict[int, Life] = {}
        self._scans: dict[int, Scan] = {}
        self.report = Report()

    def close(self) -> None:
        """Close the segments."""
        for segment in self._segments.values():
            segment.file.close()

    async def check(self, *, verify_data: bool) -> None:
        """Go through everything, from the superblock to the payloads."""
        block = await self._check_superblock()
        if block is None:
            return
        for number in sorted(n for n in map(segment_id, self._io.names(self._directory)) if n is not None):
            await asyncio.to_thread(self._check_segment, number, block.uuid)
        loaded = await load_index(self._files, block.uuid)
        before = len(self.report.findings)
        scanned = await self._check_index(loaded)
        live = self._live(scanned, "a scan of all segments", is_repaired=False)
        if live is None:
            return
        lost = self._compare(loaded, scanned, live)
        if verify_data:
            bad = await asyncio.to_thread(damaged_payloads, live, scanned, self._segments, self._report_damage)
            self.report.verified_bytes = int(live.lengths.sum())
            lost |= bad
        # Notes, of a torn tail for example, are no damage; what is reported as repaired must be.
        damaged = any(not finding.is_note for finding in self.report.findings[before:])
        needs_index = damaged or not loaded.usable or bool(lost)
        if self._repair and needs_index and self._lives:
            await self._write_index(block.uuid, loaded, scanned, live, lost)
        await self._check_leftovers()
        self.report.segments = len(self._segments)
        self.report.live_blocks = len(live.rows) - len(lost)
        self.report.live_bytes = int(live.lengths.sum())

    async def _check_superblock(self) -> Superblock | None:
        path = self._directory / superblock.NAME
        data = path.read_bytes() if path.exists() else b""
        pages = [data[at : at + PAGE_BYTES] for at in range(0, superblock.COPIES * PAGE_BYTES, PAGE_BYTES)]
        copies = [superblock.decode(page) for page in pages]
        best = max((copy for copy in copies if copy is not None), key=lambda copy: copy.epoch, default=None)
        if best is None:
            self.report.problem("superblock", "no copy is valid; without it nobody knows whose the segments are")
            return None
        bad = [number for number, copy in enumerate(copies) if copy is None]
        for number in bad:
            what = f"copy {number} is not valid"
            self.report.problem(f"superblock at {number * PAGE_BYTES}", what, is_repaired=self._repair)
        if bad and self._repair:
            await superblock.update(self._directory, best)
        if best.version != FORMAT_VERSION:
            self.report.note("superblock", f"format {best.version}; the daemon takes it over when it opens the store")
        return best

    def _check_segment(self, number: int, uuid: bytes) -> None:
        path = self._directory / segment_name(number)
        file = self._io.open(path)
        segment = self._segments[number] = Segment(number, path, file, file.size_bytes())
        header = read_headers(file, number, uuid, self._scratch)
        if header.problem:
            self._bad_header(segment, header, uuid)
        life = header.life
        if life is None or life.free:
            return
        if segment.size_bytes < life.size_bytes:
            what = f"the file has {segment.size_bytes} bytes, its header says {life.size_bytes}"
            self.report.problem(f"segment {number}", what)
        segment.life = self._lives[number] = life
        scan = self._scans[number] = Scanner(file, life, self._scratch).scan()
        if scan.unreadable:
            self.report.problem(f"segment {number}", f"{scan.unreadable} pages cannot be read")

    def _bad_header(self, segment: Segment, header: FoundHeader, uuid: bytes) -> None:
        life = header.life
        mends = self._repair and life is not None and life.size_bytes == segment.size_bytes
        if mends and life is not None:
            write_headers(segment.file, life, uuid, self._scratch)
        if header.is_interrupted:
            self.report.note(f"segment {segment.number} at 0", header.problem)
            return
        lost = "; what it held is lost, and the daemon reuses it" if life is None else ""
        self.report.problem(f"segment {segment.number} at 0", header.problem + lost, is_repaired=mends)

    async def _check_index(self, loaded: Loaded) -> Facts:
        """Report what is wrong with the index's files; returns what scans found, and the kills of the index."""
        for note in loaded.notes:
            name, _, what = note.partition(": ")
            torn = await self._is_torn(name) if "no whole frame" in what else False
            if torn:
                self.report.note(name, what)
            else:
                self.report.problem("index", note, is_repaired=self._repair)
        scanned = Facts()
        scanned.add_scans(list(self._scans.values()))
        scanned.add_kills_of(loaded.facts)
        return scanned

    async def _is_torn(self, name: str) -> bool:
        """Whether a file just ends in an append that a crash cut off: no other frame follows."""
        data = await self._files.read(name)
        last = data.rfind(FRAME_MAGIC)
        return name.startswith("journal") and (last < 0 or data.find(FRAME_MAGIC, last + 1) < 0)

    def _live(self, facts: Facts, source: str, *, is_repaired: bool) -> Live | None:
        """The live blocks by some facts, which proves that they are disjoint; where they are not, `is_repaired` says
        whether other facts take their place."""
        sizes = {number: segment.size_bytes for number, segment in self._segments.items()}
        try:
            return live_blocks(facts, self._lives, sizes)
        except ValueError as error:
            self.report.problem(source, str(error), is_repaired=is_repaired)
            return None

    def _compare(self, loaded: Loaded, scanned: Facts, live: Live) -> set[int]:
        """Hold the index against the scan."""
        for digest, key, _ in scanned.mismatched:
            what = f"block {key.hex()[:16]}: its namespace {digest.hex()[:16]} is not known or has another geometry"
            self.report.note("segments", what)
        if not loaded.usable:
            self._note_damage({})
            return set()
        self._note_damage(loaded.facts.heads)
        loaded.facts.add_scans([self._tail(number, scan, loaded.facts) for number, scan in self._scans.items()])
        by_index = self._live(loaded.facts, "index", is_repaired=self._repair)
        if by_index is None:
            return set()
        theirs = {_name(loaded.facts, row): row for row in by_index.rows}
        ours = {_name(scanned, row): row for row in live.rows}
        for name, row in theirs.items():
            if name not in ours:
                what = f"block {name[1].hex()[:16]} is in the index, and no valid record of it is here"
                self.report.problem(_place(row), what, is_repaired=self._repair)
            elif (ours[name]["segment"], ours[name]["page"]) != (row["segment"], row["page"]):
                what = f"block {name[1].hex()[:16]} is here by the index, and at {_place(ours[name])} by its record"
                self.report.problem(_place(row), what, is_repaired=self._repair)
        for name, row in ours.items():
            if name not in theirs:
                what = f"block {name[1].hex()[:16]} is not in the index"
                self.report.problem(_place(row), what, is_repaired=self._repair)
        return set()

    def _tail(self, number: int, scan: Scan, facts: Facts) -> Scan:
        """What a start would scan of a segment: what lies behind its head."""
        head = facts.heads.get(number)
        if head is None or head.generation != scan.life.generation:
            return scan
        begin = scan.life.size_bytes if head.sealed else head.head
        return dataclasses.replace(scan, blocks=scan.blocks[scan.blocks["offset"] >= begin])

    def _note_damage(self, heads: dict[int, Head]) -> None:
        """Damaged records: before the head they are an inconsistency, behind it what a crash leaves."""
        for number, scan in self._scans.items():
            head = heads.get(number)
            covered = head.head if head is not None and head.generation == scan.life.generation else 0
            for offset in scan.damaged:
                place = f"segment {number} at {offset}"
                if offset < covered:
                    if self._repair:
                        self._wipe(number, offset)
                    self.report.problem(place, "a record is damaged", is_repaired=self._repair)
                else:
                    self.report.note(place, "a record is torn or damaged that was never flushed")

    def _wipe(self, number: int, offset: int) -> None:
        """Make a page that says it is a header, and is none, say nothing."""
        page = self._scratch.headers[:PAGE_BYTES]
        page[:] = 0
        file = self._segments[number].file
        write_exact(file, [page], offset, self._scratch)
        file.sync()

    def _report_damage(self, row: np.void, what: str) -> None:
        self.report.problem(_place(row), what, is_repaired=self._repair)

    async def _write_index(self, uuid: bytes, loaded: Loaded, scanned: Facts, live: Live, lost: set[int]) -> None:
        """Make an index of what is good; kills go with it, so that nothing that was left out comes back."""
        facts = Facts()
        facts.spaces = scanned.spaces
        kept = np.ones(len(live.rows), bool)
        kept[sorted(lost)] = False
        facts.add_blocks(live.rows[kept])
        facts.add_kills(scanned.kills)
        facts.kill_rows(live.rows[~kept])
        for number, scan in self._scans.items():
            if not scan.unreadable:
                facts.heads[number] = Head(scan.life.generation, scan.end, sealed=True)
        await IndexLog(self._files, uuid, loaded, Counter()).replace_all(facts)
        await self._files.close()

    async def _check_leftovers(self) -> None:
        names = [name for name in self._io.names(self._directory) if name in LEFTOVERS or is_unfinished(name)]
        for name in names:
            self.report.note(name, "left by something that was interrupted" + ("; removed" if self._repair else ""))
        if self._repair:
            await self._files.remove(names)


def _name(facts: Facts, row: np.void) -> tuple[bytes, bytes]:
    return facts.spaces.digests[row["space"]], row["key"].tobytes()


def _place(row: np.void) -> str:
    return f"segment {row['segment']} at {int(row['page']) * PAGE_BYTES}"
