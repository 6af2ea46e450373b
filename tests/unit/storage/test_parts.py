"""Parts that lie apart: read in one batch where the file takes it, and each in its own way where it does not."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage import aio
from kvtierd.storage.buffers import Scratch, address, page_buffer
from kvtierd.storage.io import SegmentFile
from kvtierd.storage.io_posix import PosixFile, PosixIo
from kvtierd.storage.parts import PartReads, read_parts
from kvtierd.testing.faulty_io import Fault, FaultyIo

PAGES = 300
"""More than a queue takes at once."""


@dataclasses.dataclass(slots=True, eq=False)
class PartRead:
    """A row of `PartReads`, and what became of it."""

    file: SegmentFile
    out: Bytes
    offset: int
    error: OSError | None = None


def read_all(reads: list[PartRead], scratch: Scratch) -> None:
    files = list({id(read.file): read.file for read in reads}.values())
    columns = PartReads(
        files,
        np.array([files.index(read.file) for read in reads], np.int64),
        np.array([address(read.out) for read in reads], np.uint64),
        np.array([read.out.size for read in reads], np.int64),
        np.array([read.offset for read in reads], np.int64),
    )
    errors = read_parts(columns, scratch)
    for i, read in enumerate(reads):
        read.error = errors.get(i)


@pytest.fixture
def data(tmp_path: Path) -> Bytes:
    found = np.random.default_rng(7).integers(0, 256, PAGES * PAGE_BYTES, np.uint8)
    found.tofile(tmp_path / "file")
    return found


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    found = Scratch()
    yield found
    found.close()


def direct(folder: Path) -> PosixFile:
    return PosixIo("direct").open(folder / "file")


def every_other_page(file: SegmentFile) -> list[PartRead]:
    return [PartRead(file, page_buffer(PAGE_BYTES), page * PAGE_BYTES) for page in range(0, PAGES, 2)]


def check(reads: list[PartRead], data: Bytes) -> None:
    for read in reads:
        assert read.error is None
        assert np.array_equal(read.out, data[read.offset : read.offset + read.out.size])


def test_all_parts_of_a_batch_come(tmp_path: Path, data: Bytes, scratch: Scratch) -> None:
    file = direct(tmp_path)
    try:
        reads = every_other_page(file)
        read_all(reads, scratch)
        check(reads, data)
        assert (scratch.queue is not None) == (platform.machine() in {"x86_64", "aarch64"})
        read_all(reads, scratch)  # a queue is used again
        check(reads, data)
    finally:
        file.close()


def test_a_system_without_queues_reads_one_by_one(
    tmp_path: Path, data: Bytes, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "_NUMBERS", {})
    file = direct(tmp_path)
    try:
        reads = every_other_page(file)
        read_all(reads, scratch)
        check(reads, data)
        assert scratch.queue is None
    finally:
        file.close()


def test_parts_of_several_files_and_unaligned_memory_are_mixed(tmp_path: Path, data: Bytes, scratch: Scratch) -> None:
    files: list[SegmentFile] = [direct(tmp_path), PosixIo("buffered").open(tmp_path / "file"), direct(tmp_path)]
    try:
        reads = []
        for page in range(30):
            memory = page_buffer(2 * PAGE_BYTES)
            out = memory[page % 2 * 8 :][:PAGE_BYTES]
            reads.append(PartRead(files[page % 3], out, page * PAGE_BYTES))
        read_all(reads, scratch)
        check(reads, data)
    finally:
        for file in files:
            file.close()


def test_what_cannot_be_read_fails_alone(tmp_path: Path, data: Bytes, scratch: Scratch) -> None:
    file, closed = direct(tmp_path), direct(tmp_path)
    closed.close()
    try:
        gone = PosixFile(os.open(tmp_path, os.O_RDONLY), PAGE_BYTES)  # a folder cannot be read
        reads = every_other_page(file)
        bad = PartRead(gone, page_buffer(PAGE_BYTES), 0)
        behind = PartRead(file, page_buffer(PAGE_BYTES), (PAGES + 8) * PAGE_BYTES)
        read_all([*reads[:40], bad, *reads[40:], behind], scratch)
        gone.close()
        check(reads, data)
        assert bad.error is not None
        assert bad.error.errno in {errno.EISDIR, errno.EINVAL}
        assert behind.error is not None
        assert "short read" in str(behind.error)
    finally:
        file.close()


def test_a_part_that_ends_short_is_an_error_and_not_a_part(tmp_path: Path, data: Bytes, scratch: Scratch) -> None:
    file = direct(tmp_path)
    try:
        across_the_end = PartRead(file, page_buffer(2 * PAGE_BYTES), (PAGES - 1) * PAGE_BYTES)
        whole = every_other_page(file)
        read_all([across_the_end, *whole], scratch)
        check(whole, data)
        assert across_the_end.error is not None
    finally:
        file.close()


def test_files_that_know_no_batches_fail_as_ever(tmp_path: Path, data: Bytes, scratch: Scratch) -> None:
    io = FaultyIo(PosixIo("direct"), lambda call: Fault(errno.EIO) if call.offset == 4 * PAGE_BYTES else None)
    file = io.open(tmp_path / "file")
    try:
        reads = every_other_page(file)
        read_all(reads, scratch)
        (failed,) = [read for read in reads if read.error is not None]
        assert failed.offset == 4 * PAGE_BYTES
        assert failed.error is not None
        assert failed.error.errno == errno.EIO
        check([read for read in reads if read is not failed], data)
    finally:
        file.close()


def test_a_refused_request_is_read_in_the_ordinary_way(
    tmp_path: Path, data: Bytes, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = direct(tmp_path)
    try:
        reads = every_other_page(file)
        read_all(reads[:2], scratch)
        monkeypatch.setattr(aio.AsyncReads, "read", lambda *_: np.full(len(reads), -errno.EAGAIN))
        read_all(reads, scratch)
        check(reads, data)
    finally:
        file.close()
