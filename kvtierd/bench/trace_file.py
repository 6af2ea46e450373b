"""Request traces: what was asked of a cache, when, in blocks of a prefix.

A file has one JSON object a line. Used are `hash_ids` (one a block, in the order of the prefix), `timestamp`
(milliseconds) or `timestamp_us`, and `family`, which tells workloads in one file apart. Published by Mooncake (FAST'25)
and by LMCache; shared/traces has both. A file without timestamps is read as one request a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.bench.rows import BenchError

Blocks = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]

SECOND_NS = 1_000_000_000


class Line(msgspec.Struct):
    """What is read of a line."""

    hash_ids: list[int | str]
    timestamp: float | None = None
    timestamp_us: int | None = None
    family: str = ""

    def time_ns(self, number: int) -> int:
        """When the request came; `number` seconds where the file does not say."""
        if self.timestamp_us is not None:
            return self.timestamp_us * 1_000
        if self.timestamp is not None:
            return round(self.timestamp * 1e6)
        return number * SECOND_NS


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in the order of time. Request i has the blocks `blocks[starts[i]:starts[i + 1]]`, at `time_ns[i]`.

    Blocks are numbers 0..unique-1, each of which stands for its whole prefix. Shapes: blocks [accesses] int32, starts
    [requests + 1] int64, time_ns [requests] int64, from 0.
    """

    name: str
    blocks: Blocks
    starts: Positions
    time_ns: Positions
    unique: int

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.starts) - 1

    @property
    def accesses(self) -> int:
        """Blocks of all requests."""
        return len(self.blocks)


def make_trace(name: str, requests: Iterable[tuple[int, Iterable[int | str]]]) -> Trace:
    """Number the blocks of (time in ns, block names in prefix order), sorted by time.

    The same name after another prefix is another block: that is what its KV depends on. Raises ValueError when there is
    no request with a block.
    """
    numbers: dict[tuple[int, int | str], int] = {}
    flat: list[int] = []
    starts, times = [0], []
    for time_ns, names in sorted(requests, key=lambda request: request[0]):
        parent = -1
        for block in names:
            parent = numbers.setdefault((parent, block), len(numbers))
            flat.append(parent)
        if len(flat) > starts[-1]:
            starts.append(len(flat))
            times.append(time_ns)
    if not times:
        raise ValueError(f"{name} has no request with a block")
    time = np.array(times, np.int64)
    return Trace(name, np.array(flat, np.int32), np.array(starts, np.int64), time - time[0], len(numbers))


def read_traces(path: Path) -> list[Trace]:
    """The trace in a file, and after it one of each family where the file has several. Raises BenchError."""
    lines = _read_lines(path)
    requests = [(line.time_ns(number), line) for number, line in enumerate(lines)]
    families = sorted({line.family for line in lines})
    chosen = [("", requests)]
    if len(families) > 1:
        chosen += [(f":{family}", [r for r in requests if r[1].family == family]) for family in families]
    try:
        return [make_trace(path.stem + suffix, ((t, line.hash_ids) for t, line in some)) for suffix, some in chosen]
    except ValueError as error:
        raise BenchError(f"{path}: {error}") from error


def _read_lines(path: Path) -> list[Line]:
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    try:
        with path.open("rb") as file:
            lines.extend(decoder.decode(text) for text in file if text.strip())
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise BenchError(
            f"{path}, request {len(lines) + 1}: {error}; a request is a JSON object with hash_ids"
        ) from error
    return lines
