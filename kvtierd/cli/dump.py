"""`kvtierctl dump SEGMENT`: the records of a segment file, one line each."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from kvtierd.cli.errors import CommandError, Failure
from kvtierd.core.checksum import Bytes
from kvtierd.core.stored_form import Codec
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage import superblock
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.headers import read_headers
from kvtierd.storage.layout import segment_id
from kvtierd.storage.payloads import read_record, record_problem
from kvtierd.storage.record import Kind, Life, RecordHeader, stored_kills, stored_namespace
from kvtierd.storage.scan import Scanner


class ReadOnlyFile:
    """A segment's file that is only read, so that it may be another process's."""

    alignment = 1

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size_bytes(self) -> int:
        """Length of the file."""
        return os.fstat(self._fd).st_size

    def allocated_bytes(self) -> int:
        """What it takes on the disk."""
        return os.fstat(self._fd).st_blocks * 512

    def read(self, buffers: Sequence[Bytes], offset: int) -> int:
        """One preadv."""
        return os.preadv(self._fd, [buffer.data for buffer in buffers], offset)

    def write(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Never."""
        raise PermissionError(f"{len(buffers)} buffers at {offset}: the file is open for reading only")

    def sync(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """Close."""
        os.close(self._fd)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and whether payloads are read."""
    parser.add_argument("segment", type=Path, metavar="SEGMENT", help="file segment-NNNNNN of a store")
    parser.add_argument("--verify-data", action="store_true", help="read every block and verify its checksums")


def run(args: argparse.Namespace) -> int:
    """Print the header and each valid record; a daemon may use the store meanwhile."""
    number = segment_id(args.segment.name)
    if number is None:
        raise CommandError(Failure.USAGE, f"{args.segment} is no segment; its name would be like segment-000000")
    try:
        file = ReadOnlyFile(args.segment)
    except OSError as error:
        raise CommandError(Failure.IO, f"cannot open {args.segment}: {error.strerror}") from error
    try:
        _dump(file, number, _uuid(args.segment.parent), verify=args.verify_data)
    finally:
        file.close()
    return 0


def _uuid(directory: Path) -> bytes:
    """Of the store that the segment lies in."""
    try:
        data = (directory / superblock.NAME).read_bytes()
    except OSError as error:
        raise CommandError(Failure.IO, f"cannot read the superblock in {directory}: {error.strerror}") from error
    copies = [superblock.decode(data[at : at + PAGE_BYTES]) for at in (0, PAGE_BYTES)]
    valid = [copy for copy in copies if copy is not None]
    if not valid:
        raise CommandError(Failure.IO, f"the superblock in {directory} has no valid copy")
    return max(valid, key=lambda copy: copy.epoch).uuid


def _dump(file: ReadOnlyFile, number: int, uuid: bytes, *, verify: bool) -> None:
    scratch = Scratch()
    header = read_headers(file, number, uuid, scratch)
    if header.problem:
        print(f"{'header':<10} {header.problem}")
    life = header.life
    if life is None:
        return
    free = ", free" if life.free else ""
    print(
        f"{'segment':<10} {number}, format {life.version}, generation {life.generation}, {life.size_bytes} bytes{free}"
    )

    def show(record: RecordHeader, view: Bytes) -> None:
        print(describe(record, view) + (_verified(file, life, record) if verify and record.kind is Kind.BLOCK else ""))

    scan = Scanner(file, life, scratch, show).scan()
    for offset in scan.damaged:
        print(f"{'damaged':<10} {offset:>12}")
    print(f"{'end':<10} {scan.end:>12}  {len(scan.blocks)} blocks, {scan.unreadable} unreadable pages")


def describe(record: RecordHeader, view: Bytes) -> str:
    """One line: kind, offset, length, sequence number, and what it is about."""
    start = f"{record.kind.name.lower():<10} {record.offset:>12} {record.length:>10} {record.sequence:>16}  "
    if record.kind is Kind.NAMESPACE:
        namespace = stored_namespace(view, record)
        return f"{start}{record.namespace.hex()[:16]} {namespace.model if namespace is not None else '?'}"
    if record.kind is Kind.TOMBSTONE:
        keys = [row["key"].tobytes().hex()[:16] for row in stored_kills(view, record)]
        return f"{start}{len(keys)} keys: {' '.join(keys[:4])}{' …' if len(keys) > 4 else ''}"
    again = f", first stored as {record.origin}" if record.origin != record.sequence else ""
    shape = f"{record.count} layers of {record.layer_bytes} bytes, {Codec(record.codec).name.lower()}"
    return f"{start}{record.key.hex()[:16]} of {record.namespace.hex()[:16]}, {shape}{again}"


def _verified(file: ReadOnlyFile, life: Life, record: RecordHeader) -> str:
    try:
        view = read_record(file, record.offset, record.length, Scratch())
    except OSError as error:
        return f"  UNREADABLE ({error.strerror or error})"
    _, problem = record_problem(view, life, record.offset)
    return f"  DAMAGED ({problem})" if problem else "  whole"
