"""Host memory that is registered with CUDA: which pieces there are, and where the device sees them.

A copy that crosses from one registered piece into the next is refused by CUDA, therefore copies are cut at their edges.
A kernel may cross, where the device sees both in a row.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import threading

import numpy as np

from kvtierd.gpu.attend import Array


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Registered host memory: where it begins and ends, and where the device sees its begin."""

    begin: int
    end: int
    pointer: int


class Pins:
    """The pieces, by address. May be used from several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[Piece] = []
        self._runs: Array | None = None
        """Begins, ends, and what is to be added for the device's address (modulo 2^64), of pieces that lie in a row
        for both; None where it is to be made anew, which takes milliseconds for a TiB."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        with self._lock:
            return sum(piece.end - piece.begin for piece in self._pieces)

    def add(self, piece: Piece) -> None:
        """Another piece, which overlaps none that is there."""
        with self._lock:
            bisect.insort(self._pieces, piece, key=lambda kept: kept.begin)
            self._runs = None

    def take(self, begin: int = 0, end: int = 1 << 64) -> list[Piece]:
        """Remove the pieces that begin in a range, by default all; these."""
        with self._lock:
            gone = [piece for piece in self._pieces if begin <= piece.begin < end]
            self._pieces = [piece for piece in self._pieces if not begin <= piece.begin < end]
            self._runs = None
        return gone

    def cut(self, begin: int, end: int) -> list[tuple[int, int]]:
        """A range cut at the edges of pieces."""
        with self._lock:
            pieces = self._within(begin, end)
        edges = {edge for piece in pieces for edge in (piece.begin, piece.end) if begin < edge < end}
        bounds = [begin, *sorted(edges), end]
        return [(at, after) for at, after in itertools.pairwise(bounds) if after > at]

    def mapped(self, addresses: Array, sizes: Array) -> Array:
        """Where the device sees these ranges of host memory, uint64 [n]; 0 for each that it does not see in a row.

        addresses, sizes: uint64 [n].
        """
        with self._lock:
            if self._runs is None:
                self._runs = _runs_of(self._pieces)
            begins, ends, shifts = self._runs
        if not begins.size:
            return np.zeros(addresses.size, np.uint64)
        place = np.maximum(np.searchsorted(begins, addresses, side="right") - 1, 0)
        inside = (addresses >= begins[place]) & (addresses + sizes <= ends[place])
        return np.where(inside, addresses + shifts[place], np.uint64(0))

    def _within(self, begin: int, end: int) -> list[Piece]:
        """Pieces that a range touches, in order. The lock is held."""
        first = max(bisect.bisect_right(self._pieces, begin, key=lambda piece: piece.begin) - 1, 0)
        last = bisect.bisect_left(self._pieces, end, key=lambda piece: piece.begin)
        return [piece for piece in self._pieces[first:last] if piece.end > begin]


def _runs_of(pieces: list[Piece]) -> Array:
    runs: list[list[int]] = []
    for piece in pieces:
        shift = (piece.pointer - piece.begin) % (1 << 64)
        if runs and runs[-1][1:] == [piece.begin, shift]:
            runs[-1][1] = piece.end
        else:
            runs.append([piece.begin, piece.end, shift])
    return np.array(runs, np.uint64).reshape(-1, 3).T.copy()
