"""The block table: everything the daemon knows of a block, in columns, one row per block and no Python object.

Rows are numbers. The columns are fields of one 64-byte record, so that whoever has verified a block's key has the rest
of its state in the cache already; each column is a NumPy view with that stride. The maximum is reserved as virtual
memory at start; pages are taken as rows are first used.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.jit import compiled
from kvtierd.index.layout import RECORD_BYTES, ROW_NUMBERS, Keys, Rows, Words
from kvtierd.index.memory import Backing, reserve

NO_NAMESPACE = 0xFFFF
"""Namespace number of a row that holds no block."""
ROWS_MAX = 1 << 30
ROWS_AHEAD = 1 << 16
"""Rows whose memory is kept ready: as many as a busy second could take."""

RECORD = np.dtype(
    {
        "names": [
            "key", "host_slot", "gpu_slot", "segment", "extent_page", "last_access_s", "namespace", "heat", "flags",
            "marks", "moves", "next_row",
        ],
        "formats": [("u1", 32), "i4", "i4", "i4", "u4", "u4", "u2", "u2", "u1", "u1", "u2", "i4"],
        "offsets": [0, 32, 36, 40, 44, 48, 52, 54, 56, 57, 58, 60],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip

_WORDS32 = types.int32[:, ::1]
_SLOTS_AT, _SLOTS_END, _NAMESPACE_AT, _NEXT_AT = 8, 11, 13, 15
"""32-bit words of a record: host_slot to segment, the one whose lower half is the namespace, and next_row."""
_FRESH, _FREED = 0, 1
"""Places in the counts: rows that were ever in use, and those of them on the free list."""


@compiled(types.int64(_WORDS32, ROW_NUMBERS, types.int64[::1], ROW_NUMBERS))
def alloc_rows(words: npt.NDArray[np.int32], freed: Rows, counts: npt.NDArray[np.int64], out: Rows) -> int:
    """Take rows for `out`, freed ones first, and give them the state of a block that is nowhere yet."""
    taken = 0
    while taken < out.size:
        if counts[_FREED] > 0:
            counts[_FREED] -= 1
            row = freed[counts[_FREED]]
        elif counts[_FRESH] < words.shape[0]:
            row = np.int32(counts[_FRESH])
            counts[_FRESH] += 1
        else:
            break
        words[row, :] = 0
        words[row, _SLOTS_AT:_SLOTS_END] = -1
        words[row, _NEXT_AT] = -1
        out[taken] = row
        taken += 1
    return taken


@compiled(types.int64(_WORDS32, ROW_NUMBERS, types.int64[::1], ROW_NUMBERS))
def free_rows(words: npt.NDArray[np.int32], freed: Rows, counts: npt.NDArray[np.int64], rows: Rows) -> int:
    """Give rows back; returns how many, which is less than all at the first number that is no row in use."""
    for index, row in enumerate(rows):
        if row < 0 or row >= counts[_FRESH] or (words[row, _NAMESPACE_AT] & NO_NAMESPACE) == NO_NAMESPACE:
            return index
        words[row, _NAMESPACE_AT] = NO_NAMESPACE
        freed[counts[_FREED]] = row
        counts[_FREED] += 1
    return int(rows.size)


class BlockTable:
    """Columns over `capacity` rows; each is an array [capacity] (`key` [capacity, 32]) that may be read and written.

    key           uint8    block key
    namespace     uint16   the daemon's number of the namespace, 0..65534
    host_slot     int32    slot in the host tier, -1 none
    gpu_slot      int32    slot in the gpu tier, -1 none
    segment       int32    segment on disk, -1 none
    extent_page   uint32   offset in the segment / 4096
    block_sum     uint64   checksum of the block
    heat          uint16   heat at the last use, see kvtierd.policy.heat
    pins          uint16   how many hold a pin
    flags         uint8    the owner's: where the block is
    marks         uint8    the owner's: what became of it
    moves         uint16   the owner's
    next_row      int32    the block that followed it in the last request that named both, -1 none; a hint: the row
                           may have been given to another block since
    last_access_s uint32   when it was last used, seconds of the daemon's clock

    `records` is the same memory as words, [capacity, 8] uint64, for the page table; `words`
    is it as [capacity, 16] int32 and `octets` as [capacity, 64] uint8, for compiled code.
    Raises ValueError for a capacity outside 1..2**30.
    """

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= ROWS_MAX:
            raise ValueError(f"capacity is {capacity} rows; it must be in 1..{ROWS_MAX}")
        assert sys.byteorder == "little"
        self.capacity = capacity
        self.records: Words = reserve((capacity, RECORD_BYTES // 8), np.uint64)
        fields = self.records.view(RECORD)[:, 0]
        self.key: Keys = fields["key"]
        self.namespace: npt.NDArray[np.uint16] = fields["namespace"]
        self.host_slot: Rows = fields["host_slot"]
        self.gpu_slot: Rows = fields["gpu_slot"]
        self.segment: Rows = fields["segment"]
        self.extent_page: npt.NDArray[np.uint32] = fields["extent_page"]
        self.last_access_s: npt.NDArray[np.uint32] = fields["last_access_s"]
        self.heat: npt.NDArray[np.uint16] = fields["heat"]
        self.flags: npt.NDArray[np.uint8] = fields["flags"]
        self.marks: npt.NDArray[np.uint8] = fields["marks"]
        self.moves: npt.NDArray[np.uint16] = fields["moves"]
        self.next_row: Rows = fields["next_row"]
        self.block_sum: npt.NDArray[np.uint64] = reserve((capacity,), np.uint64)
        self.pins: npt.NDArray[np.uint16] = reserve((capacity,), np.uint16)
        self.words: npt.NDArray[np.int32] = self.records.view(np.int32)
        self.octets: npt.NDArray[np.uint8] = self.records.view(np.uint8)
        self.freed: Rows = reserve((capacity,), np.int32)
        """Free rows, as a stack."""
        self.counts = np.zeros(2, np.int64)
        """Rows that were ever in use, and how many of them are on the stack."""
        self._backed_until = 0
        self._backing = [Backing(array, ROWS_AHEAD) for array in (self.records, self.block_sum, self.pins, self.freed)]

    def __len__(self) -> int:
        """Rows in use."""
        return int(self.counts[_FRESH] - self.counts[_FREED])

    @property
    def used_rows(self) -> int:
        """Rows from 0 on that were ever in use: columns beyond are untouched, so passes over the table end here. Those
        of them that are free have namespace NO_NAMESPACE."""
        return int(self.counts[_FRESH])

    def alloc(self, count: int) -> Rows:
        """Take up to `count` rows, fewer when the table is full: [n] int32.

        They come with slots, segment and next_row -1 and everything else 0, except `block_sum`, which is as it was.
        """
        rows = np.empty(count, np.int32)
        taken = alloc_rows(self.words, self.freed, self.counts, rows)
        self.pins[rows[:taken]] = 0
        self.backed()
        return rows[:taken]

    def backed(self) -> None:
        """Have memory ready ahead of the rows in use; whoever took rows by itself calls it."""
        used = self.counts.item(_FRESH)
        if used >= self._backed_until:
            for backing in self._backing:
                backing.reached(used)
            self._backed_until = min(backing.trigger_row for backing in self._backing)

    def free(self, rows: Rows) -> None:
        """Give rows ([n] int32) back; their keys must be out of the page table. Raises ValueError for a row that is
        not in use; those before it are free then."""
        done = free_rows(self.words, self.freed, self.counts, rows)
        if done < rows.size:
            raise ValueError(f"row {rows[done]} is not in use; {len(self)} rows of {self.capacity} are")

    def bytes_per_block(self) -> int:
        """RAM per row, everything counted: record, checksum, pins, place on the free list."""
        return RECORD_BYTES + self.block_sum.itemsize + self.pins.itemsize + self.freed.itemsize
