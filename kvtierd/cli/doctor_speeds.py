"""Measured speeds of each hop: memory, checksum, disk, and a round trip to the daemon."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtierd.cli.doctor_disk import existing
from kvtierd.cli.finding import Check, Finding, Verdict
from kvtierd.config.schema import Settings
from kvtierd.core.checksum import Bytes, layer_sums
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB, format_bytes
from kvtierd.daemon.directories import Places
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.endpoint import SOCKET_NAME

FILE_BYTES = 64 * MIB
PIECE_BYTES = 4 * MIB
PROBE_NAME = "probe-speed"
SLOW_DISK_BYTES_S = 500e6
"""Below this a block comes from the disk about as slowly as a GPU computes it again."""
SLOW_ROUND_TRIP_US = 1000


def copies(_settings: Settings) -> Iterator[Finding]:
    """Host memory to host memory, on one thread."""
    source, target = _memory(FILE_BYTES), _memory(FILE_BYTES)

    def copy() -> None:
        target[:] = source

    yield Finding("host to host", Verdict.OK, f"{_speed(copy, FILE_BYTES)}/s on one thread")


def checksums(_settings: Settings) -> Iterator[Finding]:
    """The hash that every block goes through."""
    shape = Geometry(block_size=128, layers=16, kv_heads=8, k_dim=64, v_dim=64)
    block = _memory(shape.slot_bytes)
    speed = _speed(lambda: layer_sums(block, shape), shape.slot_bytes)
    yield Finding("checksum", Verdict.OK, f"{speed}/s on one thread")


def disk(settings: Settings) -> Iterator[Finding]:
    """Write, sync and read a file where the segments are, past the page cache where that works."""
    folder = existing(settings)
    if folder is None or not os.access(folder, os.W_OK | os.X_OK):
        return
    path = folder / PROBE_NAME
    memory = _memory(PIECE_BYTES)
    try:
        fd, how = _open(path)
        try:
            write_s = _time(lambda: _each_piece(lambda at: os.pwritev(fd, [memory.data], at), fd))
            read_s = _time(lambda: _each_piece(lambda at: os.preadv(fd, [memory.data], at)))
        finally:
            os.close(fd)
    finally:
        path.unlink(missing_ok=True)
    write, read = FILE_BYTES / write_s, FILE_BYTES / read_s
    text = f"writes {format_bytes(write)}/s, reads {format_bytes(read)}/s, one request at a time, {how}"
    if min(write, read) < SLOW_DISK_BYTES_S:
        yield Finding("disk", Verdict.WARN, text, "a GPU may compute blocks faster than they come from here")
    else:
        yield Finding("disk", Verdict.OK, text)


def round_trip(settings: Settings) -> Iterator[Finding]:
    """To the daemon and back, if one runs."""
    endpoint = f"ipc://{Places.of(settings).tenant / SOCKET_NAME}"
    with contextlib.suppress(Unavailable, ValueError):
        with Client(endpoint, timeout_s=2.0, arena=False, name="kvtierctl doctor") as client:
            microseconds = statistics.median(client.ping() for _ in range(50)) / 1000
        slow = microseconds > SLOW_ROUND_TRIP_US
        advice = "schedulers of engines wait for it: are there processors left for the daemon?" if slow else ""
        yield Finding(
            "round trip", Verdict.WARN if slow else Verdict.OK, f"{microseconds:.0f} us to the daemon", advice
        )


CHECKS: tuple[Check, ...] = (
    ("host to host", copies),
    ("checksum", checksums),
    ("disk", disk),
    ("round trip", round_trip),
)


def _memory(size: int) -> Bytes:
    """Page-aligned memory of which every page is there."""
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory[:] = 0x5A
    return memory


def _open(path: Path) -> tuple[int, str]:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), "with O_DIRECT"
    except OSError:
        return os.open(path, flags, 0o600), "through the page cache"


def _each_piece(transfer: Callable[[int], int], fd: int = -1) -> None:
    for at in range(0, FILE_BYTES, PIECE_BYTES):
        if transfer(at) != PIECE_BYTES:
            raise OSError(f"a transfer of {PIECE_BYTES} bytes came back short")
    if fd >= 0:
        os.fdatasync(fd)


def _time(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def _speed(work: Callable[[], object], size: int) -> str:
    """Bytes a second of the best of some rounds; the first warms up."""
    return format_bytes(size / min(_time(work) for _ in range(6)))
