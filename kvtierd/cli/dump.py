"""`kvtierctl dump SEGMENT`: the records of a segment file, one line each."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from kvtierd.cli.errors import CommandError, Failure
from kvtierd.core.checksum import Bytes
from kvtierd.core.stored_form import Codec
from kvtierd.storage import superblock
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.headers import read_headers
from kvtierd.storage.io_posix import PosixFile, open_to_read
from kvtierd.storage.layout import segment_id
from kvtierd.storage.payloads import read_record, record_problem
from kvtierd.storage.record import Kind, Life, RecordHeader, stored_kills, stored_namespace
from kvtierd.storage.scan import Scanner


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
        file = open_to_read(args.segment)
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
        found = asyncio.run(superblock.load(directory))
    except OSError as error:
        raise CommandError(Failure.IO, f"cannot read the superblock in {directory}: {error.strerror}") from error
    if found is None:
        raise CommandError(Failure.IO, f"{directory} has no superblock with a valid copy")
    return found.uuid


def _dump(file: PosixFile, number: int, uuid: bytes, *, verify: bool) -> None:
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


def _verified(file: PosixFile, life: Life, record: RecordHeader) -> str:
    try:
        view = read_record(file, record.offset, record.length, Scratch())
    except OSError as error:
        return f"  UNREADABLE ({error.strerror or error})"
    _, problem = record_problem(view, life, record.offset)
    return f"  DAMAGED ({problem})" if problem else "  whole"
